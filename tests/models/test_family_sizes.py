"""Published sizes of real models, counted without a tensor: parameters, adapters, cached bytes.

Source of the Gemma 4 figures: Kishnani et al., Fine-Tuning and Serving Gemma 4 31B on Google Cloud
TPU, arXiv 2605.25645 (31B), and the shapes of the published checkpoints (the other sizes).
Llama 3: arXiv 2407.21783, table 3; Qwen 3: arXiv 2505.09388, table 1 and the model cards.
"""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.errors import JobError
from phalanx.models.config import parse_config
from phalanx.models.operators import operators
from phalanx.models.spec import (
    LoraSpec,
    canonical_tensors,
    kv_bytes,
    kv_token_bytes,
    lora_tensors,
    lora_warnings,
    num_params,
    unused_names,
)
from tests.models.families import tiny_config


def gemma4(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, window: int, full_every: int = 6,
    **other: Any,
) -> dict[str, Any]:  # fmt: skip
    kinds = ["full_attention" if (at + 1) % full_every == 0 else "sliding_attention"
             for at in range(layers)]  # fmt: skip
    return {
        "model_type": "gemma4_text",
        "vocab_size": 262_144,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": window,
        "layer_types": kinds,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "dtype": "bfloat16",
    } | other


def without_values(kv_heads: int) -> dict[str, Any]:
    return {"attention_k_eq_v": True, "num_global_key_value_heads": kv_heads}


EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
E_MODEL = {"hidden_size_per_layer_input": 256}
GEMMA4 = {
    "31B": (gemma4(60, 5376, 21504, 32, 16, 1024, **without_values(4)), 30.70),
    "12B": (gemma4(48, 3840, 15360, 16, 8, 1024, **without_values(1)), 11.91),
    "26B-A4B": (gemma4(30, 2816, 2112, 16, 8, 1024, **without_values(2), **EXPERTS), 25.23),
    "E4B": (gemma4(42, 2560, 10240, 8, 2, 512, num_kv_shared_layers=18, **E_MODEL), 7.46),
    "E2B": (
        gemma4(35, 1536, 6144, 8, 1, 512, 5, num_kv_shared_layers=20, use_double_wide_mlp=True,
               **E_MODEL),
        4.63,
    ),
}  # fmt: skip
GEMMA4_31B = parse_config(GEMMA4["31B"][0])


def llama(layers: int, hidden: int, ffn: int, heads: int, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "tie_word_embeddings": tied,
    }


def qwen3(layers: int, hidden: int, ffn: int, heads: int, tied: bool = False) -> dict[str, Any]:
    table = llama(layers, hidden, ffn, heads, tied)
    return table | {"model_type": "qwen3", "vocab_size": 151_936, "head_dim": 128}


PUBLISHED = {f"Gemma 4 {name}": row for name, row in GEMMA4.items()} | {
    "Llama 3.1 8B": (llama(32, 4096, 14_336, 32), 8.03),
    "Llama 3.1 70B": (llama(80, 8192, 28_672, 64), 70.55),
    "Llama 3.2 1B": (llama(16, 2048, 8192, 32, tied=True), 1.24),
    "Qwen 3 0.6B": (qwen3(28, 1024, 3072, 16, tied=True), 0.60),
    "Qwen 3 32B": (qwen3(64, 5120, 25_600, 64), 32.76),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name):
    table, billions = PUBLISHED[name]
    config = parse_config(table)
    assert abs(num_params(config) / 1e9 - billions) <= 0.01
    assert sum(op.num_params for op in operators(config, document_tokens=1)) == num_params(config)


def billions_of(config, part: str, min_dims: int = 1) -> float:
    specs = [spec for spec in canonical_tensors(config).values() if len(spec.shape) >= min_dims]
    return sum(spec.num_elements for spec in specs if part in spec.name) / 1e9


def test_parts_of_gemma4_are_those_published():
    layers = [billions_of(GEMMA4_31B, f"layers.{at}.", min_dims=2) * 1e3 for at in (0, 5)]
    assert [round(millions, 1) for millions in layers] == [478.9, 534.0]
    assert billions_of(GEMMA4_31B, ".layers.") == pytest.approx(29.29, abs=0.005)
    assert billions_of(GEMMA4_31B, "embed_tokens") == pytest.approx(1.409, abs=0.0005)
    for name, per_layer, effective in (("E4B", 2.90, 4.5), ("E2B", 2.39, 2.3)):
        config = parse_config(GEMMA4[name][0])
        table = billions_of(config, "per_layer")
        assert table == pytest.approx(per_layer, abs=0.01)
        assert num_params(config) / 1e9 - table == pytest.approx(effective, abs=0.1)
    experts = parse_config(GEMMA4["26B-A4B"][0])
    idle = billions_of(experts, ".experts.") * (1 - 8 / 128)
    assert num_params(experts) / 1e9 - idle == pytest.approx(3.8, abs=0.05)


