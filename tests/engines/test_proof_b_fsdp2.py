"""Proof b: FSDP2 with prefetch and reshard is what the rules say, byte by byte and in order.

The rules are bound to torch's `fully_shard` on real gloo processes, and lowered and simulated. Both
must exchange the same collectives of the same bytes in the same order; gradients must be those of
one process on the whole batch.

Layers differ in width, so bytes tell which unit a collective belongs to; 7 rows of the embedding
and odd widths make shards uneven, and with 4 ranks some are empty.
"""

from __future__ import annotations

from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx.cost import fsdp as formulas
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.engines.bind import BoundData, bind_data
from phalanx.errors import PlanError
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.policies.data.fsdp import Fsdp
from phalanx.policies.data.replicate import Replicate
from phalanx.policies.pipeline.gpipe import GPipe
from phalanx.policy import Spec
from phalanx.workload import Block, Module, StepWork, Unit
from phalanx.worlds.comm_log import CommLog
from phalanx.worlds.logged_group import device_mesh, init_logged
from phalanx.worlds.sim import SimWorld
from tests.ranks import current_store, run_ranks

WIDTH, VOCABULARY, HIDDEN = 6, 7, (3, 5, 9, 13)  # inner width of each layer
NUM_UNITS = len(HIDDEN) + 1
TOKENS = torch.arange(24).reshape(8, 3) * 5 % VOCABULARY


