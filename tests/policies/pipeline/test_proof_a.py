"""GPipe and 1F1B on torch's runtime: plain gradients bit for bit, executed as planned.

Every micro-batch has a length of its own; receive buffers come from the plan.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.check import check_program
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.registry import build
from phalanx.trace import Trace, TraceBuilder
from phalanx.workload import toy_work
from phalanx.worlds.sim import SimWorld
from phalanx.worlds.torch_pipelining import TorchPipeline, lowered_lists
from tests.order_strategies import sizes
from tests.ranks import run_ranks
from tests.toy_pipeline import ITEM_TOKENS, WIDTH, make_toy, token_loss, toy_plan

SCHEDULES = ("gpipe", "1f1b")
DTYPES = (torch.float32, torch.float64)
OPERATORS = ("stage.F", "stage.B", "send", "recv")
COLUMNS = (  # all that does not tell time or work
    *("rank", "step", "action_id", "item", "layer", "phase", "operator"),
    *("lane", "axis", "peer", "payload_bytes", "wire_bytes"),
)
CASES = [(name, dtype) for name in SCHEDULES for dtype in DTYPES]


@given(st.sampled_from(SCHEDULES), sizes)
def test_lowered_lists_equal_torchs(name, size):
    p, m = size
    policy, tokens = build("pipeline", name), range(1, m + 1)
    program = lower(toy_work(p, tokens), Mesh(pp=p), policy, grain="stage")
    plan = toy_plan(policy.order(p, m), policy.rank_of_stage(p), tokens)
    for rank, actions in enumerate(lowered_lists(plan)):
        labels = [a.label for a in program.of(rank) if a.operator in OPERATORS]
        assert labels == [a for a in actions if not a.endswith(("SHARD", "REDUCE_GRAD"))]


def train_once(rank: int, world_size: int) -> dict[tuple, dict[str, Any]]:
    """One step of every case on this rank: gradients and losses, with and without the pipeline."""
    return {case: _one_case(rank, world_size, *case) for case in CASES}


def _one_case(rank: int, world_size: int, name: str, dtype: torch.dtype) -> dict[str, Any]:
    policy = build("pipeline", name)
    lists = policy.order(world_size, len(ITEM_TOKENS))
    plan = toy_plan(lists, policy.rank_of_stage(world_size), ITEM_TOKENS, dtype)
    toy = make_toy(world_size, ITEM_TOKENS, dtype)
    pipeline = TorchPipeline(plan, {rank: toy.stages[rank]}, token_loss)
    losses = pipeline.step(toy.inputs, toy.targets, num_counted_global=toy.num_counted)
    piped = toy.gradients(rank)

    toy.stages[rank].zero_grad()
    plain_losses = [toy.loss(item) for item in range(plan.num_items)]
    for loss in plain_losses:
        loss.backward()
    plain = toy.gradients(rank)

    toy.stages[rank].zero_grad()
    whole = toy.whole_loss()
    whole.backward()
    return {
        "piped": piped,
        "plain": plain,
        "whole": toy.gradients(rank),
        "losses": losses,
        "plain_losses": [loss.detach() for loss in plain_losses],
        "whole_loss": whole.detach(),
        "rows": pipeline.trace_rows(step=1),
    }


@pytest.fixture(scope="module", params=[1, 2, 4])
def results(request) -> list[dict[tuple, dict[str, Any]]]:
    return run_ranks(train_once, request.param)


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES, ids=str)
def test_piped_gradients_equal_plain_ones_bit_for_bit(results, case):
    for of_rank in results:
        result = of_rank[case]
        assert len(result["piped"]) > 0
        for piped, plain in zip(result["piped"], result["plain"], strict=True):
            assert piped.abs().sum() > 0 and torch.equal(piped, plain)


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES, ids=str)
def test_micro_batches_add_up_to_the_mean_over_the_whole_batch(results, case):
    *others, last = [of_rank[case] for of_rank in results]
    assert all(result["losses"] == [] for result in others)
    losses = torch.stack(last["losses"])
    assert torch.equal(losses, torch.stack(last["plain_losses"]))
    tolerance = 1e-12 if case[1] is torch.float64 else 1e-5
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close(losses.sum(), last["whole_loss"])
    for result in (*others, last):
        close(result["piped"], result["whole"])


def simulated(name: str, dtype: torch.dtype, num_ranks: int) -> Trace:
    """The same step in the simulated world, at the grain of stages."""
    work = toy_work(num_ranks, ITEM_TOKENS, width=WIDTH, itemsize=dtype.itemsize)
    mesh = Mesh(pp=num_ranks)
    program = lower(work, mesh, build("pipeline", name), grain="stage")
    check_program(program)
    prices = TableCost({"stage.F": 1.0, "stage.B": 2.0, "send": 1.0, "optimizer": 0.0})
    return drive(SimWorld(mesh, prices), program=program)


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES, ids=str)
def test_measured_log_equals_the_simulated_one(results, case):
    trace = simulated(*case, len(results))
    for rank, of_rank in enumerate(results):
        rows = trace.where(rank=rank).rows()
        expected = [{c: row[c] for c in COLUMNS} for row in rows if row["operator"] in OPERATORS]
        measured = [{c: row[c] for c in COLUMNS if c in row} for row in of_rank[case]["rows"]]
        num_neighbours = (rank > 0) + (rank < len(results) - 1)
        assert len(expected) == 2 * len(ITEM_TOKENS) * (1 + num_neighbours)
        assert [blank(row) for row in measured] == expected


def blank(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the empty values of columns that it does not give."""
    builder = TraceBuilder("measured")
    builder.add(**row)
    [whole] = builder.build().rows()
    return {column: whole[column] for column in COLUMNS}
