"""The stages of a whole run, from rates that a reader can multiply."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.cost.local_shapes import local_config
from phalanx.cost.training import Workload, rate_key
from phalanx.models.operators import operators
from phalanx.planner.stages import RunWork, forward_rates, run_stages, stage_report
from tests.models.families import tiny_config

CONFIG = tiny_config("qwen3")
WORK = Workload(
    num_steps=7, num_items=2.0, tokens=96.0, counted=48.0, longest_row=64, row_tokens=48,
    num_trained=1, row_counted=32, document_tokens=24,
)  # fmt: skip
RUN = RunWork(
    elapsed_s=3.0, step_s=2.0, num_evaluations=2, held_out_tokens=100, held_out_counted=50,
    num_samples=3, sample_tokens=10, decode_s=0.5, weight_bytes=2e9, parity_tokens=10,
    parity_forms=1, parity_wide=2, load_s=4.0,
)  # fmt: skip


def rates(forward_s: float, head_s: float) -> dict[str, float]:
    found = {"start": 1.5, "add": 1.0}
    for op in operators(CONFIG, document_tokens=WORK.document_tokens):
        seconds = head_s if op.op == "head" else forward_s
        found |= {f"{rate_key(op, CONFIG)}.F": seconds, f"{rate_key(op, CONFIG)}.B": 99.0}
    return found


def test_forward_rates_count_every_operator_once_and_no_backward_pass():
    num = sum(op.op != "head" for op in operators(CONFIG, document_tokens=24))
    token_s, target_s = forward_rates(CONFIG, WORK, rates(0.001, 0.25))
    assert token_s == pytest.approx(num * 0.001)
    assert target_s == pytest.approx(0.25)


def test_ranks_that_share_a_token_are_priced_by_what_each_of_them_measured():
    """Rates have the shapes of a rank: half of the heads, channels and vocabulary."""
    local, shared = local_config(CONFIG, 2), replace(WORK, tensor_degree=2, context_degree=2)
    found, num = {"add": 1.0}, 0
    for op in operators(local, document_tokens=WORK.document_tokens):
        found[f"{rate_key(op, local)}.F"] = 0.25 if op.op == "head" else 0.001
        found[f"{rate_key(op, local)}.B"] = 99.0
        num += op.op != "head"
    token_s, target_s = forward_rates(CONFIG, shared, found)
    assert token_s == pytest.approx(2 * num * 0.001), "a context rank has half of a row's tokens"
    assert target_s == pytest.approx(2 * 0.25)


def test_stages_are_the_products_that_they_name():
    stages = run_stages(RUN, CONFIG, WORK, rates(0.0, 0.25), num_ranks=2)
    assert stages == pytest.approx({
        "before": 3.0, "start": 4.5, "load": (2 + 3 + 1) * 2.0, "evaluate": 2 * 50 * 0.25 / 2,
        "sample": 2 * 3 * 10 * 2 * 0.5, "train": 14.0, "export": 4.0,
        "parity": 10 * 0.25 * (1 + 2 * 2), "serve": 4.0,
    })  # fmt: skip
    row = stage_report(stages).rows[0]
    assert row.quantity == "time/whole run"
    assert row.value == pytest.approx(sum(stages.values()))
    assert "train 14 s" in row.note and "assumption" in row.note


def test_a_run_without_held_out_rows_does_not_evaluate():
    run = replace(RUN, num_evaluations=0, held_out_tokens=0, held_out_counted=0, num_samples=0)
    stages = run_stages(run, CONFIG, WORK, rates(0.1, 0.1), num_ranks=1)
    assert stages["evaluate"] == stages["sample"] == 0.0
