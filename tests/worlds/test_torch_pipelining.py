"""Torch's pipelining runtime under planned shapes: any legal order, sizes checked before sends."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx.errors import PlanError, WorldError
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.policy import Step
from phalanx.trace import TraceBuilder
from phalanx.workload import toy_work
from phalanx.worlds.pipeline_plan import PipelinePlan, PlannedShapes
from phalanx.worlds.torch_pipelining import TorchPipeline, lowered_lists
from tests.order_strategies import Drawn, FixedOrder, orders, random_order
from tests.ranks import run_ranks
from tests.toy_pipeline import (
    WIDTH,
    accumulated,
    make_toy,
    token_loss,
    toy_plan,
)

FSDP_ONLY = ("UNSHARD", "RESHARD", "REDUCE_GRAD")


# ---- lowering, without processes ---------------------------------------------------------------


@settings(max_examples=40)
@given(orders())
def test_transfers_stand_where_torch_puts_them(drawn: Drawn):
    lists, placement, num_items = drawn
    tokens = range(1, num_items + 1)
    lowered = lowered_lists(toy_plan(lists, placement, tokens))
    order = FixedOrder(lists, placement)
    work = toy_work(len(placement), tokens)
    program = lower(work, Mesh(pp=len(lists)), order, grain="stage")
    for rank, actions in enumerate(lowered):
        ours = [a.label for a in program.of(rank) if a.kind in ("compute", "send", "recv")]
        assert ours[:-1] == [a for a in actions if not a.endswith(FSDP_ONLY)]
        assert ours[-1] == "O"


@settings(max_examples=40)
@given(orders())
def test_fsdp_actions_enclose_the_computes_of_a_stage(drawn: Drawn):
    lists, placement, num_items = drawn
    for actions in lowered_lists(toy_plan(lists, placement, range(1, num_items + 1))):
        gathered: set[str] = set()
        for action in actions:
            if action.endswith("UNSHARD"):
                gathered.add(action.removesuffix("UNSHARD"))
            elif action.endswith("RESHARD"):
                gathered.remove(action.removesuffix("RESHARD"))
            elif "_" not in action:
                assert action[0] in gathered
        assert not gathered
        stages = {str(s) for s in range(len(placement)) if f"{s}F0" in actions}
        assert {a[0] for a in actions if a.endswith("REDUCE_GRAD")} == stages


# ---- real processes ----------------------------------------------------------------------------

TOKENS = (3, 1, 4, 2)
PLACEMENTS = ((0, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1, 1, 0))
RANDOM = [(placement, seed) for placement in PLACEMENTS for seed in range(3)]


def run_random_orders(rank: int, world_size: int) -> list[dict[str, Any]]:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)  # torch then checks shapes against one of them
    results = [_run_random(rank, *case) for case in RANDOM]
    dist.set_debug_level(level)
    return results


def _run_random(rank: int, placement: tuple[int, ...], seed: int) -> dict[str, Any]:
    lists = random_order(placement, len(TOKENS), seed)
    toy = make_toy(len(placement), TOKENS, torch.float32)
    plan = toy_plan(lists, placement, TOKENS)
    stages = plan.stages_of(rank)
    pipeline = TorchPipeline(plan, {s: toy.stages[s] for s in stages}, token_loss)
    pipeline.step(toy.inputs, toy.targets, num_counted_global=toy.num_counted)
    done = [s for s in lists[rank] if s.kind in "BW"]
    items = {stage: [s.item for s in done if s.stage == stage] for stage in stages}
    rows = pipeline.trace_rows(step=5)
    return {
        "piped": {stage: toy.gradients(stage) for stage in stages},
        "plain": {stage: accumulated(toy, stage, items[stage]) for stage in stages},
        "rows": rows,
        "lowered": pipeline.lowered_lists()[rank],
        "buffers": [
            info.buffer
            for stage in pipeline._stages
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
            for info in infos
        ],
    }


@pytest.fixture(scope="module")
def random_runs() -> list[list[dict[str, Any]]]:
    return run_ranks(run_random_orders, 2)


@pytest.mark.dist
@pytest.mark.parametrize("case", range(len(RANDOM)), ids=lambda at: str(RANDOM[at]))
def test_any_order_gives_plain_gradients_bit_for_bit(random_runs, case):
    for of_rank in random_runs:
        result = of_rank[case]
        assert result["piped"]
        for stage, piped in result["piped"].items():
            for a, b in zip(piped, result["plain"][stage], strict=True):
                assert torch.equal(a, b)


@pytest.mark.dist
@pytest.mark.parametrize("case", range(len(RANDOM)), ids=lambda at: str(RANDOM[at]))
def test_the_executed_log_is_the_lowered_list(random_runs, case):
    for of_rank in random_runs:
        executed = [row["action_id"] for row in of_rank[case]["rows"]]
        lowered = of_rank[case]["lowered"]
        assert executed == [action for action in lowered if not action.endswith(FSDP_ONLY)]


@pytest.mark.dist
def test_rows_are_a_trace_with_sizes_of_the_plan(random_runs):
    builder = TraceBuilder("measured", "toy")
    for of_rank in random_runs:
        builder.extend(of_rank[0]["rows"])
    trace = builder.build()
    sent = trace.where(operator="send")
    assert set(trace.column("step")) == {5} and len(sent) == 2 * len(TOKENS)
    for item, payload_bytes in zip(sent.column("item"), sent.column("payload_bytes")):
        assert payload_bytes == TOKENS[item] * WIDTH * 4
    for rank in (0, 1):
        computes = trace.where(rank=rank, lane="compute")
        spans = list(zip(computes.column("start_s"), computes.column("dur_s")))
        assert all(start + length <= later for (start, length), (later, _) in pairwise(spans))
        assert all(length > 0 for _, length in spans)


@pytest.mark.dist
def test_no_receive_buffer_outlives_its_step(random_runs):
    buffers = [b for of_rank in random_runs for result in of_rank for b in result["buffers"]]
    assert len(buffers) > 0 and all(buffer is None for buffer in buffers)


# ---- what modules may do -----------------------------------------------------------------------


class Transposing(nn.Module):
    """Gives a view whose strides are not those of the plan."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x_SD: Tensor, shift: Tensor) -> Tensor:
        return (self.weight @ (x_SD + shift).T).T


