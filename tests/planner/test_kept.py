"""Memory of a played step: what recomputation does not keep, and what waits outside the device."""

from __future__ import annotations

import pytest

from phalanx.job import load_job
from phalanx.models.spec import num_params
from phalanx.planner.make import Planned, make_plan
from phalanx.planner.simulate import simulate
from tests.tiny_run import tiny_base

LAYERS = 5
CONFIG = tiny_base(num_layers=LAYERS)
TOKENS = 64


def planned(recompute: str, on: str = "1xh100", **flags) -> Planned:
    keys = {"model.name": "tiny", "train.method": "full", "train.item_tokens": [TOKENS] * 4}
    keys |= {"plan.recompute": recompute, "plan.mesh": {"replicate": 1}, "plan.data": "replicate"}
    keys |= {name.replace("__", "."): value for name, value in flags.items()}
    return make_plan(load_job(None, keys), CONFIG, on)


def layers_keep(plan: Planned) -> float:
    """Bytes per token of all layers."""
    units = [unit for unit in plan.work.units if ".layers." in unit.name]
    return sum(block.saved_bytes_per_token for unit in units for block in unit.blocks)


def test_a_layer_that_is_computed_again_keeps_its_input_and_needs_one_layer_beside_them():
    none, full = planned("none"), planned("full")
    row_bytes = CONFIG.hidden_size * none.work.param_bytes
    assert layers_keep(full) == pytest.approx(LAYERS * row_bytes)
    assert full.again_bytes == pytest.approx(TOKENS * layers_keep(none) / LAYERS)
    assert none.again_bytes == 0.0


def test_peaks_fall_with_what_is_given_up():
    peaks = [simulate(planned(each)).peak_bytes for each in ("none", "selective", "full")]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 3


def test_a_weight_pass_of_its_own_needs_all_layers_of_its_stage():
    flags = {"on": "2xh100", "plan__mesh": {"pp": 2}, "plan__data": "", "plan__stages": [2, 3]}
    one = planned("full", **flags, plan__pipeline="1f1b")
    all_layers = planned("full", **flags, plan__pipeline="zero_bubble")
    assert all_layers.again_bytes == pytest.approx(3 * one.again_bytes)


def test_moments_that_wait_outside_are_not_held():
    here, away = planned("none"), planned("none", plan__offload="host")
    states = 12 if here.work.param_bytes < 4 else 8
    assert here.held_bytes(0) - away.held_bytes(0) == states * num_params(CONFIG)
