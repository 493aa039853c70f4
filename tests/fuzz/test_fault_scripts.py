"""Fault scripts: any table is a script or one clear line; what is legal comes back."""

from __future__ import annotations

import tomllib
from dataclasses import asdict
from math import inf
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.errors import PhalanxError
from phalanx.worlds.faults import KINDS, Fault, FaultScript
from tests.fuzz.inputs import near_tables, outcome, to_toml, toml_value, values

VALID = {"kind": "slow", "ranks": [0, 2], "at_s": "3 min", "duration_s": 1.5, "factor": 2}


def read(tables: Any, detect_s: Any = 0.0) -> Any:
    return outcome(lambda: FaultScript.from_tables(tables, detect_s=detect_s))


def test_the_valid_one_is_read():
    assert isinstance(read([VALID]), FaultScript)


@settings(max_examples=200, deadline=None)
@given(tables=st.lists(values, max_size=2) | values, detect_s=values)
@example(tables=[1], detect_s=0)
@example(tables=5, detect_s=0)
@example(tables=[{"kind": "kill", "ranks": [0], "at_s": 10**400}], detect_s=0)
def test_any_tables_are_a_script_or_refused(tables: Any, detect_s: Any):
    assert isinstance(read(tables, detect_s), FaultScript | PhalanxError)


@settings(max_examples=200, deadline=None)
@given(table=near_tables(VALID))
@example(table=VALID | {"duration_s": float("nan")})
@example(table=VALID | {"at_s": float("inf")})
def test_wrong_entries_are_refused_or_harmless(table: dict[str, Any]):
    script = read([table])
    assert isinstance(script, FaultScript | PhalanxError)
    if isinstance(script, FaultScript):
        script.due(0.0, 0, 0, "x")
        assert str(script.faults[0])


times = st.floats(0, 1e6)
moments = st.one_of(
    times.map(lambda at_s: {"at_s": at_s}),
    st.integers(0, 99).map(lambda step: {"at_step": step}),
    st.text(min_size=1, max_size=4).map(lambda label: {"at_label": label}),
)


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    return Fault(
        kind=draw(st.sampled_from(KINDS)),
        ranks=tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))),
        duration_s=draw(st.floats(0.1, 1e6) | st.just(inf)),
        factor=draw(st.floats(0.01, 100)),
        **draw(moments),
    )


@settings(max_examples=80, deadline=None)
@given(script=st.lists(faults(), max_size=3), detect_s=times)
def test_a_script_written_as_toml_is_the_same(script: list[Fault], detect_s: float):
    tables = [{k: v for k, v in asdict(fault).items() if v not in (None, "")} for fault in script]
    text = to_toml({"faults": tables}) + f"detect_s = {toml_value(detect_s)}\n"
    table = tomllib.loads(text.replace("\x7f", "\\u007f"))  # the one character that JSON leaves
    again = FaultScript.from_tables(table["faults"], detect_s=table["detect_s"])
    assert again == FaultScript(tuple(script), detect_s)