def test_adapters_of_gemma4_are_those_published():
    """The fused form of keys and values shares one A between them, and where full layers name
    their projection otherwise, a pattern leaves them without an adapter of the keys."""
    rank, wide, sliding, full = 64, 5376, 50, 10
    adapters = lora_tensors(GEMMA4_31B, LoraSpec(rank=rank, alpha=64))
    count = sum(spec.num_elements for spec in adapters.values())
    assert count / 1e6 == pytest.approx(489.7, abs=0.05)
    shared = sum(
        spec.num_elements
        for name, spec in adapters.items()
        if name.endswith("v_proj.lora_A.weight")
    )
    assert shared == sliding * rank * wide
    assert (count - shared) / 1e6 == pytest.approx(472.5, abs=0.05)
    missed = sum(
        spec.num_elements
        for name, spec in adapters.items()
        if "k_proj" in name and GEMMA4_31B.layer_kinds[int(name.split(".")[2])] == "full"
    )
    assert missed == full * rank * (wide + 4 * 512)
    assert (count - shared - missed) / 1e6 == pytest.approx(467.8, abs=0.05)


def test_cached_bytes_of_gemma4_are_those_published():
    assert kv_token_bytes(GEMMA4_31B, "sliding") == 819_200
    assert kv_token_bytes(GEMMA4_31B, "full") == 81_920
    assert kv_token_bytes(GEMMA4_31B) == 901_120
    assert kv_token_bytes(GEMMA4_31B, dtype="float32") == 2 * 901_120
    for context in (1, 1000, 1024, 4608, 16_384):
        assert kv_bytes(GEMMA4_31B, context) == 819_200 * min(context, 1024) + 81_920 * context
    ratios = [901_120 * context / kv_bytes(GEMMA4_31B, context) for context in (4608, 16_384)]
    assert [round(ratio, 3) for ratio in ratios] == [3.414, 6.769]


def test_sharing_layers_cache_nothing():
    e4b = parse_config(GEMMA4["E4B"][0])
    assert len(e4b.kv_layers()) == 24
    assert kv_token_bytes(e4b) == 2 * 2 * (20 * 2 * 256 + 4 * 2 * 512)


def test_a_target_without_a_matrix_in_some_kind_of_layers_is_told():
    default = LoraSpec(rank=4, alpha=8)
    (told,) = lora_warnings(GEMMA4_31B, default)
    assert "'v_proj': adapts nothing in the 10 full layers" in told and "k_proj" in told
    told = lora_warnings(parse_config(GEMMA4["E4B"][0]), default)
    assert [("'k_proj'" in line or "'v_proj'" in line) for line in told] == [True] * 4
    assert all("keys and values of other layers" in line for line in told)
    pattern = LoraSpec(rank=4, alpha=8, targets=("model.layers.*.v_proj", "q_proj"))
    assert len(lora_warnings(GEMMA4_31B, pattern)) == 1
    named = LoraSpec(rank=4, alpha=8, targets=("model.layers.0.self_attn.v_proj",))
    assert lora_warnings(GEMMA4_31B, named) == []


@pytest.mark.parametrize("family", ["llama3", "qwen3", "gemma3"])
def test_families_with_layers_of_one_make_are_not_warned_of(family):
    assert lora_warnings(tiny_config(family), LoraSpec(rank=2, alpha=2)) == []


def test_a_target_without_any_matrix_stays_an_error():
    nothing = LoraSpec(rank=2, alpha=2, targets=("q_proj", "lm_head"))
    with pytest.raises(JobError, match="matches no matrix"):
        lora_tensors(tiny_config("llama3"), nothing)


def test_what_sharing_layers_store_for_nothing_is_named():
    config = tiny_config("gemma4_ple")
    names = unused_names(config)
    assert {int(name.split(".")[2]) for name in names} == {3, 4, 5}
    assert "model.layers.4.self_attn.k_proj.weight" in names
    assert names.isdisjoint(canonical_tensors(config))
    assert unused_names(tiny_config("gemma4")) == frozenset()
