"""Operator lists equal what the decoder does: parameters, FLOPs, bytes that autograd keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from phalanx.models.decoder import Decoder
from phalanx.models.lora import inject
from phalanx.models.operators import operators, visible_keys
from phalanx.models.spec import (
    DecoderConfig,
    LoraSpec,
    canonical_tensors,
    lora_tensors,
    num_params,
    weight_bytes,
)
from phalanx.ops.loss import counted_cross_entropy
from tests.models.cases import CONFIGS, random_decoder, random_tokens
from tests.models.families import FAMILIES, tiny_config

TOKENS = 21
SOME = LoraSpec(rank=3, alpha=6, targets=("q_proj", "k_proj", "v_proj", "up_proj"))
EVERY = LoraSpec(rank=2, alpha=6)
UPPER = LoraSpec(
    rank=2, alpha=2, targets=tuple(f"model.layers.2.self_attn.{x}_proj" for x in "qkvo")
)
SHARING = LoraSpec(rank=2, alpha=2, targets=("model.layers.4.self_attn.[qo]_proj",))
PER_LAYER = LoraSpec(rank=2, alpha=2, targets=("*.[qkv]_proj", "*.per_layer_*"))
ALL = {name: CONFIGS[name] for name in ("grouped_queries", "one_kv_head_capped")} | {
    name: tiny_config(name) for name in FAMILIES
}
every_config = pytest.mark.parametrize("name", ALL)
SETTINGS = [
    (name, lora)
    for name in ALL
    for lora in (None, EVERY, SOME, *((UPPER,) if ALL[name].num_layers > 2 else ()))
]
SETTINGS += [("gemma4_ple", SHARING), ("gemma4_ple", PER_LAYER)]
every_setting = pytest.mark.parametrize(("name", "lora"), SETTINGS)


def prepared(config: DecoderConfig, lora: LoraSpec | None) -> Decoder:
    decoder = random_decoder(config)
    if lora is not None:
        inject(decoder, lora, dtype=config.dtype)
    return decoder.train()


def kept_bytes(run, decoder: Decoder) -> int:
    """Bytes of the storages that autograd keeps during `run`, parameters left out."""
    storages = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    del result
    return sum(storage.nbytes() for storage in kept.values())


@every_setting
def test_saved_bytes_are_those_that_autograd_keeps(name, lora):
    config = ALL[name]
    decoder = prepared(config, lora)
    tokens = random_tokens(config, TOKENS)
    measured = kept_bytes(lambda: decoder(tokens), decoder)
    listed = operators(config, document_tokens=TOKENS, lora=lora)
    per_token = sum(op.saved_bytes_per_token for op in listed if op.op != "head")
    assert measured == TOKENS * per_token


@every_config
def test_saved_bytes_in_bfloat16(name):
    """Halved, but for the float32 numbers per row and the rotation tables."""
    config = replace(ALL[name], dtype="bfloat16")
    decoder = prepared(config, None)
    tokens = random_tokens(config, TOKENS)
    measured = kept_bytes(lambda: decoder(tokens), decoder)
    listed = operators(config, document_tokens=TOKENS)
    assert measured == TOKENS * sum(op.saved_bytes_per_token for op in listed if op.op != "head")


def test_head_keeps_a_row_per_counted_position():
    config = CONFIGS["grouped_queries"]
    decoder = prepared(config, EVERY)
    hidden = torch.randn(TOKENS, config.hidden_size, requires_grad=True)
    counted = torch.arange(2, 9)
    targets = random_tokens(config, 7)
    measured = kept_bytes(
        lambda: counted_cross_entropy(
            hidden, decoder.head_weight, counted, targets, num_counted_global=7
        ),
        decoder,
    )
    head = operators(config, document_tokens=TOKENS, lora=EVERY)[-1]
    assert head.op == "head"
    # and the scalar sum's divisor
    assert measured == pytest.approx(7 * head.saved_bytes_per_token, abs=8)


@every_setting
def test_flops_of_products_equal_counted_ones(name, lora):
    """All but attention, whose blocks compute some scores that are masked, exactly."""
    config = ALL[name]
    decoder = prepared(config, lora)
    tokens = random_tokens(config, TOKENS)
    listed = operators(config, document_tokens=TOKENS, lora=lora)
    forward, backward = flop_counter(), flop_counter()
    with forward:
        hidden = decoder(tokens)
    with backward:
        hidden.sum().backward()
    linears = [op for op in listed if op.op == "linear"]
    counted = [_flops_without_attention(mode) for mode in (forward, backward)]
    assert counted[0] == TOKENS * sum(op.flops_per_token for op in linears)
    assert counted[1] == TOKENS * sum(op.backward_flops_per_token for op in linears)


def flop_counter() -> FlopCounterMode:
    """torch counts no in-place addmm."""

    def in_place_addmm(sum_shape, a_shape, b_shape, **kwargs) -> int:
        return 2 * a_shape[0] * a_shape[1] * b_shape[1]

    mapping = {torch.ops.aten.addmm_: in_place_addmm}
    return FlopCounterMode(display=False, custom_mapping=mapping)


def _flops_without_attention(mode: FlopCounterMode) -> int:
    counts = mode.get_flop_counts()["Global"]
    return sum(count for op, count in counts.items() if "bmm" not in str(op))


def test_attention_flops_lie_below_computed_ones_by_less_than_a_block():
    """Listed: what causality needs. Computed: whole blocks of 128 queries."""
    config = replace(CONFIGS["one_kv_head_capped"], vocab_size=16)
    decoder = prepared(config, None)
    length = 512
    mode = FlopCounterMode(display=False)
    with mode, torch.no_grad():
        decoder(random_tokens(config, length))
    computed = sum(n for op, n in mode.get_flop_counts()["Global"].items() if "bmm" in str(op))
    attention = [op for op in operators(config, document_tokens=length) if op.op == "attention"]
    needed = length * sum(op.flops_per_token for op in attention)
    channels = 3 * 24
    assert needed < computed <= needed + len(attention) * length * 4 * channels * 128


def test_head_flops_equal_counted_ones():
    config = CONFIGS["grouped_queries"]
    decoder = prepared(config, None)
    hidden = torch.randn(TOKENS, config.hidden_size, requires_grad=True)
    mode = FlopCounterMode(display=False)
    with mode:
        counted_cross_entropy(
            hidden, decoder.head_weight, torch.arange(5), random_tokens(config, 5),
            num_counted_global=5,
        ).backward()  # fmt: skip
    head = operators(config, document_tokens=TOKENS)[-1]
    assert mode.get_total_flops() == 5 * head.flops_per_token


@every_config
def test_parameters_and_weights_add_up(name):
    config = ALL[name]
    specs = canonical_tensors(config)
    listed = operators(config, document_tokens=4)
    assert sum(op.num_params for op in listed) == num_params(config)
    trained = sum(spec.num_elements for spec in specs.values() if spec.is_trained)
    assert sum(op.num_trained for op in listed) == trained
    tied = specs["model.embed_tokens.weight"].num_bytes if config.tied_head else 0
    assert sum(op.weight_bytes for op in listed) == weight_bytes(config) + tied
    assert {tensor for op in listed for tensor in op.tensors} == set(specs)
    adapted = operators(config, document_tokens=4, lora=SOME)
    assert sum(op.num_trained for op in adapted) == sum(
        spec.num_elements for spec in lora_tensors(config, SOME).values()
    )


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
def test_visible_keys_equal_the_count(window):
    count = sum(min(i, window or i) for i in range(1, 8)) / 7
    assert visible_keys(7, window) == pytest.approx(count)
