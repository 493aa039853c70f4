"""The table of efficiencies: what it falls back to, and that its numbers mean something."""

import json
import math
from dataclasses import asdict
from importlib.resources import files

import numpy as np
import pytest

from phalanx.cost.training_efficiency import (
    SHARES,
    TABLE,
    StepEfficiency,
    efficiency_of,
    family_of,
    moved,
    widened,
)
from phalanx.cost.training_plans import TrainingPlans
from phalanx.hardware import machine_names, read_machine

TABLE_CONTENT = json.loads((files("phalanx.cost") / TABLE).read_text())
# medians of the relative error on rows that a fit has not seen
TARGETS = {"vendor-tuned": 0.06, "moe": 0.12, "lora": 0.12}


def found(machine="h100", precision="bf16", software="megatron", method="pretrain", experts=False):
    plans = TrainingPlans(row_tokens=4096, precision=precision, software=software, method=method)
    return efficiency_of(read_machine(machine), plans, experts)


@pytest.mark.parametrize("machine", machine_names())
@pytest.mark.parametrize("software", ["megatron", "torch", "nanotron", "maxtext", "unheard-of:9"])
def test_every_machine_and_software_has_numbers_that_make_sense(machine, software):
    for precision in ("bf16", "fp8"):
        efficiency = asdict(found(machine, precision, software).efficiency)
        assert all(np.isfinite(value) and value > 0 for value in efficiency.values())
        assert all(efficiency[name] < 1 for name in SHARES)
        assert 0.5 < efficiency["pace"] < 2
        assert efficiency["attention"] < 1
        assert efficiency["product"] < 1.3  # over a measured rate that is no upper bound


def test_without_a_generation_the_newest_counts():
    generations = [
        key for key in TABLE_CONTENT["levels"]["software"] if key.startswith("megatron:")
    ]
    newest = max(generations, key=lambda key: float(key.split(":")[1]))
    assert found(software="megatron").efficiency == found(software=newest).efficiency


def test_an_unknown_generation_takes_the_one_before_it():
    assert found(software="megatron:99.01").efficiency == found(software="megatron").efficiency
    known = TABLE_CONTENT["levels"]["software"]
    assert "megatron:25.10" not in known
    between = found(software="megatron:25.10")
    assert between.efficiency == found(software="megatron:25.09").efficiency


def test_software_without_rows_runs_the_kernels_of_another():
    assert found(software="phalanx").efficiency == found(software="torch").efficiency
    assert family_of("torchtitan:2.6") == "torch"
    assert family_of("megatron:21.04") == family_of("megatron:2022") == "megatron-2022"
    assert family_of("megatron:25.04") == family_of("megatron") == "megatron"


def test_an_accelerator_without_rows_takes_its_generation():
    missing = [
        name for name in machine_names() if name not in TABLE_CONTENT["levels"]["accelerator"]
    ]
    names = [name for name in missing if read_machine(name).generation == "Hopper"]
    assert names
    lent = found(names[0])
    assert names[0] in lent.absent
    assert "Hopper" in [level.key for level in lent.levels]
    assert names[0] in lent.describe()


def test_a_bar_widens_with_each_level_that_has_no_rows():
    assert widened(0.9, 1.2, []) == (0.9, 1.2)
    one = widened(0.9, 1.2, ["accelerator"])
    two = widened(0.9, 1.2, ["accelerator", "precision"])
    assert two[0] < one[0] < 0.9 and two[1] > one[1] > 1.2
    # two independent errors of which nine of ten lie in +-9 % and in +-13.2 % (0.08 x 1.645)
    assert math.log(widened(1 / 1.09, 1.09, ["accelerator"])[1]) == pytest.approx(
        math.hypot(math.log(1.09), 0.08 * 1.645), rel=1e-3
    )


def test_an_accelerator_that_nobody_measured_has_a_wider_bar_than_its_siblings():
    missing = [
        name
        for name in machine_names()
        if name not in TABLE_CONTENT["levels"]["accelerator"]
        and read_machine(name).generation == "Hopper"
    ]
    sibling, lent = found("h100"), found(missing[0])
    assert sibling.bar == lent.bar
    assert lent.low < sibling.low and lent.high > sibling.high


def test_description_says_how_many_rows_and_what_the_bar_is():
    text = found(software="megatron:25.09", precision="fp8").describe()
    rows = TABLE_CONTENT["levels"]["accelerator"]["h100"]["rows"]
    assert f"h100 ({rows} rows)" in text
    assert "90 % bar of dense with megatron, cross-validated" in text


@pytest.mark.parametrize("method", ["pretrain", "lora"])
@pytest.mark.parametrize("experts", [False, True])
def test_bars_stand_around_one(method, experts):
    bar = found(method=method, experts=experts)
    assert 0 < bar.low < 1 < bar.high


@pytest.mark.parametrize("factor", [0.1, 1.0, 30.0])
def test_a_share_stays_a_share_whatever_moves_it(factor):
    assert 0 < moved("data_hidden", 0.8, factor) < 1
    assert moved("data_hidden", 0.8, 1.0) == pytest.approx(0.8)
    assert moved("launch_s", 1e-5, factor) == pytest.approx(1e-5 * factor)


@pytest.mark.parametrize(("row_class", "target"), TARGETS.items())
def test_unseen_rows_are_met(row_class, target):
    scores = TABLE_CONTENT["cross_validation"]["classes"][row_class]
    assert scores["median"] <= target
    assert 0.8 <= scores["in_bar"] <= 0.97


def test_unseen_plans_keep_their_order():
    sources = TABLE_CONTENT["cross_validation"]["sources"]
    grids = TABLE_CONTENT["cross_validation"]["grids"]
    assert sources["grid vtrain_single"]["median"] <= 0.08
    assert grids["vtrain_single"]["spearman"] >= 0.95
    assert grids["nanotron_ultrascale"]["spearman"] >= 0.85
    assert grids["nanotron_ultrascale"]["regret"] <= 1.15


def test_every_factor_is_of_a_known_number():
    names = set(asdict(StepEfficiency()))
    for entries in TABLE_CONTENT["levels"].values():
        for entry in entries.values():
            assert set(entry["factors"]) <= names
            assert entry["rows"] > 0
            assert entry["sources"]
