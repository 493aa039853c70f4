"""A difference is rounding only where it can be: what is not finite or missing never is."""

from __future__ import annotations

import json
import math

import pytest

from phalanx.analyze.first_divergence import FOLDER, Recorded, Summary, compare
from phalanx.cli import main

SOUND = Summary(4, 30.0, (1.0, -2.0), 7)
SPOILT = {
    "nan": Summary(4, math.nan, (math.nan, math.nan), 8),
    "inf": Summary(4, math.inf, (math.inf, -math.inf), 9),
}


def one_place(summary: Summary, name: str = "model.norm") -> Recorded:
    return Recorded("run", "float32", {(1, "F", name): summary})


@pytest.mark.parametrize("spoilt", SPOILT)
@pytest.mark.parametrize("spoilt_first", [False, True])
def test_what_is_not_finite_is_never_rounding(spoilt, spoilt_first):
    runs = [one_place(SOUND), one_place(SPOILT[spoilt])]
    found = compare(*(reversed(runs) if spoilt_first else runs))
    assert found.first_large is not None and found.first_large.distance == math.inf
    assert not found.is_rounding


def test_the_same_nan_twice_is_no_difference():
    found = compare(one_place(SPOILT["nan"]), one_place(SPOILT["nan"]))
    assert found.first is None and found.is_rounding


def test_a_layer_that_one_run_lacks_is_no_rounding():
    both = {(1, "F", "model.layers.0"): SOUND}
    more = both | {(1, "F", "model.layers.1"): SOUND}
    found = compare(Recorded("a", "float32", both), Recorded("b", "float32", more))
    assert found.first is None and found.only == ("model.layers.1",)
    assert not found.is_rounding


def test_frozen_weights_that_are_recorded_once_are_not_missed_in_later_steps():
    """A run that goes on records them in another step than the run that it is compared with."""
    weight, layer = ("W", "model.norm.weight"), ("F", "model.norm")
    begun = {(1, *weight): SOUND, (1, *layer): SOUND, (2, *layer): SOUND}
    resumed = {(2, *weight): SOUND, (2, *layer): SOUND, (3, *layer): SOUND}
    found = compare(Recorded("a", "float32", begun), Recorded("b", "float32", resumed))
    assert found.only == () and found.is_rounding and found.num_places == 1


@pytest.mark.parametrize(
    ("step", "phase", "is_rounding"),
    [
        (2, "W", True),
        (1, "W", False),
        (2, "G", True),
        (1, "G", False),
        (2, "F", False),
        (2, "B", False),
    ],
)
def test_weights_behind_an_update_may_be_further_apart_than_what_computes_them(
    step, phase, is_rounding
):
    """Of a weight that began as zero, an update of Adam is all there is."""
    near = Summary(4, 30.0, (1.0 + 2e-3 * 30**0.5, -2.0), 8)
    runs = [Recorded("r", "float32", {(step, phase, "norm"): each}) for each in (SOUND, near)]
    found = compare(*runs)
    assert found.first.distance == pytest.approx(2e-3 / 2**0.5)
    assert found.is_rounding == is_rounding
    assert not compare(*runs, tolerance=1e-4).is_rounding, "what is asked holds everywhere"


def written(folder, places) -> str:
    lines = [{"format_version": 1, "dtype": "float32", "threads": 1}]
    for name, summary in places.items():
        line = {"step": 1, "phase": "F", "name": name, "signs": list(summary.signs)}
        lines.append(
            line | {"count": summary.count, "squares": summary.squares, "bits": summary.bits}
        )
    (folder / FOLDER).mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / FOLDER / "rank0.jsonl").write_text(text)
    return str(folder)


def test_the_command_exits_with_1_for_nan_and_for_a_stage_that_left_no_file(tmp_path, capsys):
    whole = written(tmp_path / "whole", {"model.norm": SOUND, "model.layers.1": SOUND})
    part = written(tmp_path / "part", {"model.norm": SOUND})
    nan = written(tmp_path / "nan", {"model.norm": SPOILT["nan"], "model.layers.1": SOUND})
    assert main(["trace", "diverge", whole, part]) == 1
    assert "only one of the runs has model.layers.1" in capsys.readouterr().out
    assert main(["trace", "diverge", whole, nan]) == 1
    assert "first above 0.0001 (weights behind an update 0.01): step 1, forward of model.norm" in (
        capsys.readouterr().out
    )
    assert main(["trace", "diverge", whole, whole]) == 0
