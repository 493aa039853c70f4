"""What data axes exchange in a real step is what was lowered and simulated, byte by byte.

Layers differ in width, so bytes tell which unit a collective belongs to; 7 rows of the embedding
and odd widths make shards uneven.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import pytest
import torch
import torch.distributed as dist

from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.engines.bind import bind_data
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.policies.context.all_gather import AllGather
from phalanx.policies.data.fsdp import Fsdp
from phalanx.policies.data.replicate import Replicate
from phalanx.policies.data.zero import Zero
from phalanx.policies.pipeline.gpipe import GPipe
from phalanx.policy import Spec
from phalanx.worlds.comm_log import CommLog
from phalanx.worlds.logged_group import device_mesh, init_logged
from phalanx.worlds.sim import SimWorld
from tests.engines.test_proof_b_fsdp2 import TOKENS, Toy, loss_of, reference, work_of
from tests.ranks import current_store, run_ranks

KINDS = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True, kw_only=True)
class Case:
    axes: Mapping[str, int]
    specs: Sequence[Spec]
    num_items: int = 2

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.axes)

    @property
    def context(self) -> list[str]:
        return [name for name in self.axes if name == "cp"]

    @property
    def is_ordered(self) -> bool:
        """Torch prefetches by its own order, and replicas are summed when all shards are there."""
        return len(self.specs) == 1 and not isinstance(self.specs[0], Fsdp)

    def simulated(self) -> list[tuple[str, str, int]]:
        """(axis, kind, bytes) of rank 0 in order of issue."""
        specs = [*self.specs, *(AllGather(axis=axis) for axis in self.context)]
        work = work_of(8, self.num_items)
        program = lower(work, self.mesh, GPipe(), specs, grain="unit")
        trace = drive(SimWorld(self.mesh, TableCost({}, missing_s=1)), program=program)
        rows = (row for row in trace.where(rank=0).rows() if row["operator"] in KINDS)
        return [(r["axis"], r["operator"], int(r["payload_bytes"])) for r in rows]


TWO = (
    Case(axes={"replicate": 2}, specs=[Replicate()]),
    Case(axes={"shard": 2}, specs=[Zero()]),
    Case(axes={"shard": 2}, specs=[Zero(stage=2)]),
    Case(axes={"shard": 2}, specs=[Zero(stage=2)], num_items=1),
    Case(axes={"shard": 2}, specs=[Fsdp(reshard_after_forward=False)]),
    Case(axes={"shard": 1, "cp": 2}, specs=[Zero()]),
    Case(axes={"replicate": 1, "cp": 2}, specs=[Replicate()]),
)
FOUR = (
    Case(axes={"replicate": 2, "shard": 2}, specs=[Zero(stage=2), Replicate()]),
    Case(axes={"replicate": 2, "shard": 2}, specs=[Fsdp(), Replicate()]),
    Case(axes={"shard": 2, "cp": 2}, specs=[Fsdp()]),
    Case(axes={"shard": 2, "cp": 2}, specs=[Zero()]),
    Case(axes={"shard": 4}, specs=[Zero(stage=2)]),
)


def step_logged(rank: int, world_size: int, cases: Sequence[Case]):
    """Of each case what the second step exchanged, and the worst difference of its gradients."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    _, expected = reference(torch.float64)
    found = []
    for case in cases:
        model, mesh = Toy(torch.float64), device_mesh("cpu", case.mesh)
        data = bind_data(model, case.specs, mesh, context=case.context)
        held = dict(data.named_held(model.named_parameters()))
        log = CommLog(rank)
        for number in range(2):
            log.clear()
            for parameter in held.values():
                parameter.grad = None
            with log.step(number):
                items = TOKENS[rank::world_size].chunk(case.num_items)
                for index, tokens in enumerate(items):
                    data.begin_item(index, len(items))
                    loss_of(model, tokens).backward()
                data.finish_step()
                data.finish_update()
        seen = log.seen(KINDS)
        worst = max(float((whole(held[n]) - grad).abs().max()) for n, grad in expected.items())
        found.append((seen, worst))
    return found


def whole(parameter: torch.Tensor) -> torch.Tensor:
    grad = parameter.grad
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


@pytest.mark.dist
@pytest.mark.parametrize("cases", [TWO, FOUR], ids=["2 ranks", "4 ranks"])
def test_a_real_step_exchanges_what_was_lowered(cases):
    num_ranks = prod(cases[0].axes.values())
    results = run_ranks(step_logged, num_ranks, cases, backend=None)
    for outcomes in results:
        for case, (seen, worst) in zip(cases, outcomes):
            assert worst < 1e-12, case
            # ranks that split tokens exchange attention too, which the toy has not
            expected = [row for row in case.simulated() if row[2]]
            if case.is_ordered:
                assert seen == expected, case
            assert Counter(seen) == Counter(expected), case
