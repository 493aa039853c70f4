"""Every registered Spec: its rules, and one lowered step in every world that can play it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.action import COLLECTIVES, Program
from phalanx.check import check_program
from phalanx.drive import drive
from phalanx.errors import PlanError
from phalanx.grain import project
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.policy import Spec
from phalanx.registry import Entry
from phalanx.worlds.replay import ReplayWorld
from phalanx.worlds.sim import SimWorld
from tests.contract.planned_inputs import play_locally, play_programs
from tests.contract.scenarios import (
    COST,
    ITEM_TOKENS,
    OneByOne,
    decoder_work,
    make,
    name_of,
    of_shape,
)
from tests.ranks import run_ranks

GRAINS = ("unit", "operator")
NUM_STEPS = 2
TRAVEL = ("params", "grads", "activations", "inputs", "keys_values", "queries", "heads")
SPECS = of_shape("spec")
every_spec = pytest.mark.parametrize("entry", SPECS, ids=name_of)


def lowered(spec: Spec, degree: int = 2, num_items: int = 3, grain: str = "operator") -> Program:
    work = decoder_work(3, ITEM_TOKENS[:num_items])
    return lower(work, Mesh({spec.axis: degree}), OneByOne(), [spec], grain=grain)


@every_spec
def test_rules_are_the_same_each_time_and_speak_the_binders_words(entry: Entry):
    spec = make(entry)
    assert spec.rules() == spec.rules() == make(entry).rules()
    assert spec.rules() and hash(spec.rules())
    for rule in spec.rules():
        for exchange in rule.exchanges:
            assert exchange.collective in COLLECTIVES
            assert exchange.phase in ("F", "B", "O") and exchange.at in ("before", "after")
            assert exchange.of in TRAVEL
            assert exchange.when in ("always", "sharded", "last", "round")


@every_spec
@pytest.mark.parametrize("grain", GRAINS)
def test_a_degree_of_one_adds_nothing(entry: Entry, grain: str):
    spec = make(entry)
    alone = lowered(spec, degree=1, grain=grain)
    work = decoder_work(3, ITEM_TOKENS[:3])
    assert alone == lower(work, Mesh({spec.axis: 1}), OneByOne(), grain=grain)


@every_spec
def test_the_axis_is_an_option_and_must_be_in_the_mesh(entry: Entry):
    spec = make(entry, axis="elsewhere")
    assert {a.axis for a in lowered(spec).of(0) if hasattr(a, "axis")} == {"elsewhere"}
    with pytest.raises(PlanError) as caught:
        lower(decoder_work(3, ITEM_TOKENS[:3]), Mesh(other=2), OneByOne(), [spec])
    assert caught.value.code == "plan/illegal" and caught.value.legal == ("other",)


@every_spec
@settings(max_examples=15, deadline=None)
@given(degree=st.integers(2, 5), num_items=st.integers(1, 4), grain=st.sampled_from(GRAINS))
def test_simulated_local_and_replayed_logs_are_one(entry: Entry, degree, num_items, grain):
    program = lowered(make(entry), degree, num_items, grain)
    check_program(program)
    simulated = drive(SimWorld(program.mesh, COST), program=program, num_steps=NUM_STEPS)
    replay = ReplayWorld(program.mesh, simulated)
    replayed = drive(replay, program=program, num_steps=NUM_STEPS)
    local = play_locally(program, NUM_STEPS)
    planned = [(action.operator, action.label) for action in program.of(0)]
    for rank in range(degree):
        assert simulated.log(rank) == planned * NUM_STEPS == local.log(rank)
    assert list(replayed.rows()) == list(simulated.rows())
    for column in ("step", "item", "phase", "layer", "lane", "axis", "wire_bytes"):
        assert local.column(column).tolist() == simulated.column(column).tolist(), column


@every_spec
def test_measured_traces_count_memory_as_simulated_ones(entry: Entry):
    program = lowered(make(entry))
    simulated = drive(SimWorld(program.mesh, COST), program=program)
    assert play_locally(program, 1).column("payload_bytes").tolist() == (
        simulated.column("payload_bytes").tolist()
    )


@every_spec
def test_finer_logs_project_to_coarser_ones(entry: Entry):
    fine, coarse = (
        [(action.operator, action.label) for action in lowered(make(entry), grain=grain).of(0)]
        for grain in ("operator", "unit")
    )
    assert project(fine, "unit") == project(coarse, "unit")
    assert project(fine, "step") == [("optimizer", "O")]


@pytest.mark.parametrize("order", of_shape("order"), ids=name_of)
@every_spec
def test_specs_compose_with_every_schedule(entry: Entry, order: Entry):
    spec, schedule = make(entry), make(order)
    num_layers = 2 * schedule.num_stages(2)
    mesh = Mesh({"pp": 2, spec.axis: 2})
    for grain, num_items in product(GRAINS, (2, 4)):
        work = decoder_work(num_layers, ITEM_TOKENS[:num_items])
        try:
            program = lower(work, mesh, schedule, [spec], grain=grain)
        except PlanError as error:
            assert error.code == "order/illegal"
            continue
        check_program(program)
        drive(SimWorld(mesh, COST), program=program, num_steps=NUM_STEPS)


def test_specs_of_different_families_compose():
    first_of_family = {entry.family: make(entry) for entry in reversed(SPECS)}
    specs = [replace(spec, axis=family) for family, spec in first_of_family.items()]
    mesh = Mesh(dict.fromkeys(first_of_family, 2))
    program = lower(decoder_work(3, ITEM_TOKENS[:3]), mesh, OneByOne(), specs)
    check_program(program)
    used = {action.axis for action in program.of(0) if hasattr(action, "axis")}
    assert {part for axis in used for part in mesh.parts(axis)} == set(first_of_family)
    drive(SimWorld(mesh, COST), program=program, num_steps=NUM_STEPS)


@pytest.mark.dist
@every_spec
def test_logs_of_two_processes_are_the_simulated_ones(entry: Entry):
    programs = [lowered(make(entry), grain=grain) for grain in GRAINS]
    measured = run_ranks(play_programs, 2, programs, NUM_STEPS, backend=None)
    for number, program in enumerate(programs):
        simulated = drive(SimWorld(program.mesh, COST), program=program, num_steps=NUM_STEPS)
        for rank in range(2):
            assert measured[rank][number] == simulated.log(rank)
