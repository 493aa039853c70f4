"""Operators of a profiled step: our own kernels are listed, what they call is not."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.engines.metrics import StepTrace
from phalanx.engines.operator_profile import OperatorProfile
from phalanx.ops.norm import rms_norm


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
