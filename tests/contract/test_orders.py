"""Every registered schedule, of any size, in every world that can play it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phalanx.check import check_order, check_program
from phalanx.drive import drive
from phalanx.errors import PlanError
from phalanx.grain import project
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.policy import Order, Step
from phalanx.registry import Entry
from phalanx.trace import TraceBuilder
from phalanx.workload import toy_work
from phalanx.worlds.replay import ReplayWorld
from phalanx.worlds.sim import SimWorld
from tests.contract.planned_inputs import LogRow, play_locally, play_programs
from tests.contract.scenarios import COST, ITEM_TOKENS, make, name_of, of_shape
from tests.ranks import run_ranks
from tests.toy_pipeline import ITEM_TOKENS as TORCH_TOKENS
from tests.toy_pipeline import WIDTH, make_toy, token_loss, toy_plan

GRAINS = ("stage", "unit", "operator")
NUM_STEPS = 2
sizes = st.tuples(st.integers(1, 6), st.integers(1, 9))
every_order = pytest.mark.parametrize("entry", of_shape("order"), ids=name_of)


def lists_of(order: Order, num_ranks: int, num_items: int) -> list[list[Step]] | None:
    """The schedule, or None where the policy refuses these sizes as it should."""
    try:
        return order.order(num_ranks, num_items)
    except PlanError as error:
        assert error.code == "order/illegal" and error.legal, "a refusal names legal sizes"
        return None


def meant_for(order: Order, size: tuple[int, int]) -> tuple[int, int]:
    """The size itself, or the only one that a schedule is written for."""
    return getattr(order, "only_size", size)


def lowered(order: Order, num_ranks: int, num_items: int, grain: str):
    work = toy_work(order.num_stages(num_ranks) + 1, ITEM_TOKENS[:num_items])
    return lower(work, Mesh(pp=num_ranks), order, grain=grain)


def accepted_size(order: Order, num_ranks: int) -> int:
    """The least number of micro-batches above two that these ranks take."""
    for num_items in range(3, len(ITEM_TOKENS) + 1):
        if lists_of(order, num_ranks, num_items) is not None:
            return num_items
    raise AssertionError(f"{num_ranks} ranks take no number of micro-batches from 3 to 9")


@every_order
@settings(max_examples=25, deadline=None)
@given(size=sizes)
def test_schedules_are_complete_and_can_run_or_are_refused(entry: Entry, size):
    order = make(entry)
    size = meant_for(order, size)
    lists = lists_of(order, *size)
    assume(lists is not None)
    check_order(lists, order.num_stages(size[0]), size[1], order.rank_of_stage(size[0]))
    for grain in GRAINS:
        check_program(lowered(order, *size, grain))


@every_order
@settings(max_examples=10, deadline=None)
@given(size=sizes)
def test_equal_policies_give_equal_schedules(entry: Entry, size):
    order = make(entry)
    size = meant_for(order, size)
    first = lists_of(order, *size)
    assert first == lists_of(make(entry), *size) == lists_of(order, *size)


@every_order
@settings(max_examples=10, deadline=None)
@given(size=sizes, grain=st.sampled_from(GRAINS))
def test_simulated_local_and_replayed_logs_are_one(entry: Entry, size, grain):
    order = make(entry)
    size = meant_for(order, size)
    assume(lists_of(order, *size) is not None)
    program = lowered(order, *size, grain)
    simulated = drive(SimWorld(program.mesh, COST), program=program, num_steps=NUM_STEPS)
    replay = ReplayWorld(program.mesh, simulated)
    replayed = drive(replay, program=program, num_steps=NUM_STEPS)
    local = play_locally(program, NUM_STEPS)
    for rank in range(program.mesh.size):
        planned = [(action.operator, action.label) for action in program.of(rank)]
        assert simulated.log(rank) == planned * NUM_STEPS
        assert local.log(rank) == planned * NUM_STEPS
    assert list(replayed.rows()) == list(simulated.rows())


@every_order
def test_some_sizes_are_accepted(entry: Entry):
    order = make(entry)
    for num_ranks in (1, 2):
        assert accepted_size(order, meant_for(order, (num_ranks, 1))[0])


@every_order
@settings(max_examples=15, deadline=None)
@given(size=sizes)
def test_finer_logs_project_to_coarser_ones(entry: Entry, size):
    order = make(entry)
    size = meant_for(order, size)
    assume(lists_of(order, *size) is not None)
    logs = {grain: log_of(lowered(order, *size, grain), 0) for grain in GRAINS}
    for coarse, fine in (("stage", "unit"), ("stage", "operator"), ("unit", "operator")):
        assert project(logs[fine], coarse) == project(logs[coarse], coarse)


def log_of(program, rank: int) -> list[LogRow]:
    return [(action.operator, action.label) for action in program.of(rank)]


# ---- on two processes ------------------------------------------------------------------------


@pytest.mark.dist
@every_order
def test_logs_of_two_processes_are_the_simulated_ones(entry: Entry):
    order = make(entry)
    num_items = accepted_size(order, 2)
    programs = [lowered(order, 2, num_items, grain) for grain in GRAINS]
    measured = run_ranks(play_programs, 2, programs, NUM_STEPS, backend=None)
    for number, program in enumerate(programs):
        simulated = drive(SimWorld(program.mesh, COST), program=program, num_steps=NUM_STEPS)
        for rank in range(2):
            assert measured[rank][number] == simulated.log(rank)


def run_on_torch(rank: int, world_size: int, order: Order) -> list[LogRow]:
    import torch

    from phalanx.worlds.torch_pipelining import TorchPipeline

    lists = order.order(world_size, len(TORCH_TOKENS))
    plan = toy_plan(lists, order.rank_of_stage(world_size), TORCH_TOKENS)
    toy = make_toy(order.num_stages(world_size), TORCH_TOKENS, torch.float32)
    stages = {stage: toy.stages[stage] for stage in plan.stages_of(rank)}
    pipeline = TorchPipeline(plan, stages, token_loss)
    pipeline.step(toy.inputs, toy.targets, num_counted_global=toy.num_counted)
    builder = TraceBuilder("measured")
    builder.extend(pipeline.trace_rows(step=1))
    return builder.build().log(rank)


def trains(lists: Sequence[Sequence[Step]] | None) -> bool:
    return lists is not None and any(step.kind != "F" for steps in lists for step in steps)


def runs_on_torch() -> list[Entry]:
    """Training schedules of the family that torch's pipelining runtime executes."""
    found = [entry for entry in of_shape("order") if entry.family == "pipeline"]
    return [each for each in found if trains(lists_of(make(each), 2, len(TORCH_TOKENS)))]


@pytest.mark.dist
@pytest.mark.parametrize("entry", runs_on_torch(), ids=name_of)
def test_torchs_runtime_logs_what_is_simulated_at_the_policys_grain(entry: Entry):
    order = make(entry)
    work = toy_work(2 * order.num_stages(2), TORCH_TOKENS, width=WIDTH, blocks_per_layer=1)
    program = lower(work, Mesh(pp=2), order)
    simulated = drive(SimWorld(program.mesh, COST), program=program)
    for rank, measured in enumerate(run_ranks(run_on_torch, 2, order)):
        expected = project(simulated.log(rank), "stage")
        assert measured == [row for row in expected if row[1] != "O"]
        assert project(measured, entry.grain) == measured, "nothing finer than its grain is shown"
