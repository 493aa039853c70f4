"""Proof c, torch's own composition: DTensor, FSDP2 and its pipelining runtime do what was lowered.

Four gloo processes train a small transformer that the binders wrapped by the same rules that are
lowered and simulated. Gradients are those of one process, and per axis the exchanged bytes are
those of the simulated program.

Where torch does something else, the test of it is named `..._differs`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.engines.bind import BoundData, bind_data
from phalanx.engines.bind_tensor import bind_tensor
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.policies.data.fsdp import Fsdp
from phalanx.policies.data.replicate import Replicate
from phalanx.policies.tensor.megatron import Megatron
from phalanx.policy import Order, Spec
from phalanx.registry import build
from phalanx.worlds.comm_log import CommLog
from phalanx.worlds.logged_group import device_mesh, init_logged
from phalanx.worlds.pipeline_plan import PipelinePlan, PlannedShapes
from phalanx.worlds.sim import SimWorld
from phalanx.worlds.torch_pipelining import TorchPipeline
from tests.engines.toy_transformer import (
    CHANNELS,
    NUM_LAYERS,
    VOCABULARY,
    WIDTH,
    Item,
    make_items,
    make_stage,
    reference,
    split_item,
    token_loss,
    work_of,
)
from tests.ranks import current_store, run_ranks

TOKENS = (6, 3, 4)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
Seen = list[tuple[str, str, int]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is planned."""

    axes: Mapping[str, int]
    specs: Sequence[Spec]
    schedule: str = "1f1b"
    dtype: torch.dtype = torch.float64

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.axes)

    @property
    def order(self) -> Order:
        return build("pipeline", self.schedule)

    @property
    def is_piped(self) -> bool:
        return self.mesh.degree("pp") > 1

    @property
    def num_replicas(self) -> int:
        return self.mesh.degree("shard") * self.mesh.degree("replicate")

    @property
    def num_counted(self) -> int:
        return self.num_replicas * sum(TOKENS)

    @property
    def token_parts(self) -> int:
        """Ranks that tokens are split over."""
        return self.mesh.degree("tp") if SEQUENCE in self.specs else 1

    def items(self, rank: int) -> list[Item]:
        """Micro-batches of a rank; where tokens are split, its part of them, padded."""
        at = self.mesh.coordinate
        whole = make_items(at(rank, "shard") + at(rank, "replicate"), TOKENS)
        parts = self.token_parts
        return [split_item(item, parts, at(rank, "tp") % parts) for item in whole]

    def of_family(self, family: str) -> list[Spec]:
        return [spec for spec in self.specs if spec.family == family]

    def simulated(self, rank: int) -> Seen:
        """(axis, kind, bytes) of a rank in order of issue."""
        work = work_of(TOKENS, self.dtype.itemsize, is_piped=self.is_piped)
        program = lower(work, self.mesh, self.order, self.specs)
        trace = drive(SimWorld(self.mesh, TableCost({}, missing_s=1.0)), program=program)
        rows = trace.where(rank=rank).rows()
        return [(r["axis"], r["operator"], int(r["payload_bytes"])) for r in rows if r["axis"]]


KEPT = Fsdp(reshard_after_forward=False)
# the toy computes its loss from whole logits; a split vocabulary is proven on the real decoder
PRODUCTS = Megatron(vocabulary_parallel=False)
SEQUENCE = Megatron(sequence_parallel=True, gather_twice=False, vocabulary_parallel=False)
CASES = {
    "fsdp x tp": Case(axes={"shard": 2, "tp": 2}, specs=[Fsdp(), PRODUCTS]),
    "fsdp x tp, fp32": Case(
        axes={"shard": 2, "tp": 2}, specs=[Fsdp(), PRODUCTS], dtype=torch.float32
    ),
    "tp x fsdp, no reshard": Case(axes={"tp": 2, "shard": 2}, specs=[KEPT, PRODUCTS]),
    "pp x fsdp": Case(axes={"pp": 2, "shard": 2}, specs=[KEPT]),
    "pp x fsdp, fp32": Case(
        axes={"pp": 2, "shard": 2}, specs=[KEPT], schedule="gpipe", dtype=torch.float32
    ),
    "pp x tp": Case(axes={"pp": 2, "tp": 2}, specs=[PRODUCTS]),
    "tp x pp, gpipe": Case(axes={"tp": 2, "pp": 2}, specs=[PRODUCTS], schedule="gpipe"),
    "fsdp x sequence": Case(axes={"shard": 2, "tp": 2}, specs=[Fsdp(), SEQUENCE]),
    "pp x sequence": Case(axes={"pp": 2, "tp": 2}, specs=[SEQUENCE]),
    "replicate x tp": Case(axes={"replicate": 2, "tp": 2}, specs=[Replicate(), PRODUCTS]),
}
RESHARDED = Case(axes={"pp": 2, "shard": 2}, specs=[Fsdp()])


