"""Closed forms against values that papers print or that were worked out by hand."""

import numpy as np
import pytest

from phalanx.cost.training_bubble import bubble_micro_batches, stage_layers
from phalanx.cost.training_formulas import (
    bubble_frac,
    gpt_params,
    hardware_flops,
    model_flops,
    training_days,
    utilisation,
)
from phalanx.cost.training_plans import SCHEDULES
from phalanx.errors import PlanError

A100_PEAK = 312e12
# arXiv 2205.05198, table 5: layers, hidden, batch, devices, seconds, printed MFU
TABLE_5 = [
    (48, 6144, 4, 8, 1.10, 41.7),  # the paper prints 41.5
    (96, 12288, 64, 64, 13.75, 51.4),
    (105, 20480, 280, 280, 37.83, 56.0),
    (128, 25600, 512, 512, 71.49, 56.3),
]


@pytest.mark.parametrize(("layers", "hidden", "batch", "devices", "step_s", "printed"), TABLE_5)
def test_mfu_column_of_table_5(layers, hidden, batch, devices, step_s, printed):
    flops = model_flops(batch, 2048, layers, hidden, 51200)
    assert 100 * utilisation(flops, step_s, devices, A100_PEAK) == pytest.approx(printed, abs=0.3)


@pytest.mark.parametrize(
    ("layers", "hidden", "printed"),
    [(24, 2304, 1.7), (48, 8192, 39.1), (96, 12288, 174.6), (128, 25600, 1008.0)],
)
def test_parameters_of_gpt_models(layers, hidden, printed):
    assert gpt_params(layers, hidden, 51200, 2048) / 1e9 == pytest.approx(printed, abs=0.06)


def test_days_of_training_runs():
    assert training_days(300e9, 175e9, 1024, 140e12) == pytest.approx(33.9, abs=0.05)
    assert training_days(450e9, 1008e9, 3072, 163e12) == pytest.approx(83.9, abs=0.1)
    assert training_days(450e9, 1000e9, 3072, 163e12) == pytest.approx(83.2, abs=0.05)


def test_hardware_flops_by_recomputation():
    sizes = (4, 2048, 48, 6144, 51200)
    none, selective, full = (hardware_flops(*sizes, kind) for kind in ("none", "selective", "full"))
    assert none == model_flops(*sizes)
    # s / 3h instead of s / 6h: one more s / 6h = 1 / 18
    assert selective - none == pytest.approx(72 * 4 * 48 * 2048 * 6144**2 / 18)
    layers_only = model_flops(4, 2048, 48, 6144, 0)
    assert full - none == pytest.approx(layers_only / 3)


def test_unknown_recomputation_is_refused_with_the_kinds():
    with pytest.raises(PlanError, match="no such kind"):
        hardware_flops(1, 1, 1, 1, 1, "some")


def test_bubbles_of_llama_3():
    # arXiv 2407.21783 with 8 chunks: 12 % at 16 micro-batches, 5 to 6 % at 32
    assert bubble_frac(16, 16, 8) == pytest.approx(0.1172, abs=1e-4)
    assert bubble_frac(16, 32, 8) == pytest.approx(0.0586, abs=1e-4)


@pytest.mark.parametrize(
    ("schedule", "idle"),
    [
        ("gpipe", 7.0),
        ("1f1b", 7.0),
        ("interleaved", 3.5),
        ("zero-bubble", 7 / 3),
        ("zbv", 7 / 6),
        ("dualpipe", 2.0),
    ],
)
def test_idle_time_of_schedules_at_eight_stages(schedule, idle):
    assert bubble_micro_batches(SCHEDULES.index(schedule), 8, 2) == pytest.approx(idle)


@pytest.mark.parametrize("schedule", range(len(SCHEDULES)))
def test_one_stage_has_no_bubble(schedule):
    assert bubble_micro_batches(schedule, 1, 1) == 0


def test_layers_that_do_not_divide_go_to_middle_stages():
    # Llama 3: 126 layers, 8 ranks of 8 chunks: two chunks of 64 hold one layer
    assert [int(n) for n in stage_layers(126, 8, 8)] == [16, 15]
    assert [int(n) for n in stage_layers(126, 16, 8)] == [8, 7]
    assert [int(n) for n in stage_layers(80, 4, 5)] == [20, 20]
    assert [int(n) for n in stage_layers(61, 1, 1)] == [61, 61]


@pytest.mark.parametrize("pipeline", [1, 2, 3, 8])
@pytest.mark.parametrize("virtual", [1, 3])
def test_fullest_stage_holds_no_less_than_the_mean(pipeline, virtual):
    fullest, last = stage_layers(61, np.array([pipeline]), virtual)
    assert fullest[0] >= 61 / pipeline >= last[0]
