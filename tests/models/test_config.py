"""Hugging Face configs are read strictly, in their older and newer form."""

from __future__ import annotations

import json

import pytest

from phalanx.errors import JobError
from phalanx.models.config import parse_config, read_config, small_config, to_huggingface
from tests.models.cases import CONFIGS

# The keys of a gemma-3 text config as transformers 4 wrote them.
OLDER = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 7,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}


def test_older_config_is_read_as_it_means():
    config = parse_config(OLDER)
    assert config.layer_kinds == ("sliding",) * 5 + ("full", "sliding")
    assert (config.kind("sliding").window, config.kind("full").window) == (512, None)
    assert (config.kind("sliding").rope_theta, config.kind("full").rope_theta) == (1e4, 1e6)
    assert config.eos_tokens == (1, 106) and config.dtype == "bfloat16"
    assert config.query_scale == 1 / 16


def test_linear_scaling_touches_full_layers_only():
    scaled = parse_config(OLDER | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert (scaled.kind("full").rope_factor, scaled.kind("sliding").rope_factor) == (8.0, 1.0)
    assert scaled.kind("full").rope_theta == 1e6


@pytest.mark.parametrize("name", CONFIGS)
def test_written_config_reads_back_equal(name):
    assert parse_config(json.loads(json.dumps(to_huggingface(CONFIGS[name])))) == CONFIGS[name]


def test_transformers_reads_what_we_write_and_we_read_what_it_writes(tmp_path):
    from transformers import Gemma3TextConfig

    config = parse_config(OLDER | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    table = to_huggingface(config)
    theirs = Gemma3TextConfig(**{k: v for k, v in table.items() if k != "architectures"})
    theirs.save_pretrained(tmp_path)
    again = read_config(tmp_path)
    assert again == config


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gemma2"}, "gemma3_text"),
        ({"slidng_window": 4}, "sliding_window"),
        ({"attn_logit_softcapping": 50.0}, "does not compute"),
        ({"hidden_activation": "silu"}, "gelu_pytorch_tanh"),
        ({"tie_word_embeddings": False}, "does not compute"),
        ({"use_bidirectional_attention": True}, "does not compute"),
        ({"quantization_config": {"quant_method": "gguf"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "linear"),
        ({"layer_types": ["full_attention"] * 6}, "7"),
        ({"layer_types": ["chunked_attention"] * 7}, "sliding_attention"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ],
)
def test_what_the_decoder_cannot_honour_is_refused(change, says):
    with pytest.raises(JobError, match=says) as caught:
        parse_config(OLDER | change)
    assert caught.value.code == "model/unknown"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", True),
        ("num_hidden_layers", 10**9),
        ("vocab_size", "262144"),
        ("sliding_window", None),
        ("sliding_window_pattern", 0),
        ("layer_types", "full_attention"),
        ("rope_theta", None),
        ("rope_theta", float("nan")),
        ("rope_local_base_freq", -1.0),
        ("rope_parameters", []),
        ("rope_scaling", {"rope_type": "linear", "factor": "8"}),
        ("query_pre_attn_scalar", None),
        ("rms_norm_eps", 10**400),
        ("final_logit_softcapping", 0),
        ("eos_token_id", "</s>"),
        ("torch_dtype", ["bfloat16"]),
    ],
)
def test_a_value_of_another_type_or_out_of_range_is_named(key, value):
    with pytest.raises(JobError) as caught:
        parse_config(OLDER | {key: value})
    assert caught.value.code == "job/bad-value"
    name = "rope factor" if key == "rope_scaling" else key
    assert caught.value.where == f"config.json: {name}"


def test_only_layers_with_a_window_need_one():
    config = parse_config(OLDER | {"sliding_window": None, "layer_types": ["full_attention"] * 7})
    assert config.kind("sliding").window is None


def test_a_huge_number_of_heads_is_refused_at_once():
    with pytest.raises(JobError, match="must divide") as caught:
        parse_config(OLDER | {"num_attention_heads": 2**31 - 1, "num_key_value_heads": 7})
    assert caught.value.legal == (1, 2**31 - 1)


@pytest.mark.parametrize("key", ["hidden_size", "head_dim", "num_hidden_layers"])
def test_missing_size_is_named(key):
    with pytest.raises(JobError, match=key) as caught:
        parse_config({k: v for k, v in OLDER.items() if k != key})
    assert caught.value.code == "job/missing"


def test_folder_without_config_names_folders_with_one(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(OLDER))
    with pytest.raises(JobError, match=r"model") as caught:
        read_config(tmp_path)
    assert caught.value.code == "job/not-found"
    assert caught.value.legal == (str(tmp_path / "model"),)


def test_broken_json_is_a_syntax_error(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(JobError) as caught:
        read_config(tmp_path)
    assert caught.value.code == "job/syntax"


@pytest.mark.parametrize(
    "wrong",
    [{"num_kv_heads": 3}, {"head_dim": 7}, {"num_layers": 0}, {"window": 0}, {"dtype": "float8"}],
)
def test_impossible_sizes_are_refused(wrong):
    sizes = {
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
    }
    with pytest.raises(JobError, match=next(iter(wrong))) as caught:
        small_config(**(sizes | wrong))
    assert caught.value.code == "job/bad-value" and caught.value.legal
