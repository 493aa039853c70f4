"""Operators of a profiled step: our own kernels are listed, what they call is not."""

from __future__ import annotations

from time import perf_counter, sleep

import torch
from torch import nn

from phalanx.engines.metrics import StepTrace
from phalanx.engines.operator_profile import OperatorProfile
from phalanx.engines.trainer_step import StepSpans, Work
from phalanx.ops.norm import rms_norm
from phalanx.worlds.torch_log import SpanLog


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6, bias=False)
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x_SD):
        return rms_norm(self.inner(x_SD), self.weight, 1e-6)


def test_operators_carry_their_layer_in_both_passes():
    layer, trace = Layer(), StepTrace(0, "job")
    profile = OperatorProfile(0, {"model.layers.0": layer}, torch.device("cpu"))
    with profile.step(3, trace):
        layer(torch.ones(4, 6, requires_grad=True)).sum().backward()
    rows = trace.build().where(step=3, layer="model.layers.0")
    forward = rows.where(phase="").column("operator").tolist()
    backward = rows.where(phase="B").column("operator").tolist()
    assert forward.index("aten::linear") < forward.index("_RmsNorm")
    assert backward.index("_RmsNormBackward") < backward.index("aten::mm")
    assert (rows.columns["dur_s"] >= 0).all()


def test_what_an_operator_calls_is_inside_of_it():
    layer, trace = Layer(), StepTrace(0, "job")
    with OperatorProfile(0, {"unit": layer}, torch.device("cpu")).step(0, trace):
        layer(torch.ones(4, 6))
    rows = trace.build().where(layer="unit")
    ends = rows.columns["start_s"] + rows.columns["dur_s"]
    starts = rows.columns["start_s"]
    for at in range(len(rows)):
        inside = (starts >= starts[at]) & (ends <= ends[at])
        assert inside.sum() == 1, "outermost operators do not overlap"
    assert "aten::addmm" not in rows.column("operator").tolist()


class RingAttention(torch.autograd.Function):
    """Stands for attention that ranks share, whose kernels are called past ATen."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_attention_that_ranks_share_is_listed_in_both_passes():
    trace = StepTrace(0, "job")
    with OperatorProfile(0, {}, torch.device("cpu")).step(0, trace):
        RingAttention.apply(torch.ones(3, requires_grad=True)).sum().backward()
    operators = trace.build().where(step=0).column("operator").tolist()
    assert {"RingAttention", "RingAttentionBackward"} <= set(operators)


def test_parts_of_a_step_count_from_the_moment_from_which_its_operators_count():
    """They are noted by an older log: a trace that shifts them lies in every picture."""
    log, device = SpanLog(torch.device("cpu")), torch.device("cpu")
    sleep(0.05)
    trace = StepTrace(0, "job")
    with OperatorProfile(0, {}, device).step(0, trace):
        before_s = perf_counter() - trace.origin_s
        for _ in log.follow(iter([Work("F", 0), Work("O", -1)])):
            torch.ones(8).sum()
        after_s = perf_counter() - trace.origin_s
    trace.add_step(0, StepSpans(log, 0, None))
    rows = trace.build()
    for lane in ("step", "compute"):
        found = rows.where(lane=lane)
        ends_s = found.columns["start_s"] + found.columns["dur_s"]
        assert before_s <= found.columns["start_s"].min() <= ends_s.max() <= after_s
