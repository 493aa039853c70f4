"""Lockfiles and tables of policies: a plan or one clear line, also when it is put to use."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx import registry
from phalanx.errors import PhalanxError
from phalanx.job import load_job
from phalanx.plan import Plan, Pool, RoleProgram, Transition
from tests.contract.scenarios import make, name_of
from tests.fuzz.inputs import json_values, near_bytes, near_tables, near_texts, outcome, words

JOB = load_job(None, {"model.name": "toy"})
PROGRAM = RoleProgram(
    pool="all",
    mesh={"pp": 2, "shard": 2},
    order={"family": "pipeline", "name": "1f1b"},
    specs=({"family": "data", "name": "fsdp", "prefetch": 2},),
    reacts=({"family": "recover", "name": "rejoin"},),
    batch={"item_tokens": [5, 7]},
)
PLAN = Plan(
    job="small",
    job_key="of an earlier release",
    asked=JOB.result_table,
    hardware={"machine": "h100", "num_devices": 4},
    pools={"all": Pool(machine="h100", devices=(0, 1, 2, 3))},
    programs={"train": PROGRAM},
    transitions=(Transition(source="train", target="serve", tensors="weights", trigger="end"),),
)
VALID = json.loads(json.dumps(asdict(PLAN)))
TEXT = json.dumps(VALID)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("plans") / "plan.json"


def use(path) -> Plan:
    """Everything that an engine does with a plan before it starts a process."""
    plan = Plan.load(path)
    plan.require_here({"machine": "h100", "num_devices": 4}, JOB)
    program = plan.program("train")
    program.grid().require_devices(4)
    for built in (program.built_specs, program.built_order, program.built_reacts):
        built()
    return plan


def used(path, content: str | bytes) -> Any:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return outcome(use, path)


def test_the_valid_one_is_put_to_use(path):
    assert isinstance(used(path, TEXT), Plan)


@settings(max_examples=60, deadline=None)
@given(content=st.text() | st.binary() | json_values.map(json.dumps))
@example(content="[" * 100_000)
@example(content='{"format_version": 1}')
def test_any_file_is_refused(path, content: str | bytes):
    assert isinstance(used(path, content), PhalanxError)


@settings(max_examples=100, deadline=None)
@given(content=near_texts(TEXT) | near_bytes(TEXT.encode()))
def test_slips_and_bit_rot_are_refused_or_harmless(path, content: str | bytes):
    assert isinstance(used(path, content), Plan | PhalanxError)


@settings(max_examples=300, deadline=None)
@given(table=near_tables(VALID, json_values))
@example(table=VALID | {"programs": None})
@example(table=VALID | {"pools": {"all": {"machine": "h100"}}})
@example(table=VALID | {"programs": {"train": {"pool": "all", "mesh": {"pp": "4"}}}})
@example(table=VALID | {"hardware": None})
@example(table={key: value for key, value in VALID.items() if key != "job"})
def test_wrong_entries_are_refused_or_harmless(path, table: dict[str, Any]):
    assert isinstance(used(path, json.dumps(table)), Plan | PhalanxError)


@settings(max_examples=40, deadline=None)
@given(
    mesh=st.dictionaries(words, st.integers(1, 4), max_size=3),
    batch=st.dictionaries(words, st.integers() | st.lists(st.integers(), max_size=2), max_size=2),
    devices=st.lists(st.integers(0, 99), max_size=4),
)
def test_a_saved_plan_is_the_same_plan(path, mesh, batch, devices):
    program = RoleProgram(pool="p", mesh=mesh, batch=batch)
    pools = {"p": Pool(machine="m", devices=tuple(devices))}
    plan = Plan(job="j", job_key="k", hardware={}, pools=pools, programs={"train": program})
    plan.save(path)
    assert Plan.load(path) == plan
    assert list(Plan.load(path).program("train").grid().names) == list(mesh), (
        "axes keep their order"
    )


# ---- policies from tables ------------------------------------------------------------------------

ENTRIES = registry.entries()


@settings(max_examples=150, deadline=None)
@given(family=st.sampled_from(sorted(registry.SHAPE_OF_FAMILY)) | words, options=json_values)
@example(family="pipeline", options=3)
@example(family="pipeline", options=["1f1b"])
def test_any_options_make_a_policy_or_are_refused(family: str, options: Any):
    outcome(registry.build, family, options)


@pytest.mark.parametrize("entry", ENTRIES, ids=name_of)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_options_of_a_wrong_kind_are_refused(entry, data: st.DataObject):
    options = asdict(make(entry))
    key = data.draw(st.sampled_from(sorted(options)) if options else st.just("x"))
    wrong = data.draw(json_values)
    built = outcome(registry.build, entry.family, {"name": entry.name} | options | {key: wrong})
    if not isinstance(built, PhalanxError):
        expected = type(options[key])
        if expected is float:
            expected = float | int
        assert isinstance(getattr(built, key), expected), f"{key} = {wrong!r} was taken"
