"""What data axes exchange in a real step is what was lowered and simulated, byte by byte: alone,
and beside the stages of a pipeline.

Layers differ in width, so bytes tell which unit a collective belongs to; 7 rows of the embedding
and odd widths make shards uneven.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import pytest
import torch
import torch.distributed as dist

from phalanx.action import Collective
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.engines.bind import bind_data
from phalanx.engines.pipeline_step import PipelineStep
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.models.spec import small_config
from phalanx.planner.work import model_work
from phalanx.policies.context.all_gather import AllGather
from phalanx.policies.data.fsdp import Fsdp
from phalanx.policies.data.replicate import Replicate
from phalanx.policies.data.zero import Zero
from phalanx.policies.pipeline.gpipe import GPipe
from phalanx.policy import Spec
from phalanx.registry import build
from phalanx.worlds.comm_log import CommLog
from phalanx.worlds.logged_group import device_mesh, init_logged
from phalanx.worlds.sim import SimWorld
from tests.engines.pipeline_cases import StagedCase, build_staged, optimizer_of, step_of
from tests.engines.tensor_cases import rows_of
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


# ---- beside stages -------------------------------------------------------------------------------

CONFIG = small_config(
    vocab_size=31, hidden_size=18, intermediate_size=20, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=6, window=3, full_every=2, dtype="float32", init_std=0.2, tied_head=False,
)  # fmt: skip
ZERO = {"family": "data", "name": "zero", "stage": 1}
TWO_STAGES, FOUR_STAGES = [[0, 2], [2, 3]], [[0, 1], [1, 2], [2, 3], [3, 3]]
CHUNKS, SPLIT_PASS = {"name": "interleaved", "virtual": 2}, {"name": "zero_bubble"}
CUT = StagedCase(
    config=CONFIG, mesh={"pp": 2, "shard": 2}, specs=(ZERO,), stages=TWO_STAGES,
    rows=((5, 6), (7,), (3, 1, 5), (13,), (4,), (8,), (2, 6), (9,)),
)  # fmt: skip
BY_ROUND = replace(CUT, specs=(ZERO | {"stage": 2},))
STAGED = {
    "stage 1": CUT,
    "stage 1, chunks": replace(CUT, order=CHUNKS, stages=FOUR_STAGES),
    "stage 2": BY_ROUND,
    "stage 2, chunks": replace(BY_ROUND, order=CHUNKS, stages=FOUR_STAGES),
    "stage 2, weights apart": replace(BY_ROUND, order=SPLIT_PASS),
    "both ends on one rank": replace(BY_ROUND, order={"name": "zbv"}, stages=FOUR_STAGES),
}


def staged_logged(rank: int, world_size: int, cases: Sequence[StagedCase]):
    """Of each case what the data axis exchanged in the second step."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    found = []
    for case in cases:
        model = build_staged(rank, world_size, case)
        pipeline, optimizer = PipelineStep(model, torch.device("cpu")), optimizer_of(model)
        log = CommLog(rank)
        for number in range(2):
            log.clear()
            with log.step(number):
                pipeline.run(step_of(case, model, number))
                model.finish_step()
                optimizer.step(1e-3, norm=torch.ones(()))
                model.data.finish_update()
        found.append([row for row in log.seen(KINDS) if row[0] == "shard"])
    return found


def lowered(case: StagedCase, rank: int) -> list[tuple[str, str, int]]:
    """The same from the program of the second step."""
    mesh, order = Mesh(dict(case.mesh)), build("pipeline", dict(case.order))
    stages = [[f"model.layers.{at}" for at in range(*stage)] for stage in case.stages]
    stages[0], stages[-1] = ["model.embed_tokens", *stages[0]], [*stages[-1], "model.norm"]
    tokens = [len(row.tokens_S) for row in rows_of(case, 1)]
    specs = [build("data", {k: v for k, v in spec.items() if k != "family"}) for spec in case.specs]
    work = model_work(CONFIG, tokens[:: mesh.degree("shard")])
    program = lower(work, mesh, order, specs, grain="unit", stages=stages)
    actions = (action for action in program.of(rank) if isinstance(action, Collective))
    return [(a.axis, a.collective, int(a.payload_bytes)) for a in actions]


@pytest.mark.dist
def test_a_cut_update_beside_stages_exchanges_what_was_lowered():
    """Once a step, or once a round: the micro-batches that a stage takes before another does."""
    results = run_ranks(staged_logged, 4, list(STAGED.values()), backend=None)
    for rank, outcomes in enumerate(results):
        for (name, case), seen in zip(STAGED.items(), outcomes):
            expected = lowered(case, rank)
            assert Counter(seen) == Counter(expected), (name, rank)
    # four micro-batches a data rank, two layers and the embedding on the first rank
    reductions = [sum(kind == "reduce_scatter" for _, kind, _ in seen) for seen in results[0]]
    assert reductions[:4] == [3, 3, 12, 6]