class Layer(nn.Module):
    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=False, dtype=dtype)
        self.down = nn.Linear(hidden, WIDTH, bias=False, dtype=dtype)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Toy(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        self.layers = nn.ModuleList([Layer(hidden, dtype) for hidden in HIDDEN])
        self.norm = nn.LayerNorm(WIDTH, bias=False, dtype=dtype)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return (model(tokens) - 0.3).square().sum() / TOKENS.numel()


def work_of(itemsize: int, num_items: int = 1) -> StepWork:
    """The toy in numbers: the root unit first, as it is gathered first."""
    root = (Module("embed", (VOCABULARY, WIDTH)), Module("norm", (WIDTH,)))
    units = [Unit(name="root", blocks=(Block(name="root", op="root", modules=root),))]
    for at, hidden in enumerate(HIDDEN):
        name = f"layers.{at}"
        modules = (Module("up", (hidden, WIDTH)), Module("down", (WIDTH, hidden)))
        units.append(Unit(name=name, blocks=(Block(name=name, op="layer", modules=modules),)))
    tokens = (3,) * num_items
    return StepWork(
        units=tuple(units), item_tokens=tokens, param_bytes=itemsize, grad_bytes=itemsize
    )


def padded_bytes(num_ranks: int, itemsize: int) -> list[int]:
    """Bytes of each unit with every parameter's dim 0 padded to equal shards."""
    return [
        sum(
            -(-module.shape[0] // num_ranks) * num_ranks * prod(module.shape[1:]) * itemsize
            for block in unit.blocks
            for module in block.modules
        )
        for unit in work_of(itemsize).units
    ]


def simulated(spec: Spec, num_ranks: int, itemsize: int, num_items: int = 1) -> list[tuple]:
    """(kind, bytes) of rank 0's collectives in order of issue, at unit grain."""
    mesh = Mesh(shard=num_ranks)
    program = lower(work_of(itemsize, num_items), mesh, GPipe(), [spec], grain="unit")
    trace = drive(SimWorld(mesh, TableCost({}, missing_s=1)), program=program)
    return [
        (row["operator"], int(row["payload_bytes"]))
        for row in trace.where(rank=0, lane="axis:shard").rows()
        if row["operator"] in ("all_gather", "reduce_scatter")
    ]


def bound(rank: int, world_size: int, shape: dict, specs: list[Spec], dtype: torch.dtype):
    """A bound toy in a logged world."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    model = Toy(dtype)
    return model, bind_data(model, specs, device_mesh("cpu", Mesh(shape)))


def logged_ranks(fn, world_size: int, *args) -> list:
    """`run_ranks` for functions that make a logged default group."""
    return run_ranks(fn, world_size, *args, backend=None)


def step(model: nn.Module, data: BoundData, rank: int, world_size: int, num_items: int) -> float:
    items = TOKENS[rank::world_size].chunk(num_items)
    total = 0.0
    for index, tokens in enumerate(items):
        data.begin_item(index, len(items))
        loss = loss_of(model, tokens)
        loss.backward()
        total += loss.item()
    data.finish_step()
    return float(data.sum(torch.tensor(total, dtype=torch.float64)))


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
        parameter.grad = None
    return found


def run(rank, world_size, shape, specs, dtype, num_items=1):
    """Two steps: collectives, loss and gradients of the second, worst difference of both."""
    model, data = bound(rank, world_size, shape, specs, dtype)
    log = CommLog(rank)
    for number in range(2):
        log.clear()
        with log.step(number):
            loss = step(model, data, rank, world_size, num_items)
        seen = [row for row in log.seen() if not (row[1] == "all_reduce" and row[2] == 8)]
        gradients = whole_gradients(model)
    return seen, loss, gradients


def reference(dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    model = Toy(dtype)
    loss = loss_of(model, TOKENS)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def worst_difference(results: list, dtype: torch.dtype) -> float:
    loss, gradients = reference(dtype)
    scale = max(grad.abs().max().item() for grad in gradients.values())
    return max(
        max(
            abs(found_loss - loss) / loss,
            *((found[name] - grad).abs().max().item() / scale for name, grad in gradients.items()),
        )
        for _, found_loss, found in results
    )


TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("reshard", "dtype"), [(True, torch.float64), (False, torch.float32)])
def test_fsdp2_exchanges_what_the_rules_say(world_size, reshard, dtype):
    spec = Fsdp(reshard_after_forward=reshard)
    results = logged_ranks(run, world_size, {"shard": world_size}, [spec], dtype)
    seen = [(kind, num_bytes) for _, kind, num_bytes in results[0][0]]
    count = 3 * NUM_UNITS - 1 if reshard else 2 * NUM_UNITS
    assert len(seen) == count
    assert count == sum(formulas.num_collectives(NUM_UNITS, reshard=reshard).values())

    sizes = padded_bytes(world_size, dtype.itemsize)
    gathered = sum(num_bytes for kind, num_bytes in seen if kind == "all_gather")
    reduced = sum(num_bytes for kind, num_bytes in seen if kind == "reduce_scatter")
    assert gathered == sum(sizes) + (sum(sizes[1:]) if reshard else 0)
    assert reduced == sum(sizes)
    sent = (gathered + reduced) * (world_size - 1) / world_size
    assert sent == formulas.sharded_traffic_bytes(
        sum(sizes), world_size, reshard=reshard, kept_bytes=sizes[0]
    )

    assert seen == simulated(spec, world_size, dtype.itemsize)
    assert all(each[0] == results[0][0] for each in results)
    assert worst_difference(results, dtype) < TOLERANCE[dtype]


@pytest.mark.dist
def test_next_gather_is_issued_before_the_reduction():
    results = logged_ranks(run, 2, {"shard": 2}, [Fsdp()], torch.float32)
    sizes = padded_bytes(2, 4)
    seen = [(kind, num_bytes) for _, kind, num_bytes in results[0][0]][NUM_UNITS:]
    for unit in range(2, NUM_UNITS):  # the root (0) stays gathered
        reduction = seen.index(("reduce_scatter", sizes[unit]))
        assert seen.index(("all_gather", sizes[unit - 1])) < reduction


@pytest.mark.dist
@pytest.mark.parametrize(
    ("spec", "gathers", "reductions"),
    [
        (Fsdp(reshard_after_forward=False), NUM_UNITS, NUM_UNITS),
        (Fsdp(), 2 * (2 * NUM_UNITS - 1) - 1, NUM_UNITS),
        (Fsdp(reduce_every_item=True), 2 * (2 * NUM_UNITS - 1) - 1, 2 * NUM_UNITS),
    ],
    ids=["kept", "reshard", "reduce_every_item"],
)
def test_accumulation_gives_the_same_gradients(spec, gathers, reductions):
    results = logged_ranks(run, 2, {"shard": 2}, [spec], torch.float64, 2)
    kinds = [kind for _, kind, _ in results[0][0]]
    assert (kinds.count("all_gather"), kinds.count("reduce_scatter")) == (gathers, reductions)
    seen = [(kind, num_bytes) for _, kind, num_bytes in results[0][0]]
    assert sorted(seen) == sorted(simulated(spec, 2, 8, num_items=2))
    assert worst_difference(results, torch.float64) < 1e-12


@pytest.mark.dist
@pytest.mark.parametrize(
    ("shape", "specs"),
    [
        ({"replicate": 2, "shard": 2}, [Fsdp(), Replicate()]),
        ({"shard": 2, "replicate": 2}, [Fsdp(reshard_after_forward=False), Replicate()]),
        ({"replicate": 3}, [Replicate()]),
        ({"shard": 1}, [Fsdp()]),
        ({"shard": 3}, [Fsdp(prefetch=2)]),
    ],
    ids=["hsdp", "hsdp_other_order", "replicate", "one", "prefetch_2"],
)
def test_all_placements_give_the_gradients_of_one_process(shape, specs):
    results = logged_ranks(run, prod(shape.values()), shape, specs, torch.float64)
    assert worst_difference(results, torch.float64) < 1e-12
    if "replicate" in shape:
        shards = shape.get("shard", 1)
        sizes = [num_bytes // shards for num_bytes in padded_bytes(shards, 8)]
        summed = [
            b for axis, kind, b in results[0][0] if (axis, kind) == ("replicate", "all_reduce")
        ]
        assert summed == [*sizes[:0:-1], sizes[0]]  # layers backwards, the root last


def averages(rank, world_size):
    """What gloo makes of AVG, alone and inside an untouched `fully_shard`."""
    ours = torch.full((2,), float(rank + 1))
    out = torch.empty(1)
    dist.reduce_scatter_tensor(out, ours, op=dist.ReduceOp.AVG)
    model = Toy(torch.float64)
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    loss_of(model, TOKENS[rank::world_size]).backward()
    grad = model.norm.weight.grad.full_tensor()
    return out.item(), grad


@pytest.mark.dist
def test_gloo_divides_where_an_average_is_asked_for():
    """PyTorch issue 162338: gloo once returned the sum, so gradients were W times too large."""
    results = run_ranks(averages, 2)
    assert [value for value, _ in results] == [1.5, 1.5]
    _, gradients = reference(torch.float64)
    for _, grad in results:
        torch.testing.assert_close(2 * grad, gradients["norm.weight"], rtol=1e-12, atol=1e-14)


def frozen(rank, world_size):
    """Gathers of three steps when the root is frozen and not given back."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    model = Toy(torch.float32)
    model.embed.requires_grad_(False)
    model.norm.requires_grad_(False)
    spec = Fsdp(reshard_after_forward=False)
    data = bind_data(model, [spec], device_mesh("cpu", Mesh(shard=world_size)))
    log = CommLog(rank)
    counts = []
    for number in range(3):
        log.clear()
        with log.step(number):
            step(model, data, rank, world_size, 1)
        counts.append([kind for _, kind, _ in log.seen()].count("all_gather"))
    return counts


@pytest.mark.dist
def test_frozen_root_is_gathered_once():
    layers = len(HIDDEN)
    assert logged_ranks(frozen, 2)[0] == [layers + 1, layers, layers]


def refused(rank, world_size, specs, shape):
    mesh = device_mesh("cpu", Mesh(shape))
    with pytest.raises(PlanError) as caught:
        bind_data(Toy(torch.float32), specs, mesh)
    return str(caught.value)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("specs", "told"),
    [
        ([Fsdp(axis="tp")], "policy.data.fsdp.axis = tp: the mesh has no such axis"),
        ([Fsdp(), Fsdp()], "only one policy may place so"),
    ],
)
def test_illegal_specs_are_refused(specs, told):
    assert told in run_ranks(refused, 1, specs, {"shard": 1})[0]
