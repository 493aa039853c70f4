"""GPipe and 1F1B on torch's runtime: plain gradients bit for bit, executed as planned.

Every micro-batch has a length of its own; receive buffers come from the plan.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.registry import build
from phalanx.worlds.torch_pipelining import TorchPipeline
from tests.ranks import run_ranks
from tests.toy_pipeline import ITEM_TOKENS, make_toy, token_loss, toy_plan

SCHEDULES = ("gpipe", "1f1b")
DTYPES = (torch.float32, torch.float64)
CASES = [(name, dtype) for name in SCHEDULES for dtype in DTYPES]


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
    return {
        "piped": piped,
        "plain": toy.gradients(rank),
        "losses": losses,
        "plain_losses": [loss.detach() for loss in plain_losses],
        "log": [(row["operator"], row["action_id"]) for row in pipeline.trace_rows()],
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
def test_losses_of_the_last_rank_add_up_to_the_global_mean(results, case):
    *others, last = [of_rank[case] for of_rank in results]
    assert all(result["losses"] == [] for result in others)
    assert torch.equal(torch.stack(last["losses"]), torch.stack(last["plain_losses"]))


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES, ids=str)
def test_executed_log_equals_the_order(results, case):
    lists = build("pipeline", case[0]).order(len(results), len(ITEM_TOKENS))
    for of_rank, steps in zip(results, lists, strict=True):
        computed = [pair for pair in of_rank[case]["log"] if pair[0].startswith("stage.")]
        assert computed == [(f"stage.{step.kind}", str(step)) for step in steps]