class Deaf(nn.Module):
    """Ignores its input: no gradient comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x_SD: Tensor, shift: Tensor) -> Tensor:
        return self.weight.expand(len(x_SD), WIDTH)


def sum_loss(output_SD: Tensor, target: None, *, num_counted_global: int) -> Tensor:
    return output_SD.sum() / num_counted_global


def plan_of_same_width(kinds: str) -> PipelinePlan:
    """Two ranks, all passes of one kind together; every output is as wide as the input."""
    lists = [
        [Step(stage, kind, item) for kind in kinds for item in range(len(TOKENS))]
        for stage in (0, 1)
    ]
    inside = [(num_tokens, WIDTH) for num_tokens in TOKENS]
    shapes = PlannedShapes(
        inputs=inside, outputs=[inside, inside], dtype="float32", input_dtype="float32"
    )
    return PipelinePlan(lists=lists, rank_of_stage=(0, 1), shapes=shapes)


def run_awkward_modules(rank: int, world_size: int) -> list[Tensor]:
    shifts = [torch.full((WIDTH,), float(item)) for item in range(len(TOKENS))]
    inputs = [torch.ones(num_tokens, WIDTH) for num_tokens in TOKENS]
    plan = plan_of_same_width("FB")
    gradients = []
    for modules in ((Transposing(), Transposing()), (Transposing(), Deaf())):
        pipeline = TorchPipeline(plan, {rank: modules[rank]}, sum_loss)
        for _ in range(2):  # gradients of two steps add up
            pipeline.step(
                inputs,
                [None] * len(TOKENS),
                num_counted_global=10,
                keywords=[{"shift": shift} for shift in shifts],
            )
        gradients.append(modules[rank].weight.grad)
    return gradients


@pytest.mark.dist
def test_strided_outputs_missing_gradients_and_keywords():
    (first, unheard), (second, constant) = run_ranks(run_awkward_modules, 2)
    with_shift = sum(n * (1.0 + item) for item, n in enumerate(TOKENS))
    twice_shifted = sum(n * (1.0 + 2.0 * item) for item, n in enumerate(TOKENS))
    torch.testing.assert_close(first, torch.full((WIDTH, WIDTH), 2 * with_shift / 10))
    torch.testing.assert_close(second, torch.full((WIDTH, WIDTH), 2 * twice_shifted / 10))
    assert torch.equal(unheard, torch.zeros(WIDTH, WIDTH))
    torch.testing.assert_close(constant, torch.full((WIDTH,), 2 * sum(TOKENS) / 10))


def run_deaf_in_two_parts(rank: int, world_size: int) -> str:
    """Stands alone on rank 1: inputs come from rank 0 by hand."""
    if rank == 0:
        for num_tokens in TOKENS:
            dist.send(torch.ones(num_tokens, WIDTH), dst=1)
        return ""
    pipeline = TorchPipeline(plan_of_same_width("FIW"), {1: Deaf()}, sum_loss)
    keywords = [{"shift": torch.zeros(WIDTH)}] * len(TOKENS)
    with pytest.raises(WorldError) as caught:
        pipeline.step(None, [None] * len(TOKENS), num_counted_global=10, keywords=keywords)
    assert caught.value.code == "world/unbound"
    return str(caught.value)


@pytest.mark.dist
def test_weight_gradients_that_torch_would_leave_out_are_refused():
    _, message = run_ranks(run_deaf_in_two_parts, 2)
    assert message.startswith("backward pass of stage 1, micro-batch 0 = I: no gradient reaches")


class Again(nn.Module):
    """Three products that the backward pass computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.num_calls = 0

    def forward(self, x_SD: Tensor, shift: Tensor) -> Tensor:
        return checkpoint(self._once, x_SD + shift, use_reentrant=False)

    def _once(self, x_SD: Tensor) -> Tensor:
        self.num_calls += 1
        return self.layers(x_SD)


