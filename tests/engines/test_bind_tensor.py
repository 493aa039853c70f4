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

from phalanx.engines.bind import BoundData, bind_data
from phalanx.engines.bind_tensor import BoundTensor
from phalanx.engines.tensor_decoder import bind_decoder
from phalanx.engines.trainer_model import TrainModel, bind_model
from phalanx.errors import PlanError
from phalanx.mesh import Mesh
from phalanx.models.decoder import Decoder
from phalanx.models.parameters import initial_value, load_parameters
from phalanx.models.spec import canonical_tensors, small_config
from phalanx.policies.data.fsdp import Fsdp
from phalanx.policies.tensor.megatron import Megatron
from phalanx.policy import Exchange, Rule, Spec
from phalanx.worlds.comm_log import CommLog
from phalanx.worlds.logged_group import device_mesh, init_logged
from tests.engines.tensor_cases import FSDP, MEGATRON, REPLICATE, Case, job_and_role
from tests.ranks import current_store, run_ranks

CONFIG = small_config(
    vocab_size=31, hidden_size=18, intermediate_size=22, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=6, window=3, full_every=2, dtype="float64",
)  # fmt: skip
TOKENS_S = torch.arange(22) * 7 % 31
COUNTED_N = torch.tensor([0, 1, 4, 5, 9, 10, 12])  # of the 11 rows of each replica
KEPT = Megatron(sequence_parallel=True, gather_twice=False)


def values() -> list[tuple[str, Tensor]]:
    """Fresh tensors; norms are not the identity."""
    return [
        (spec.name, initial_value(3, spec.name, spec.shape, torch.float64, std=0.2))
        for spec in canonical_tensors(CONFIG).values()
    ]


def loss_of(model: TrainModel, rows_S: Tensor) -> Tensor:
    hidden_SD = model.decoder(rows_S[:11], document_starts=(0, 4))
    counted_N = COUNTED_N[COUNTED_N < 10]
    return model.loss(hidden_SD, counted_N, rows_S[1:][counted_N], 12)


def reference(num_replicas: int) -> dict[str, Tensor]:
    decoder = Decoder(CONFIG)
    load_parameters(decoder, values())
    whole = TrainModel(decoder, BoundData((), (), ()), BoundTensor("", None, False), None)
    for rows_S in TOKENS_S.chunk(2)[:num_replicas]:
        loss_of(whole, rows_S).backward()
    return {name: p.grad for name, p in decoder.named_parameters()}


