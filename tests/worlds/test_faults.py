"""Fault scripts as data: reading, rules, and the question that worlds ask."""

from __future__ import annotations

import pickle
import tomllib
from math import inf

import pytest

from phalanx.errors import JobError
from phalanx.worlds.faults import KINDS, Fault, FaultScript

TEXT = """
detect_s = "500 ms"

[[faults]]
kind = "kill"
ranks = [2, 3]
at_s = "3 min"

[[faults]]
kind = "slow"
ranks = 1
at_step = 4
duration_s = inf
factor = 2

[[faults]]
kind = "pause"
ranks = [0]
at_label = "exchange@2"
duration_s = 1.5
"""


def read(text: str) -> FaultScript:
    table = tomllib.loads(text)
    return FaultScript.from_tables(table["faults"], detect_s=table.get("detect_s", 0.0))


def test_a_script_is_read_with_units():
    script = read(TEXT)
    assert script == FaultScript(
        (
            Fault(kind="kill", ranks=(2, 3), at_s=180.0),
            Fault(kind="slow", ranks=(1,), at_step=4, duration_s=inf, factor=2),
            Fault(kind="pause", ranks=(0,), at_label="exchange@2", duration_s=1.5),
        ),
        detect_s=0.5,
    )
    assert pickle.loads(pickle.dumps(script)) == script, "it travels to worker processes"


def test_due_asks_for_time_step_and_label():
    kill, slow, pause = read(TEXT).faults
    script = read(TEXT)
    assert script.due(179.9, 0, 2) == ()
    assert script.due(180.0, 0, 2) == (kill,) == script.due(1e6, 99, 3)
    assert script.due(180.0, 3, 1) == () and script.due(0.0, 4, 1) == (slow,)
    assert script.due(0.0, 0, 0, "exchange@2") == (pause,)
    assert script.due(1e9, 99, 0, "exchange@3") == () == script.due(1e9, 99, 0)


@pytest.mark.parametrize(
    "code, where, text",
    [
        ("job/bad-value", "fault.kind", 'kind = "kil"\nranks = 0\nat_s = 1'),
        ("job/unknown-key", "faults[0].rank", 'kind = "kill"\nrank = 0\nat_s = 1'),
        ("job/missing", "faults[0].ranks", 'kind = "kill"\nat_s = 1'),
        ("job/missing", "faults[0].kind", "ranks = 1\nat_s = 1"),
        ("job/missing", "fault kill", 'kind = "kill"\nranks = 0'),
        ("job/missing", "fault kill", 'kind = "kill"\nranks = 0\nat_s = 1\nat_step = 1'),
        ("job/missing", "fault.duration_s", 'kind = "pause"\nranks = 0\nat_s = 1'),
        ("job/bad-value", "fault.at_s", 'kind = "kill"\nranks = 0\nat_s = -1'),
        ("job/bad-value", "fault.ranks", 'kind = "kill"\nranks = []\nat_s = 1'),
        ("job/bad-value", "fault.ranks", 'kind = "kill"\nranks = -1\nat_s = 1'),
        ("job/bad-value", "faults[0].ranks", 'kind = "kill"\nranks = "all"\nat_s = 1'),
        ("job/bad-value", "faults[0].at_step", 'kind = "kill"\nranks = 0\nat_step = "two"'),
        ("unit/unknown", "faults[0].at_s", 'kind = "kill"\nranks = 0\nat_s = "3 parsecs"'),
        (
            "job/bad-value",
            "fault.factor",
            'kind = "slow"\nranks = 0\nat_s = 1\nduration_s = 1\nfactor = 0',
        ),
    ],
)
def test_a_wrong_table_is_refused_where_it_is_wrong(code: str, where: str, text: str):
    with pytest.raises(JobError) as caught:
        read("[[faults]]\n" + text)
    assert (caught.value.code, caught.value.where) == (code, where)


@pytest.mark.parametrize("tables", [5, "kill", {"kind": "kill"}, [1], ["kill"]])
def test_what_is_no_list_of_tables_is_refused(tables):
    with pytest.raises(JobError, match="table") as caught:
        FaultScript.from_tables(tables)
    assert caught.value.code == "job/bad-value"


def test_near_spellings_are_offered():
    with pytest.raises(JobError) as caught:
        read('[[faults]]\nkind = "pauze"\nranks = 0\nat_s = 1\nduration_s = 1')
    assert caught.value.legal == ("pause",)


def test_ranks_outside_the_job_are_refused():
    script = FaultScript((Fault(kind="kill", ranks=(0, 4), at_s=1.0),))
    script.require_ranks(5)
    with pytest.raises(JobError) as caught:
        script.require_ranks(4)
    assert caught.value.code == "mesh/rank" and caught.value.where == "faults[0].ranks"


def test_every_kind_prints_as_a_sentence():
    for kind in KINDS:
        fault = Fault(kind=kind, ranks=(0, 1), at_step=2, duration_s=1.0)
        assert str(fault) == f"{kind} of ranks 0, 1 at step 2"
