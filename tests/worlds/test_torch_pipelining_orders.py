"""The schedules with several chunks and split backward passes, on torch's runtime: plain gradients
bit for bit, executed as listed, shapes that change from step to step, files that torch loads."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.policy import Step
from phalanx.registry import build
from phalanx.schedule_file import write_schedule
from phalanx.worlds.torch_log import SpanLog
from phalanx.worlds.torch_pipelining import TorchPipeline, lowered_lists
from tests.ranks import run_ranks
from tests.toy_pipeline import accumulated, make_toy, token_loss, toy_plan

TOKENS = (3, 1, 4, 2, 5)  # no two alike, and more than there are stages of the folded ones
SECOND = (2, 6, 1, 3, 1)
ORDERS: dict[str, dict[str, Any]] = {
    "interleaved": {"name": "interleaved", "virtual": 3, "per_round": 3},
    "zero_bubble": {"name": "zero_bubble"},
    "zero_bubble deep": {"name": "zero_bubble", "depth": 2},
    "zbv": {"name": "zbv"},
    "dualpipe_v": {"name": "dualpipe_v"},
    "hanayo 1": {"name": "hanayo", "waves": 1},
    "hanayo 2": {"name": "hanayo", "waves": 2},
}


ON_FOUR = ("interleaved", "zbv", "hanayo 1", "hanayo 2")  # ranks with two neighbours
CASES = [(2, name) for name in ORDERS] + [(4, name) for name in ON_FOUR]


def run_orders(rank: int, world_size: int, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {name: _run(rank, world_size, ORDERS[name]) for name in names}


def _run(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Two steps of other lengths with one pipeline; each compute is heard of when it has ended."""
    order = build("pipeline", options)
    num_stages, placement = order.num_stages(world_size), order.rank_of_stage(world_size)
    lists = order.order(world_size, len(TOKENS))
    plan = toy_plan(lists, placement, TOKENS)
    toy = make_toy(num_stages, TOKENS, torch.float32)
    heard: list[Step] = []
    log = SpanLog(torch.device("cpu"))
    pipeline = TorchPipeline(
        plan,
        {stage: toy.stages[stage] for stage in plan.stages_of(rank)},
        token_loss,
        log=log,
        after=lambda kind, stage, item: heard.append(Step(stage, kind, item)),
    )
    result: dict[str, Any] = {"from file": _loaded(pipeline, lists, rank)}
    for number, tokens in enumerate((TOKENS, SECOND)):
        toy = toy._replace(**_rows(num_stages, tokens))
        pipeline.set_shapes(toy_plan(lists, placement, tokens).shapes)
        pipeline.step(toy.inputs, toy.targets, num_counted_global=toy.num_counted)
        last = {s: [e.item for e in lists[rank] if e.stage == s and e.kind in "BW"]
                for s in plan.stages_of(rank)}  # fmt: skip
        result[f"piped {number}"] = {stage: toy.gradients(stage) for stage in last}
        for stage in last:
            toy.stages[stage].zero_grad()
        result[f"plain {number}"] = {s: accumulated(toy, s, last[s]) for s in last}
    result["heard"], result["listed"] = heard, lists[rank]
    result["executed"] = [row["action_id"] for row in pipeline.trace_rows()]
    result["lowered"] = pipeline.lowered_lists()[rank]
    return result


def _rows(num_stages: int, tokens: tuple[int, ...]) -> dict[str, Any]:
    """Inputs and targets of these lengths."""
    toy = make_toy(num_stages, tokens, torch.float32)
    return {"inputs": toy.inputs, "targets": toy.targets}


def _loaded(pipeline: TorchPipeline, lists: list[list[Step]], rank: int) -> list[str]:
    """What torch's runtime makes of the schedule's file on this rank."""
    before = pipeline._runtime.pipeline_order_with_comms
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        write_schedule(path, lists)
        pipeline._runtime.pipeline_order = {}
        pipeline._runtime._load_csv(str(path))
    actions = [str(action) for action in pipeline._runtime.pipeline_order_with_comms[rank]]
    pipeline._runtime.pipeline_order_with_comms = before
    return actions


@pytest.fixture(scope="module")
def runs() -> dict[int, list[dict[str, dict[str, Any]]]]:
    return {
        num_ranks: run_ranks(run_orders, num_ranks, [n for ranks, n in CASES if ranks == num_ranks])
        for num_ranks in (2, 4)
    }


def is_compute(action: str) -> bool:
    return Step.parse(action) is not None


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_plain_ones_bit_for_bit_at_every_length(runs, case):
    num_ranks, name = case
    for of_rank in runs[num_ranks]:
        for number in (0, 1):
            piped, plain = of_rank[name][f"piped {number}"], of_rank[name][f"plain {number}"]
            assert piped.keys() == plain.keys() and piped
            for stage in piped:
                for a, b in zip(piped[stage], plain[stage], strict=True):
                    assert a.abs().sum() > 0 and torch.equal(a, b)


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES, ids=str)
def test_micro_batches_add_up_in_their_order(runs, case):
    """So a plain loop over them gives the same bits, whatever the schedule."""
    num_ranks, name = case
    for of_rank in runs[num_ranks]:
        ended = [step for step in of_rank[name]["listed"] if step.kind in "BW"]
        for stage in {step.stage for step in ended}:
            items = [step.item for step in ended if step.stage == stage]
            assert items == sorted(items)


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_compute_is_heard_of_once_in_order(runs, case):
    num_ranks, name = case
    for of_rank in runs[num_ranks]:
        result = of_rank[name]
        assert result["heard"] == 2 * result["listed"]
        done = [action for action in result["executed"] if is_compute(action)]
        assert done == 2 * [str(step) for step in result["listed"]], "a given log keeps both steps"


@pytest.mark.dist
@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_makes_the_same_of_the_file(runs, case):
    num_ranks, name = case
    for of_rank in runs[num_ranks]:
        result = of_rank[name]
        assert list(filter(is_compute, result["from file"])) == [
            str(step) for step in result["listed"]
        ]
        assert sorted(result["from file"]) == sorted(result["lowered"])


@pytest.mark.parametrize("name", ORDERS)
def test_a_wave_sends_over_every_hop_but_its_turns(name):
    order = build("pipeline", ORDERS[name])
    placement = order.rank_of_stage(4)
    plan = toy_plan(order.order(4, 8), placement, range(1, 9))
    hops = sum(a != b for a, b in pairwise(placement))
    sends = [a for actions in lowered_lists(plan) for a in actions if "SEND_F" in a]
    assert len(sends) == hops * 8