class Outcome(NamedTuple):
    """Of one rank."""

    seen: Seen
    loss: float
    gradients: dict[str, Tensor]


def train_rank(rank: int, world_size: int, case: Case) -> Outcome:
    """Two steps; what the second exchanged, its loss on this rank, its gradients."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    mesh = device_mesh("cpu", case.mesh)
    at = case.mesh.coordinate(rank, "pp")
    num_layers = NUM_LAYERS // case.mesh.degree("pp")
    model = make_stage(range(at * num_layers, (at + 1) * num_layers), case.dtype)
    tensor = bind_tensor(model, case.of_family("tensor"), mesh)
    data = bind_data(model, case.of_family("data"), mesh)
    run = _piped(case, rank, model, mesh) if case.is_piped else _plain(case, rank, model, data)
    log, total = CommLog(rank), 0.0
    for number in range(2):
        model.zero_grad()
        log.clear()
        with log.step(number):
            losses = run()
            tensor.finish_step()
        total = sum(loss.item() for loss in losses)
    return Outcome(log.seen(), total, {n: _whole(p.grad) for n, p in model.named_parameters()})


def _plain(case: Case, rank: int, model: nn.Module, data: BoundData):
    items = case.items(rank)

    def run() -> list[Tensor]:
        losses = []
        for index, item in enumerate(items):
            data.begin_item(index, len(items))
            logits_SV = model(item.tokens_S)
            loss = token_loss(logits_SV, item.targets_S, num_counted_global=case.num_counted)
            loss.backward()
            losses.append(loss.detach())
        data.finish_step()
        return losses

    return run


def _piped(case: Case, rank: int, model: nn.Module, mesh: Any):
    items = case.items(rank)
    num_stages, sizes = case.mesh.degree("pp"), [len(item.tokens_S) for item in items]
    name = str(case.dtype).removeprefix("torch.")
    inside, last = [(n, WIDTH) for n in sizes], [(n, VOCABULARY) for n in sizes]
    outputs = [*[inside] * (num_stages - 1), last]
    plan = PipelinePlan(
        lists=case.order.order(num_stages, len(TOKENS)),
        rank_of_stage=tuple(range(num_stages)),
        shapes=PlannedShapes(
            inputs=[(n,) for n in sizes], outputs=outputs, dtype=name, input_dtype="int64"
        ),
    )
    stage = {case.mesh.coordinate(rank, "pp"): model}
    pipeline = TorchPipeline(plan, stage, token_loss, group=mesh.get_group("pp"))
    inputs, targets = zip(*items)
    return lambda: pipeline.step(inputs, targets, num_counted_global=case.num_counted)


def _whole(grad: Tensor) -> Tensor:
    return (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()


@pytest.fixture(scope="module", params=list(CASES))
def trained(request) -> tuple[Case, list[Outcome]]:
    case = CASES[request.param]
    return case, run_ranks(train_rank, case.mesh.size, case, backend=None)


def on(axis: str, seen: Seen, *kinds: str) -> list[tuple[str, int]]:
    return [(kind, b) for of, kind, b in seen if of == axis and (not kinds or kind in kinds)]


@pytest.mark.dist
def test_gradients_equal_those_of_one_process(trained):
    case, outcomes = trained
    mesh = case.mesh
    loss, gradients = reference(case.num_replicas, TOKENS, case.dtype)
    scale = max(float(grad.abs().max()) for grad in gradients.values())
    names = set()
    for outcome in outcomes:
        names |= outcome.gradients.keys()
        for name, grad in outcome.gradients.items():
            worst = float((grad - gradients[name]).abs().max()) / scale
            assert worst < TOLERANCE[case.dtype], name
    assert names == gradients.keys()
    counted = [r for r in range(mesh.size) if mesh.coordinate(r, "tp") < case.token_parts]
    found = sum(outcomes[rank].loss for rank in counted)
    assert found == pytest.approx(loss, rel=TOLERANCE[case.dtype])


@pytest.mark.dist
def test_every_axis_carries_the_simulated_bytes(trained):
    case, outcomes = trained
    for rank, outcome in enumerate(outcomes):
        simulated = case.simulated(rank)
        assert Counter(outcome.seen) == Counter(simulated)
        assert on("tp", outcome.seen) == on("tp", simulated)
        for kind in ("send", "recv"):
            assert on("pp", outcome.seen, kind) == on("pp", simulated, kind)
        if not case.is_piped:
            for axis in ("shard", "replicate"):
                assert on(axis, outcome.seen) == on(axis, simulated)


@pytest.mark.dist
def test_megatron_reduces_four_times_a_layer():
    """arXiv 1909.08053, section 3: 4 all-reduces of b s h per layer, and nothing else but once a
    step the norms of query heads."""
    case = CASES["pp x tp"]
    outcome, *_ = run_ranks(train_rank, 4, case, backend=None)
    expected = Counter({("all_reduce", n * WIDTH * 8): 4 * NUM_LAYERS // 2 for n in TOKENS})
    norms = NUM_LAYERS // 2 * CHANNELS * 8
    assert Counter(on("tp", outcome.seen)) == expected + Counter({("all_reduce", norms): 1})


# ---- what torch does differently -----------------------------------------------------------------


@pytest.mark.dist
def test_torchs_pipelining_gathers_a_stage_at_once_and_reduces_at_the_end_differs():
    """Torch's runtime unshards every unit of a stage before its first forward pass, and reduces
    root and layers in forward order after the last backward pass. Bytes are the planned ones; what
    is lost is the overlap: the plan gathers a unit when it is next, and reduces it while the units
    before it compute their last backward pass."""
    case = CASES["pp x fsdp"]
    outcomes = run_ranks(train_rank, 4, case, backend=None)
    for rank, outcome in enumerate(outcomes):
        torchs, planned = on("shard", outcome.seen), on("shard", case.simulated(rank))
        gathers = [each for each in torchs if each[0] == "all_gather"]
        reductions = [("reduce_scatter", num_bytes) for _, num_bytes in gathers]
        assert torchs == gathers + reductions  # the root's come first
        assert sorted(torchs) == sorted(planned)
        root = gathers[0][1]
        is_first = not case.mesh.coordinate(rank, "pp")
        assert [b for _, b in planned].index(root) == (0 if is_first else 2)
        assert planned[-1] == (("reduce_scatter", root) if is_first else reductions[1])


@pytest.mark.dist
def test_torchs_pipelining_keeps_parameters_after_a_backward_pass_differs():
    """With `reshard_after_forward`, torch's runtime gives parameters back after forward passes
    only: fewer gathers than planned, but after a backward pass the whole stage stays gathered, so
    the memory that resharding is for is not saved. In a pipeline on torch's runtime, switch it off
    (as the other cases do); the plan's numbers are those of a runtime that gives back."""
    case = RESHARDED
    outcomes = run_ranks(train_rank, 4, case, backend=None)
    lists = case.order.order(2, len(TOKENS))
    for rank, outcome in enumerate(outcomes):
        gathers, is_gathered = 0, False
        for step in lists[case.mesh.coordinate(rank, "pp")]:
            gathers += not is_gathered
            is_gathered = step.kind == "B"
        num_layers = NUM_LAYERS // 2
        layer = max(b for _, b in on("shard", outcome.seen))
        torchs = on("shard", outcome.seen, "all_gather").count(("all_gather", layer))
        planned = on("shard", case.simulated(rank), "all_gather").count(("all_gather", layer))
        assert torchs == gathers * num_layers < planned == 2 * len(TOKENS) * num_layers


def reductions_of_styles(rank: int, world_size: int) -> int:
    """Exchanges of one layer when torch's styles are applied to products only."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    layer = make_stage(range(NUM_LAYERS), torch.float64).layers["0"]
    column, row = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    styles = {f"*.{name}": ColwiseParallel() for name in column}
    styles |= {f"*.{name}": RowwiseParallel() for name in row}
    parallelize_module(layer, device_mesh("cpu", Mesh(tp=2))["tp"], styles)
    log = CommLog(rank)
    with log.step(0):
        layer(torch.ones(3, WIDTH, dtype=torch.float64, requires_grad=True)).sum().backward()
    return len(log.rows)


@pytest.mark.dist
def test_torchs_styles_alone_reduce_once_per_product_differs():
    """Each ColwiseParallel product sums the gradient of its own input: 2 forward and 5 backward
    instead of Megatron's 4. So `bind_tensor` lets a block's input enter once for all of them."""
    assert run_ranks(reductions_of_styles, 2, backend=None) == [7, 7]
