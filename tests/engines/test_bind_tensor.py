"""The tensor binder: a decoder split by products is the decoder, and what cannot be split is told.

S packed tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.engines.bind import bind_data
from phalanx.engines.bind_tensor import bind_tensor
from phalanx.errors import PlanError
from phalanx.mesh import Mesh
from phalanx.models.decoder import Decoder
from phalanx.models.lora import inject
from phalanx.models.parameters import initial_value, load_parameters
from phalanx.models.spec import LoraSpec, canonical_tensors, small_config
from phalanx.ops.loss import counted_cross_entropy
from phalanx.policies.data.fsdp import Fsdp
from phalanx.policies.tensor.megatron import Megatron
from phalanx.policy import Exchange, Rule, Spec
from phalanx.worlds.comm_log import CommLog
from phalanx.worlds.logged_group import device_mesh, init_logged
from tests.ranks import current_store, run_ranks

CONFIG = small_config(
    vocab_size=31, hidden_size=18, intermediate_size=22, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=6, window=3, full_every=2, dtype="float64",
)  # fmt: skip
HEADS = {"*.self_attn.[qkvo]_proj": 6}
TOKENS_S = torch.arange(22) * 7 % 31
COUNTED_N = torch.tensor([0, 1, 4, 5, 9, 10, 12])  # of the 11 rows of each replica
KEPT = Megatron(sequence_parallel=True, gather_twice=False)


def values() -> list[tuple[str, Tensor]]:
    """Fresh tensors; norms are not the identity."""
    return [
        (spec.name, initial_value(3, spec.name, spec.shape, torch.float64, std=0.2))
        for spec in canonical_tensors(CONFIG).values()
    ]


def loss_of(decoder: nn.Module, rows_S: Tensor) -> Tensor:
    hidden_SD = decoder(rows_S[:11], document_starts=(0, 4))
    counted_N = COUNTED_N[COUNTED_N < 10]
    return counted_cross_entropy(
        hidden_SD, decoder.head_weight, counted_N, rows_S[1:][counted_N], num_counted_global=12
    )


def reference(num_replicas: int) -> dict[str, Tensor]:
    decoder = Decoder(CONFIG)
    load_parameters(decoder, values())
    for rows_S in TOKENS_S.chunk(2)[:num_replicas]:
        loss_of(decoder, rows_S).backward()
    return {name: p.grad for name, p in decoder.named_parameters()}


def train_decoder(rank: int, world_size: int, axes: dict[str, int], data: list[Spec]):
    """Gradients of one step and what it exchanged, from weights filled after binding."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    shape = Mesh(axes)
    mesh = device_mesh("cpu", shape)
    decoder = Decoder(CONFIG, device="meta")
    tensor = bind_tensor(decoder, [Megatron()], mesh, multiples=HEADS)
    sharded = bind_data(decoder, data, mesh)
    decoder.to_empty(device="cpu")
    load_parameters(decoder, values())
    log = CommLog(rank)
    with log.step(0):
        sharded.begin_item(0, 1)
        loss_of(decoder, TOKENS_S.chunk(2)[shape.coordinate(rank, "shard")]).backward()
        sharded.finish_step()
        tensor.finish_step()
    grads = {name: p.grad for name, p in decoder.named_parameters()}
    whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}
    return whole, Counter(row for row in log.seen() if row[0] == "tp")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("axes", "data"),
    [({"tp": 1}, []), ({"tp": 2}, []), ({"shard": 2, "tp": 2}, [Fsdp(units="model.layers.*")])],
    ids=str,
)
def test_a_split_decoder_has_the_gradients_of_the_whole(axes, data):
    mesh = Mesh(axes)
    expected = reference(mesh.degree("shard"))
    results = run_ranks(train_decoder, mesh.size, axes, data, backend=None)
    for grads, seen in results:
        assert grads.keys() == expected.keys()
        for name, grad in expected.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-9, atol=1e-13, msg=name)
        if mesh.degree("tp") == 1:
            assert not seen
            continue
        norms = 2 * CONFIG.num_layers * 6 // mesh.degree("shard") * 8
        activations = ("tp", "all_reduce", 11 * CONFIG.hidden_size * 8)
        assert seen == {activations: 4 * CONFIG.num_layers, ("tp", "all_reduce", norms): 1}


def told(rank: int, world_size: int, spec: Spec, multiples: dict[str, int], adapts: bool) -> str:
    decoder = Decoder(CONFIG, device="meta")
    if adapts:
        inject(decoder, LoraSpec(rank=2, alpha=4.0), dtype="float32")
    with pytest.raises(PlanError) as caught:
        bind_tensor(decoder, [spec], device_mesh("cpu", Mesh(tp=world_size)), multiples=multiples)
    return str(caught.value)


class Odd(Megatron):
    """Rules that torch has no form for."""

    def rules(self) -> tuple[Rule, ...]:
        column, *others = super().rules()
        if self.gather_twice:
            return (replace(column, placement="vocab"), *others)
        sent = Exchange(collective="broadcast", phase="F", at="after", of="activations")
        return tuple(
            replace(rule, exchanges=(sent,)) if rule.placement == "block" else rule
            for rule in others
        )


@pytest.mark.dist
@pytest.mark.parametrize(
    ("spec", "multiples", "adapts", "rule"),
    [
        (Megatron(axis="t"), {}, False, "the mesh has no such axis"),
        (Megatron(sequence_parallel=True), {}, False, "torch keeps gathered inputs"),
        (Odd(), {}, False, "is no placement of tensor parallelism"),
        (Odd(gather_twice=False), {}, False, "torch reduces after a block, or gathers before"),
        (Megatron(), {"*.k_proj": 12}, False, "cannot be cut into 2 parts of a multiple of 12"),
        (Megatron(), {}, True, "without adapters"),
    ],
    ids=["axis", "gather_twice", "placement", "exchanges", "heads", "adapters"],
)
def test_what_torch_cannot_split_is_refused(spec, multiples, adapts, rule):
    assert rule in run_ranks(told, 2, spec, multiples, adapts)[0]


def parts_of(rank: int, world_size: int, spec: Spec) -> tuple[bool, list[str]]:
    decoder = Decoder(CONFIG, device="meta")
    names = {module: name for name, module in decoder.named_modules()}
    bound = bind_tensor(decoder, [spec], device_mesh("cpu", Mesh(tp=world_size)))
    return bound.splits_tokens, [f"{names[m]}.{name}" for _, m, name in bound.partial]


@pytest.mark.dist
def test_what_sees_its_own_heads_or_tokens_has_partial_gradients():
    norms = [
        f"model.layers.{layer}.self_attn.{name}.weight"
        for layer in range(CONFIG.num_layers)
        for name in ("q_norm", "k_norm")
    ]
    assert run_ranks(parts_of, 2, Megatron()) == [(False, norms)] * 2
    (splits_tokens, found), _ = run_ranks(parts_of, 2, KEPT)
    whole = [n for n in canonical_tensors(CONFIG) if not n.endswith("_proj.weight")]
    assert splits_tokens and sorted(found) == sorted(whole)