def run_again_in_two_parts(rank: int, world_size: int) -> int:
    module = Again()
    pipeline = TorchPipeline(plan_of_same_width("FIW"), {rank: module}, sum_loss)
    inputs = [torch.ones(num_tokens, WIDTH) for num_tokens in TOKENS]
    keywords = [{"shift": torch.zeros(WIDTH)}] * len(TOKENS)
    pipeline.step(inputs, [None] * len(TOKENS), num_counted_global=10, keywords=keywords)
    return module.num_calls


@pytest.mark.dist
def test_a_layer_is_computed_again_once_in_each_part_of_its_backward_pass():
    """On the first stage, whose input has no gradient, all is done in the second part."""
    assert run_ranks(run_again_in_two_parts, 2) == [2 * len(TOKENS), 3 * len(TOKENS)]


# ---- bad input -----------------------------------------------------------------------------------


class Longer(nn.Module):
    """Adds a token to micro-batches of 3."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x_SD: Tensor) -> Tensor:
        y_SD = x_SD * self.weight
        return torch.cat([y_SD, y_SD[:1]]) if len(x_SD) == 3 else y_SD


def send_a_wrong_size(rank: int, world_size: int) -> tuple[str, list[str]] | list[float]:
    """Rank 0 fails at micro-batch 1; what rank 1 receives shows what was sent."""
    tokens = (2, 3)
    plan = toy_plan([[Step(r, k, i) for k in "FB" for i in (0, 1)] for r in (0, 1)], (0, 1), tokens)
    if rank == 1:
        received = [torch.zeros(2, WIDTH), torch.zeros(3, WIDTH)]
        for tensor in received:
            dist.recv(tensor, src=0)
        return [float(tensor.mean()) for tensor in received]
    pipeline = TorchPipeline(plan, {0: Longer()}, token_loss)
    inputs = [torch.ones(num_tokens, WIDTH) for num_tokens in tokens]
    with pytest.raises(WorldError) as caught:
        pipeline.step(inputs, num_counted_global=5)
    dist.send(torch.full((3, WIDTH), 7.0), dst=1)
    assert caught.value.code == "world/size"
    return str(caught.value), [row["action_id"] for row in pipeline.trace_rows()]


@pytest.mark.dist
def test_an_output_that_differs_from_the_plan_is_refused_before_its_send():
    (message, executed), received = run_ranks(send_a_wrong_size, 2)
    assert "output of stage 0, micro-batch 1 = (4, 6) float32" in message
    assert "nearest legal values: (3, 6) float32" in message
    assert executed == ["0F0", "0SEND_F0"] and received == [1.0, 7.0]


def bad_inputs(rank: int, world_size: int) -> list[str]:
    toy = make_toy(1, TOKENS, torch.float32)
    lists = [[Step(0, kind, item) for kind in "FB" for item in range(len(TOKENS))]]
    pipeline = TorchPipeline(toy_plan(lists, (0,), TOKENS), {0: toy.stages[0]}, token_loss)
    short = [toy.inputs[0], *toy.inputs[:-1]]
    double = [tensor.double() for tensor in toy.inputs]
    messages = []
    for inputs in (None, toy.inputs[:2], short, double):
        with pytest.raises(WorldError) as caught:
            pipeline.step(inputs, toy.targets, num_counted_global=1)
        messages.append(str(caught.value))
    assert pipeline.trace_rows() == []
    with pytest.raises(PlanError, match="exactly its stages"):
        TorchPipeline(toy_plan(lists, (0,), TOKENS), {}, token_loss)
    with pytest.raises(PlanError, match="the group has 1 ranks, the plan has 2 lists"):
        two = toy_plan(random_order((0, 1), 4, 0), (0, 1), TOKENS)
        TorchPipeline(two, {0: toy.stages[0]}, token_loss)
    return messages


@pytest.mark.dist
def test_inputs_that_differ_from_the_plan_are_refused_before_the_step():
    [messages] = run_ranks(bad_inputs, 1)
    assert messages[0].startswith("inputs: stage 0 needs one input per micro-batch")
    assert messages[1].startswith("inputs = 2: stage 0 needs one input per micro-batch")
    assert messages[2].startswith("input of stage 0, micro-batch 1 = (3, 6) float32: differs")
    assert messages[3].startswith("input of stage 0, micro-batch 0 = (3, 6) float64: differs")
