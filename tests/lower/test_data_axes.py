"""Data axes in the lowered step: where gradients travel, and who shares parameters."""

from __future__ import annotations

from collections import Counter

import pytest

from phalanx.action import Collective
from phalanx.check import check_program
from phalanx.drive import drive
from phalanx.errors import PlanError
from phalanx.lower import lower
from phalanx.lower.data import round_items
from phalanx.mesh import Mesh
from phalanx.policies.context.all_gather import AllGather
from phalanx.policies.data.fsdp import Fsdp
from phalanx.policies.data.replicate import Replicate
from phalanx.policies.data.zero import Zero
from phalanx.policies.pipeline.gpipe import GPipe
from phalanx.policies.pipeline.interleaved import Interleaved
from phalanx.policies.pipeline.one_f_one_b import OneFOneB
from phalanx.policies.pipeline.zero_bubble import ZeroBubble
from phalanx.policy import Step
from phalanx.workload import toy_work
from phalanx.worlds.sim import SimWorld
from tests.contract.scenarios import COST

LAYERS, ITEMS = 4, (5,) * 8


def collectives(specs, mesh, order, **options):
    program = lower(toy_work(LAYERS, ITEMS), mesh, order, specs, grain="unit", **options)
    check_program(program)
    drive(SimWorld(mesh, COST), program=program)
    return [a for a in program.of(0) if isinstance(a, Collective) and a.lane.startswith("axis")]


def count(found, kind: str) -> int:
    return sum(action.collective == kind for action in found)


@pytest.mark.parametrize(
    ("order", "rounds"),
    [
        (GPipe(), 8),  # one stage per rank: gradients are cut after every micro-batch
        (OneFOneB(), 8),
        (ZeroBubble(), 8),
        (Interleaved(virtual=2), 4),  # rows of two
        (Interleaved(virtual=2, per_round=4), 2),
        (Interleaved(virtual=2, per_round=8), 1),  # all forward, all backward
    ],
    ids=["gpipe", "1f1b", "zb", "rounds of 2", "of 4", "of 8"],
)
def test_stage_1_reduces_once_and_stage_2_once_per_round(order, rounds):
    mesh = Mesh(pp=2, shard=2)
    for stage, expected in ((1, 1), (2, rounds)):
        found = collectives([Zero(stage=stage)], mesh, order)
        of_rank = LAYERS // 2
        assert count(found, "reduce_scatter") == expected * of_rank
        assert count(found, "all_gather") == of_rank
        gathers = [action for action in found if action.collective == "all_gather"]
        assert all(action.after == ("O",) for action in gathers)


def test_rows_that_differ_are_reduced_as_often_as_the_shortest_of_them():
    lists = Interleaved(virtual=2, per_round=4).order(2, 6)
    assert round_items(lists[0]) == 4  # only the last row of each stage is shorter
    rows = [(0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2)]
    assert round_items([Step(stage, "B", item) for stage, item in rows]) == 1
    uneven = Interleaved(virtual=2)  # rounds of 5, 4 and 4
    assert {round_items(steps) for steps in uneven.order(4, 13)} == {4}


@pytest.mark.parametrize(
    ("specs", "mesh", "axes"),
    [
        ([Fsdp()], Mesh(shard=2, cp=2), ["shard_cp"]),
        ([Fsdp()], Mesh(shard=1, cp=2), ["cp"]),
        ([Zero()], Mesh(cp=2, shard=3), ["cp_shard"]),
        ([Replicate()], Mesh(replicate=2, cp=2), ["replicate_cp"]),
        ([Fsdp(), Replicate()], Mesh(replicate=2, shard=2, cp=2), ["replicate", "shard_cp"]),
        ([Fsdp()], Mesh(shard=2, cp=1), ["shard"]),
    ],
    ids=str,
)
def test_ranks_that_split_tokens_share_parameters(specs, mesh, axes):
    found = collectives([*specs, AllGather(axis="cp")], mesh, GPipe())
    of_data = [a for a in found if a.label.startswith(("gather:", "reduce:"))]
    assert sorted({action.axis for action in of_data}) == axes
    alone = collectives(specs, Mesh(replicate=mesh.degree("replicate"), shard=4), GPipe())
    if axes == ["shard_cp"]:
        bytes_of = [Counter((a.collective, a.payload_bytes) for a in x) for x in (of_data, alone)]
        assert bytes_of[0] == bytes_of[1]


def test_stages_can_be_given_by_name():
    names = [unit.name for unit in toy_work(LAYERS, ITEMS).units]
    stages = [names[:1], names[1:]]
    found = collectives([Zero()], Mesh(pp=2, shard=2), OneFOneB(), stages=stages)
    assert {action.layer for action in found} == set(names[:1])
    for wrong, rule in ((stages[::-1], "in model order"), ([names], "as many as the order runs")):
        with pytest.raises(PlanError, match=rule):
            collectives([], Mesh(pp=2, shard=2), OneFOneB(), stages=wrong)


def test_a_joint_axis_is_the_ranks_that_differ_on_any_of_its_axes():
    mesh = Mesh(a=2, b=3, c=2)
    assert mesh.degree("a_c") == 4 and mesh.parts("a_c") == ("a", "c")
    assert mesh.group(2, "a_c") == (2, 3, 8, 9)
    assert [mesh.coordinate(rank, "a_c") for rank in (2, 3, 8, 9)] == [0, 1, 2, 3]
    assert mesh.parts("c_a") == () and mesh.joint(["c", "a"]) == "a_c"
    assert sorted(rank for group in mesh.groups("a_c") for rank in group) == list(range(12))
