"""What fully sharded data parallelism must keep on real processes: training, memory, schedule.

4 processes, float32: layouts agree with one process and with one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from phalanx.engines import fsdp_buffers, unit_sum
from phalanx.engines.bind import bind_data
from phalanx.errors import PlanError
from phalanx.mesh import Mesh
from phalanx.models.spec import small_config
from phalanx.policies.data.fsdp import Fsdp
from phalanx.policies.data.replicate import Replicate
from phalanx.policies.data.zero import Zero
from phalanx.worlds.comm_log import CommLog
from phalanx.worlds.logged_group import device_mesh, init_logged
from tests.engines.tensor_cases import FSDP, REPLICATE, Case, train_cases, train_plain
from tests.engines.test_proof_b_fsdp2 import NUM_UNITS, TOKENS, Toy, bound, loss_of, step
from tests.ranks import current_store, run_ranks

CONFIG = small_config(
    vocab_size=31, hidden_size=18, intermediate_size=22, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=6, dtype="float32",
)  # fmt: skip
PLAIN = Case(config=CONFIG, mesh={}, lr=1e-3, rows=((5, 6), (7,), (3, 1, 5), (13,)) * 2)
KEPT, EVERY = FSDP | {"reshard_after_forward": False}, FSDP | {"reduce_every_item": True}
HYBRID = {"replicate": 2, "shard": 2}
LAYOUTS = {
    "reshard": replace(PLAIN, mesh={"shard": 4}, specs=(FSDP,)),
    "kept": replace(PLAIN, mesh={"shard": 4}, specs=(KEPT,)),
    "reduced every time": replace(PLAIN, mesh={"shard": 4}, specs=(EVERY,)),
    "hybrid": replace(PLAIN, mesh=HYBRID, specs=(FSDP, REPLICATE)),
    "hybrid, kept": replace(PLAIN, mesh=HYBRID, specs=(KEPT, REPLICATE)),
}


@pytest.mark.dist
def test_all_layouts_train_as_one_process_and_as_one_another():
    expected = train_plain(PLAIN)
    outcomes = run_ranks(train_cases, 4, list(LAYOUTS.values()), backend=None)[0]
    for found in outcomes:
        assert found.losses == pytest.approx(expected.losses, abs=1e-6, rel=1e-6)
        for name, weight in expected.weights.items():
            torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=1e-5)
            torch.testing.assert_close(
                found.weights[name], outcomes[0].weights[name], rtol=0, atol=1e-6
            )


# ---- memory and schedule -------------------------------------------------------------------------


def gathered_units(modules: list[FSDPModule]) -> int:
    """Units whose weights are whole here or on their way."""
    groups = [module._get_fsdp_state()._fsdp_param_groups[0] for module in modules]
    return sum(g.is_unsharded or g._all_gather_result is not None for g in groups)


def schedule(rank: int, world_size: int, prefetch: int) -> tuple[int, int]:
    """The most units that are gathered beside the root, and the most gathers that nobody has
    waited for yet, in one step."""
    spec = Fsdp(prefetch=prefetch)
    model, data = bound(rank, world_size, {"shard": world_size}, [spec], torch.float32)
    layers, counts = list(model.layers), []

    def count(*_: object) -> None:
        counts.append(gathered_units(layers))

    for layer in layers:
        layer.register_forward_hook(count)
        layer.down.register_full_backward_pre_hook(count)
        layer.up.register_full_backward_hook(count)
    step(model, data, rank, world_size, 1)
    counts.clear()
    log = CommLog(rank)
    with log.step(0):
        step(model, data, rank, world_size, 1)
    gathers = [row for row in log.rows if row.kind == "all_gather"]
    open_at = [sum(a.start <= row.start < a.end for a in gathers) for row in gathers]
    assert len(gathers) == 2 * NUM_UNITS - 1
    return max(counts), max(open_at)


@pytest.mark.dist
@pytest.mark.parametrize("prefetch", [1, 2])
def test_no_more_is_gathered_than_the_unit_and_those_ahead_of_it(prefetch):
    for most_gathered, most_open in run_ranks(schedule, 2, prefetch, backend=None):
        assert 1 < most_gathered <= 1 + prefetch
        assert most_open <= max(2, prefetch)


# ---- shared weights ------------------------------------------------------------------------------


class Tied(Toy):
    """With a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__(torch.float64)
        self.head = nn.Linear(*reversed(self.embed.weight.shape), bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(super().forward(tokens))


def tied_gradient(rank: int, world_size: int, specs: list) -> Tensor:
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    model = Tied()
    data = bind_data(model, specs, device_mesh("cpu", Mesh({specs[0].axis: world_size})))
    held = dict(data.named_held(model.named_parameters()))
    data.begin_item(0, 1)
    loss_of(model, TOKENS[rank::world_size]).backward()
    data.finish_step()
    grad = held["embed.weight"].grad
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


@pytest.mark.dist
@pytest.mark.parametrize("spec", [Fsdp(), Replicate(), Zero()], ids=lambda s: s.policy_name)
def test_a_shared_weight_has_the_gradient_of_both_uses(spec):
    model = Tied()
    loss_of(model, TOKENS).backward()
    for grad in run_ranks(tied_gradient, 2, [spec], backend=None):
        torch.testing.assert_close(grad, model.embed.weight.grad, rtol=1e-12, atol=1e-14)


def refused(rank: int, world_size: int, units: str) -> str:
    mesh = device_mesh("cpu", Mesh(shard=world_size))
    with pytest.raises(PlanError) as caught:
        bind_data(Tied(), [Fsdp(units=units)], mesh)
    return str(caught.value)


@pytest.mark.dist
@pytest.mark.parametrize("units", ["head", "[eh]*d"], ids=["head", "embedding and head"])
def test_a_weight_in_two_units_is_refused(units):
    assert "are one weight in two units" in run_ranks(refused, 1, units)[0]


# ---- what is not elementwise ---------------------------------------------------------------------


def lamb(weights: list[Tensor], norm) -> Iterator[Tensor]:
    """One step of LAMB's trust ratio on gradients of ones: an optimizer that reads norms."""
    for weight in weights:
        grad = torch.full_like(weight, 0.1)
        yield weight - 0.01 * grad * norm(weight) / norm(grad)


def lamb_steps(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Whole weights after a step with norms of shards, and with norms of DTensors."""
    model = Toy(torch.float64)
    fully_shard(model)
    weights = [p.detach() for p in model.parameters()]
    with torch.no_grad():
        of_shards = [
            torch.distributed.tensor.DTensor.from_local(
                new, w.device_mesh, w.placements, shape=w.shape, stride=w.stride()
            ).full_tensor()
            for w, new in zip(
                weights, lamb([w.to_local() for w in weights], torch.linalg.vector_norm)
            )
        ]
        whole = [new.full_tensor() for new in lamb(weights, lambda w: w.norm().full_tensor())]
    return of_shards, whole


@pytest.mark.dist
def test_norms_of_shards_are_not_those_of_weights_but_dtensors_know():
    expected = list(lamb([p.detach() for p in Toy(torch.float64).parameters()], torch.norm))
    for of_shards, whole in run_ranks(lamb_steps, 2):
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(whole, expected))
        apart = [not torch.allclose(a, b, rtol=1e-6) for a, b in zip(of_shards, expected)]
        assert all(apart[:-1])  # the norm layer is all ones


# ---- room for reductions -------------------------------------------------------------------------


def room_asked_for(rank: int, world_size: int, specs: list) -> tuple[int, int]:
    asked: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (fsdp_buffers, unit_sum):
            patch.setattr(module, "make_room", asked.append)
        tied_gradient(rank, world_size, specs)
    return sum(asked), sum(each.nbytes for each in Tied().parameters())


@pytest.mark.dist
@pytest.mark.parametrize("spec", [Fsdp(), Replicate(), Zero()], ids=lambda s: s.policy_name)
def test_every_gradient_that_is_copied_to_be_reduced_asks_for_room(spec):
    """Sharded ones for the part that a rank receives too; shards of odd sizes are padded."""
    for asked, whole in run_ranks(room_asked_for, 2, [spec], backend=None):
        assert whole <= asked <= 1.75 * whole