def train_decoder(rank: int, world_size: int, axes: dict[str, int], data: list[Spec]):
    """Gradients of one step and what it exchanged, from weights filled after binding."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    shape = Mesh(axes)
    mesh = device_mesh("cpu", shape)
    decoder = Decoder(CONFIG, device="meta")
    tensor = bind_decoder(decoder, [Megatron()], mesh)
    model = TrainModel(decoder, bind_data(decoder, data, mesh), tensor, None)
    decoder.to_empty(device="cpu")
    load_parameters(decoder, values())
    log = CommLog(rank)
    with log.step(0):
        model.data.begin_item(0, 1)
        loss_of(model, TOKENS_S.chunk(2)[shape.coordinate(rank, "shard")]).backward()
        model.finish_step()
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
        num_counted = int((COUNTED_N < 10).sum())
        widths = {
            11 * CONFIG.hidden_size: 4 * CONFIG.num_layers + 1,  # blocks, and the embedding
            num_counted * CONFIG.hidden_size: 1,  # gradient of the rows that the head reads
            num_counted: 1,  # highest logits
            num_counted * 2: 1,  # sums of exponentials and targets' logits
        }
        expected_seen = {("tp", "all_reduce", 8 * n): count for n, count in widths.items()}
        assert seen == expected_seen | {("tp", "all_reduce", norms): 1}


def told(rank: int, world_size: int, specs: list[Spec], mesh: dict[str, int], bias: bool) -> str:
    decoder = Decoder(CONFIG, device="meta")
    if bias:
        decoder.model.layers["0"].mlp.up_proj = nn.Linear(18, 22, device="meta")
    with pytest.raises(PlanError) as caught:
        bind_decoder(decoder, specs, device_mesh("cpu", Mesh(mesh)))
    return str(caught.value)


class Odd(Megatron):
    """Rules that torch has no form for."""

    def rules(self) -> tuple[Rule, ...]:
        column, *others = super().rules()
        if self.gather_twice:
            return (replace(column, placement="ring"), *others)
        sent = Exchange(collective="broadcast", phase="F", at="after", of="activations")
        return tuple(
            replace(rule, exchanges=(sent,)) if rule.placement == "block" else rule
            for rule in others
        )


TP, BOTH = {"tp": 2}, {"a": 2, "b": 2}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("specs", "mesh", "bias", "rule"),
    [
        ([Megatron(axis="t")], TP, False, "the mesh has no such axis"),
        ([Megatron(axis="a"), Megatron(axis="b")], BOTH, False, "are split over one axis"),
        ([Odd()], TP, False, "is no placement of tensor parallelism"),
        ([Odd(gather_twice=False)], TP, False, "is reduced after, or gathers before"),
        ([Megatron()], TP, True, "only an nn.Linear without bias is cut"),
        ([replace(KEPT, vocabulary_parallel=False)], TP, False, "but not the vocabulary"),
        ([Megatron()], {"tp": 3}, False, "4 cannot be cut into 3 equal parts"),
    ],
    ids=["axis", "two", "placement", "exchanges", "bias", "vocabulary", "degree"],
)
def test_what_cannot_be_split_is_refused(specs, mesh, bias, rule):
    assert rule in run_ranks(told, Mesh(mesh).size, specs, mesh, bias)[0]


def parts_of(rank: int, world_size: int, spec: Spec) -> tuple[bool, list[str]]:
    decoder = Decoder(CONFIG, device="meta")
    names = {module: name for name, module in decoder.named_modules()}
    bound = bind_decoder(decoder, [spec], device_mesh("cpu", Mesh(tp=world_size)))
    return bound.splits_tokens, [f"{names[m]}.{name}" for m, name in bound.partial]


@pytest.mark.dist
def test_what_sees_its_own_heads_or_tokens_has_partial_gradients():
    norms = [
        f"model.layers.{layer}.self_attn.{name}.weight"
        for layer in range(CONFIG.num_layers)
        for name in ("q_norm", "k_norm")
    ]
    assert run_ranks(parts_of, 2, Megatron()) == [(False, norms)] * 2
    (splits_tokens, found), _ = run_ranks(parts_of, 2, KEPT)
    ends = ("_proj.weight", "embed_tokens.weight")
    whole = [n for n in canonical_tensors(CONFIG) if not n.endswith(ends)]
    assert splits_tokens and sorted(found) == sorted(whole)


CAST = Case(config=CONFIG, mesh={"tp": 2}, specs=(MEGATRON,), dtypes={"compute": "bfloat16"})
ORDER = Case(
    config=CONFIG,
    mesh={"shard": 1, "replicate": 2, "tp": 2},
    specs=(FSDP, REPLICATE, MEGATRON),
)


def refused(rank: int, world_size: int, case: Case) -> str:
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    job, role = job_and_role(case)
    with pytest.raises(PlanError) as caught:
        bind_model(job, role, CONFIG, device_mesh("cpu", Mesh(dict(case.mesh))))
    return str(caught.value)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("case", "rule"),
    [
        (CAST, "casts nothing, so weights kept in float64 cannot be computed in bfloat16"),
        (ORDER, "replicate must come before shard"),
    ],
    ids=["dtype", "order of axes"],
)
def test_what_no_binder_can_do_is_refused(case, rule):
    size = Mesh(dict(case.mesh)).size
    assert rule in run_ranks(refused, size, case, backend=None)[0]
