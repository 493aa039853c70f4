"""Proof c, one process: FSDP x TP x PP composed by the passes is the step of one device.

The lowered program is executed as it is, on real tensors of all ranks. Micro-batches differ in
length, widths do not divide, and the loss is divided by the counted tokens of all replicas.
"""

from __future__ import annotations

from random import Random

import pytest
import torch

from phalanx import lower
from phalanx.check import check_program
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.errors import WorldError
from phalanx.policies.data.fsdp import Fsdp
from phalanx.policies.data.replicate import Replicate
from phalanx.policies.tensor.megatron import Megatron
from phalanx.worlds.local import LocalWorld
from phalanx.worlds.sim import SimWorld
from tests.proofs.residual_toy import (
    Case,
    Looped,
    issue_rows,
    loss_whole,
    make_step,
    make_toy,
    ordered_gradients,
    plain_gradients,
    plain_training,
    worst_difference,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CUBE = {"pp": 2, "shard": 2, "tp": 2}
SEQUENCE = Megatron(sequence_parallel=True)
KEPT = Megatron(sequence_parallel=True, gather_twice=False)
EVERY = Fsdp(reduce_every_item=True)
EVERY_KEPT = Fsdp(reduce_every_item=True, reshard_after_forward=False)

CASES = {
    "cube": Case(axes=CUBE, specs=[Fsdp(), Megatron()]),
    "gpipe": Case(axes=CUBE, specs=[Fsdp(), Megatron()], schedule="gpipe"),
    "other rank order": Case(
        axes={"tp": 2, "shard": 2, "pp": 2}, specs=[Megatron(), Fsdp()], num_layers=5
    ),
    "sequence": Case(axes=CUBE, specs=[Fsdp(), SEQUENCE]),
    "sequence, input kept": Case(axes=CUBE, specs=[Fsdp(), KEPT], schedule="gpipe"),
    "no reshard": Case(axes=CUBE, specs=[Fsdp(reshard_after_forward=False), Megatron()]),
    "no prefetch": Case(axes=CUBE, specs=[Fsdp(prefetch=0), Megatron()]),
    "prefetch 2": Case(axes=CUBE, specs=[Fsdp(prefetch=2), SEQUENCE]),
    "reduce every item": Case(axes=CUBE, specs=[EVERY, SEQUENCE]),
    "reduce every item, no reshard": Case(axes=CUBE, specs=[EVERY_KEPT, Megatron()]),
    "padded": Case(
        axes={"pp": 2, "shard": 3, "tp": 3}, specs=[Fsdp(), Megatron()], width=5, num_layers=3
    ),
    "padded sequence": Case(
        axes={"pp": 2, "shard": 3, "tp": 3}, specs=[EVERY, SEQUENCE], width=5, num_layers=3,
        item_tokens=(1, 4, 7, 2),
    ),
    "hybrid": Case(
        axes={"pp": 2, "replicate": 2, "shard": 2}, specs=[Fsdp(), Replicate()], width=5
    ),
    "hybrid x tp": Case(
        axes={"replicate": 2, "shard": 2, "tp": 2}, specs=[EVERY, Replicate(), SEQUENCE]
    ),
    "replicas x tp": Case(axes={"pp": 2, "replicate": 2, "tp": 2}, specs=[Replicate(), Megatron()]),
    "one rank": Case(axes={"pp": 1}),
    "two stages a rank": Case(
        axes=CUBE, specs=[Fsdp(), Megatron()], schedule=Looped(), num_layers=5
    ),
    "two stages, one rank": Case(
        axes={"shard": 2, "tp": 2}, specs=[Fsdp(), SEQUENCE], schedule=Looped()
    ),
    "four stages": Case(axes={"pp": 4, "tp": 2}, specs=[Megatron()], num_layers=7),
}  # fmt: skip
SUMS_IN_ANOTHER_ORDER = [
    name for name, case in CASES.items() if any(spec in (EVERY, EVERY_KEPT) for spec in case.specs)
]
LEAST_ORDERED = "reduce every item, no reshard"  # no gather stands between reductions


class Played:
    """A case carried out by LocalWorld (or one like it)."""

    def __init__(self, case: Case, num_steps: int, *, optimizes: bool, world=LocalWorld) -> None:
        self.case, self.toy, self.program = case, make_toy(case), case.program
        self.step = make_step(case, self.toy)
        ops = dict(self.step.ops)
        if not optimizes:
            ops["optimizer"] = lambda context, action: None
        self.world = world(case.mesh, ops, dtype=torch.float64)
        for rank, context in self.world.contexts.items():
            self.step.place(context, self.toy.parameters, self.toy.batches[case.replica(rank)])
        self.trace = drive(self.world, program=self.program, num_steps=num_steps)
        self.tensors = {rank: c.tensors for rank, c in self.world.contexts.items()}

    def whole(self, suffix: str) -> dict[str, torch.Tensor]:
        return self.step.whole(self.tensors, suffix)


@pytest.fixture(scope="module", params=list(CASES))
def case(request) -> Case:
    return CASES[request.param]


def test_gradients_equal_those_of_one_process(case):
    played = Played(case, 1, optimizes=False)
    expected = plain_gradients(played.toy, played.toy.parameters)
    assert worst_difference(played.whole("grad"), expected) < 1e-12


def test_parameters_after_two_steps_equal_those_of_one_process(case):
    played = Played(case, 2, optimizes=True)
    assert worst_difference(played.whole("shard"), plain_training(played.toy, 2)) < 1e-12
    start = worst_difference(played.whole("shard"), played.toy.parameters)
    assert start > 1e-3  # the steps went somewhere


@pytest.mark.parametrize("name", [n for n in CASES if n not in SUMS_IN_ANOTHER_ORDER])
def test_gradients_equal_bit_for_bit_where_sums_come_in_the_same_order(name):
    played = Played(CASES[name], 1, optimizes=False)
    expected = ordered_gradients(CASES[name], played.toy)
    for parameter, grad in played.whole("grad").items():
        assert torch.equal(grad, expected[parameter]), parameter


def test_losses_of_all_replicas_add_up(case):
    played = Played(case, 1, optimizes=False)
    mesh = case.mesh
    ends = [
        tensors
        for rank, tensors in played.tensors.items()
        if mesh.coordinate(rank, "pp") == mesh.degree("pp") - 1 and not mesh.coordinate(rank, "tp")
    ]
    items, toy = range(len(case.item_tokens)), played.toy
    found = sum(float(tensors[f"loss:{item}"]) for tensors in ends for item in items)
    every = [batch for replica in toy.batches for batch in replica]
    expected = sum(float(loss_whole(toy, toy.parameters, batch)) for batch in every)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["hybrid", "hybrid x tp", "replicas x tp"])
