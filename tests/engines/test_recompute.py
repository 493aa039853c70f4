"""Recomputation changes what is kept, and no bit of the gradients."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import init_device_mesh

from phalanx.engines.bind import bind_data
from phalanx.engines.recompute import MODES, apply_recompute
from phalanx.errors import PlanError
from phalanx.models.decoder import Decoder
from phalanx.models.lora import inject
from phalanx.models.operators import operators
from phalanx.models.spec import DecoderConfig, LoraSpec
from phalanx.ops.dropout import DropoutKey
from phalanx.policies.data.fsdp import Fsdp
from phalanx.policies.data.replicate import Replicate
from tests.live_bytes import LiveBytes
from tests.models.cases import CONFIGS, random_decoder, random_tokens
from tests.models.families import FAMILIES, tiny_config
from tests.ranks import run_ranks

TOKENS = 150
STARTS = (0, 37, 38)
LORA = LoraSpec(rank=2, alpha=6)
DROPPED = LoraSpec(rank=2, alpha=6, dropout=0.3)
UPPER = LoraSpec(rank=2, alpha=2, targets=("model.layers.1.mlp.down_proj",))
every_config = pytest.mark.parametrize("name", list(CONFIGS))
recomputing = pytest.mark.parametrize("mode", ["selective", "full"])


def prepared(config: DecoderConfig, lora: LoraSpec | None, mode: str) -> Decoder:
    decoder = random_decoder(config)
    if lora is not None:
        inject(decoder, lora, dtype="float32")
        generator = torch.Generator().manual_seed(5)
        for name, parameter in decoder.named_parameters():
            if "lora_B" in name:  # fresh adapters are zero and pass no gradient on to A
                with torch.no_grad():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
    apply_recompute(decoder, mode)
    return decoder.train()


def forward(decoder: Decoder, seed: int = 2) -> torch.Tensor:
    tokens = random_tokens(decoder.config, TOKENS, seed)
    drops = any(getattr(module, "dropout", 0.0) for module in decoder.modules())
    key = DropoutKey(3, 7, torch.arange(TOKENS) + 1000 * seed) if drops else None
    return decoder(tokens, document_starts=STARTS, dropout=key)


def backward(hidden: torch.Tensor) -> None:
    weights = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
    (hidden.float() * weights).sum().backward()


def gradients(decoder: Decoder) -> dict[str, torch.Tensor]:
    backward(forward(decoder))
    return {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}


@every_config
@recomputing
@pytest.mark.parametrize("lora", [None, LORA, DROPPED, UPPER])
def test_gradients_are_the_same_bit_by_bit(name, mode, lora):
    expected = gradients(prepared(CONFIGS[name], lora, "none"))
    found = gradients(prepared(CONFIGS[name], lora, mode))
    assert found.keys() == expected.keys() and expected
    for parameter, grad in expected.items():
        assert torch.equal(found[parameter], grad), parameter


@recomputing
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [None, DROPPED])
def test_every_family_has_the_same_gradients_bit_by_bit(family, mode, lora):
    config = tiny_config(family)
    expected = gradients(prepared(config, lora, "none"))
    found = gradients(prepared(config, lora, mode))
    assert found.keys() == expected.keys() and expected
    for parameter, grad in expected.items():
        assert torch.equal(found[parameter], grad), parameter
    if lora is None:
        assert kept_bytes(config, lora, mode) < 0.8 * kept_bytes(config, lora, "none")


@recomputing
def test_gradients_add_up_over_micro_batches(mode):
    both = []
    for each in ("none", mode):
        decoder = prepared(CONFIGS["grouped_queries"], LORA, each)
        first, second = forward(decoder, 2), forward(decoder, 9)
        backward(second)
        backward(first)
        both.append({n: p.grad for n, p in decoder.named_parameters() if p.grad is not None})
    for name, grad in both[0].items():
        assert torch.equal(both[1][name], grad)


def kept_bytes(config: DecoderConfig, lora: LoraSpec | None, mode: str) -> int:
    decoder = prepared(config, lora, mode)
    forward(decoder)  # tables that are cached for ever
    with LiveBytes() as live:
        hidden = forward(decoder)
    return live.now(besides=[hidden, *decoder.parameters()])


@every_config
def test_full_keeps_the_input_of_each_layer(name):
    config = CONFIGS[name]
    outside = [op for op in operators(config, document_tokens=TOKENS) if op.layer is None]
    per_token = 4 * config.hidden_size * config.num_layers
    # the tables of all layer kinds, used or not, as the rows' context is kept
    per_token += sum(op.out_bytes_per_token for op in outside if op.op == "rope")
    per_token += sum(op.saved_bytes_per_token for op in outside if op.op in ("embedding", "norm"))
    assert kept_bytes(config, None, "full") == TOKENS * per_token


@every_config
@pytest.mark.parametrize("lora", [None, LORA])
def test_selective_gives_up_the_results_of_cheap_modules(name, lora):
    config = CONFIGS[name]
    given_up = 0
    for layer in range(config.num_layers):
        kind = config.attention(layer)
        # a frozen norm in front of the first adapter keeps no input, so that is kept instead
        given_up += config.hidden_size * (2 if layer or lora is None else 1)
        given_up += (kind.num_heads + kind.num_kv_heads) * kind.head_dim
        given_up += config.intermediate_size
    none, found = (kept_bytes(config, lora, mode) for mode in ("none", "selective"))
    assert none - found == 4 * TOKENS * given_up


def test_passes_without_gradient_keep_nothing():
    for mode in MODES:
        decoder = prepared(CONFIGS["grouped_queries"], None, mode)
        forward(decoder)
        with torch.no_grad(), LiveBytes() as live:
            hidden = forward(decoder)
        assert live.now(besides=[hidden, *decoder.parameters()]) == 0


def sharded_gradients(rank, world_size, mode, lora, spec):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=(spec.axis,))
    decoder = prepared(CONFIGS["grouped_queries"], lora, mode)
    data = bind_data(decoder, [spec], mesh)
    for item in range(2):
        data.begin_item(item, 2)
        backward(forward(decoder, 2 + item + 5 * rank))
    data.finish_step()
    grads = {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}


@pytest.mark.dist
@pytest.mark.parametrize("lora", [None, DROPPED])
@pytest.mark.parametrize("spec", [Fsdp(), Fsdp(reshard_after_forward=False), Replicate()])
def test_sharded_gradients_are_the_same_bit_by_bit(lora, spec):
    expected = run_ranks(sharded_gradients, 2, "none", lora, spec)[0]
    for mode in ("selective", "full"):
        found = run_ranks(sharded_gradients, 2, mode, lora, spec)[0]
        assert found.keys() == expected.keys() and expected
        for name, grad in expected.items():
            assert torch.equal(found[name], grad), (mode, name)


def mixed_gradients(rank, world_size, mode):
    """Parameters in float32, computed in bfloat16."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    decoder = prepared(CONFIGS["one_kv_head_capped"], LORA, mode)
    data = bind_data(decoder, [Fsdp()], mesh, param_dtype="bfloat16", reduce_dtype="float32")
    data.begin_item(0, 1)
    hidden = forward(decoder)
    assert hidden.dtype is torch.bfloat16
    backward(hidden)
    data.finish_step()
    grads = {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() for n, g in grads.items()}


@pytest.mark.dist
def test_mixed_precision_gradients_are_the_same_bit_by_bit():
    expected, *others = (run_ranks(mixed_gradients, 2, mode)[0] for mode in MODES)
    for found in others:
        assert all(torch.equal(found[name], grad) for name, grad in expected.items())


def test_unknown_mode_is_refused_with_the_nearest():
    decoder = random_decoder(CONFIGS["only_full_layers"])
    with pytest.raises(PlanError, match=r"plan\.recompute = selctive.*selective"):
        apply_recompute(decoder, "selctive")
