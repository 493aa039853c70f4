"""Errors: one form, stable codes, and they survive the way between processes."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

import phalanx
from phalanx.errors import (
    CODES,
    CheckError,
    GateError,
    JobError,
    PhalanxError,
    PlanError,
    WorldError,
    nearest_names,
    nearest_numbers,
)


def test_the_sentence_is_where_value_rule_and_near_values():
    error = JobError(
        "layout/divide", "mesh.tp", 3, "does not divide 8 heads", legal=[2, 4], detail="a\nb"
    )
    assert str(error) == ("mesh.tp = 3: does not divide 8 heads; nearest legal values: 2, 4\na\nb")
    assert (
        str(PlanError("plan/job", "plan.json", None, "of another job"))
        == "plan.json: of another job"
    )


@pytest.mark.parametrize("kind", [JobError, PlanError, CheckError, WorldError, GateError])
def test_errors_travel_between_processes(kind: type[PhalanxError]):
    error = kind("check/size", "rank 1", 4, "too small", legal=(8,), detail="grid")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error)
    assert vars(again) == vars(error)


def test_exit_codes_tell_missed_gates_from_bad_input():
    assert GateError.exit_code == 1
    assert {kind.exit_code for kind in (JobError, PlanError, CheckError, WorldError)} == {2}
    assert issubclass(CheckError, PlanError)


def test_an_unlisted_code_is_a_bug():
    with pytest.raises(AssertionError):
        JobError("job/new", "x", 1, "y")


def test_every_code_that_is_raised_is_listed():
    raised = set()
    for path in Path(phalanx.__file__).parent.rglob("*.py"):
        raised |= set(re.findall(r'Error\(\s*"([^"]+)"', path.read_text()))
    coded = {text for text in raised if re.fullmatch(r"[a-z]+/[a-z-]+", text)}
    assert len(coded) > 20 and coded <= set(CODES), coded - set(CODES)
    assert all(re.fullmatch(r"[a-z]+/[a-z-]+", code) and CODES[code] for code in CODES)


def test_near_names_are_similar_ones_or_all_of_few():
    legal = ("1f1b", "gpipe", "interleaved")
    assert nearest_names("gpip", legal) == ["gpipe"]
    assert nearest_names("zzz", legal) == sorted(legal)
    assert nearest_names("zzz", [f"name{n}" for n in range(20)]) == []


def test_near_numbers_are_nearest_first():
    assert nearest_numbers(100, range(0, 200, 3)) == [99, 102]
    assert nearest_numbers(1, [8, 16]) == [8, 16]
    assert nearest_numbers(1000, [8, 16]) == [16, 8]
    assert nearest_numbers(5, []) == []