def test_replicas_hold_the_same_bits(name):
    played = Played(CASES[name], 2, optimizes=True)
    both = [played.step.whole(played.tensors, "shard", replica) for replica in (0, 1)]
    assert all(torch.equal(both[0][n], both[1][n]) for n in both[0])


def test_logs_equal_the_simulated_ones_on_every_rank(case):
    played = Played(case, 2, optimizes=True)
    check_program(played.program)
    sim = SimWorld(case.mesh, TableCost({}, missing_s=1.0))
    simulated = drive(sim, program=played.program, num_steps=2)
    for rank in range(case.mesh.size):
        assert played.trace.log(rank) == simulated.log(rank)
        assert issue_rows(played.trace, rank) == issue_rows(simulated, rank)


class ShuffledWorld(LocalWorld):
    """Carries out what is ready in a random order, or computes as far ahead as it may."""

    draw = Random(0)
    delays_transfers = False

    def _run_ready(self) -> None:
        while queues := [
            (pending, queue)
            for pending in self.pending.values()
            for queue in (pending.ready, pending.ready_transfers)
            if queue
        ]:
            computes = [each for each in queues if each[1] is each[0].ready]
            pending, queue = self.draw.choice(
                computes if computes and self.delays_transfers else queues
            )
            queue.rotate(-self.draw.randrange(len(queue)))
            entry, others = queue.popleft(), list(queue)
            if queue is pending.ready:
                self._carry_out(entry)
                continue
            queue.clear()
            queue.append(entry)
            self.start_transfers(pending)
            queue.extend(others)


def shuffled(case: Case, seed: int) -> dict[str, torch.Tensor]:
    world = type("World", (ShuffledWorld,), {})
    world.draw, world.delays_transfers = Random(seed), seed % 2 == 0
    return Played(case, 2, optimizes=True, world=world).whole("shard")


def has_same_bits(name: str) -> bool:
    """Whether shuffled runs end with the parameters of an unshuffled one."""
    expected = Played(CASES[name], 2, optimizes=True).whole("shard")
    runs = [shuffled(CASES[name], seed) for seed in range(4)]
    return all(torch.equal(found[n], expected[n]) for found in runs for n in expected)


@pytest.mark.parametrize(
    "name", ["cube", "sequence", LEAST_ORDERED, "hybrid x tp", "two stages, one rank"]
)
def test_any_order_that_lanes_and_labels_allow_gives_the_same_bits(name):
    assert has_same_bits(name)


def test_the_loss_would_be_made_of_half_a_sum_without_its_wait(monkeypatch):
    monkeypatch.setattr(lower, "wait_for_own_outputs", lambda chunks, last_stage: None)
    assert not has_same_bits("cube")


def test_a_gradient_would_be_lost_without_its_wait(monkeypatch):
    let_wait = lower.data._let_wait
    monkeypatch.setattr(
        lower.data,
        "_let_wait",
        lambda visit, label: None if label.startswith("reduce:") else let_wait(visit, label),
    )
    with pytest.raises(WorldError, match=r"layers.*/grad differs from the plan"):
        has_same_bits(LEAST_ORDERED)
