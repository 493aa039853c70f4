"""Configs of every family are read strictly, in the forms in which Hugging Face has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from phalanx.errors import JobError
from phalanx.models.architecture import FrequencyBands
from phalanx.models.config import parse_config, read_config, to_huggingface
from phalanx.models.spec import num_params
from tests.models.families import FAMILIES, TABLES, tiny_config

every_family = pytest.mark.parametrize("family", FAMILIES)


@every_family
def test_written_config_reads_back_equal(family):
    config = tiny_config(family)
    assert parse_config(json.loads(json.dumps(to_huggingface(config)))) == config


@pytest.mark.parametrize("family", [f for f in FAMILIES if not f.startswith("gemma4")])
def test_readers_of_the_older_rope_keys_find_the_same(family):
    written = to_huggingface(tiny_config(family))
    del written["rope_parameters"]
    assert parse_config(written) == tiny_config(family)


@every_family
def test_transformers_reads_what_we_write_and_we_read_what_it_writes(family, tmp_path):
    from transformers import AutoConfig

    config = tiny_config(family)
    theirs = AutoConfig.for_model(
        **{key: value for key, value in to_huggingface(config).items() if key != "architectures"}
    )
    theirs.save_pretrained(tmp_path)
    assert read_config(tmp_path) == config


@every_family
def test_transformers_means_the_same_by_the_table_itself(family, tmp_path):
    """The keys as published, older ones included."""
    from transformers import AutoConfig

    AutoConfig.for_model(**TABLES[family]).save_pretrained(tmp_path)
    assert read_config(tmp_path) == tiny_config(family)


@every_family
def test_unknown_keys_are_refused_with_the_nearest(family):
    with pytest.raises(JobError, match="hidden_size") as caught:
        parse_config(TABLES[family] | {"hiden_size": 8})
    assert caught.value.code == "model/unknown"


LLAMA_ROPE = TABLES["llama3"]["rope_scaling"]


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("llama3", {"attention_bias": True}, "attention_bias = True: .* does not compute"),
        ("llama3", {"mlp_bias": True}, "mlp_bias"),
        ("llama3", {"hidden_act": "gelu"}, "silu"),
        ("llama3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "llama3"),
        ("llama3", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type = 'dynamic'"),
        ("llama3", {"rope_scaling": LLAMA_ROPE | {"low_freq": 1.0}}, "low_freq_factor"),
        ("llama3", {"sliding_window": 4096}, "sliding_window"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window"),
        ("gemma4", {"hidden_activation": "silu"}, "gelu_pytorch_tanh"),
        ("gemma4", {"tie_word_embeddings": False}, "does not compute"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "does not compute"),
        ("gemma4", {"layer_types": ["sliding_attention"] * 6}, "last layer must be full"),
        ("gemma4", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
        ("gemma4", {"rope_parameters": {"global": {}}}, "sliding_attention"),
        ("gemma4", {"per_layer_config": {"4": {"head_dim": 16}}}, "every full layer"),
        ("gemma4", {"per_layer_config": {"5": {"num_experts": 16}}}, "every full layer"),
        ("gemma4", {"per_layer_config": {"5": {"head_dim": 0}}}, "every full layer"),
        ("gemma4_ple", {"num_kv_shared_layers": 4}, "no full layer that makes keys"),
    ],
)
def test_what_the_decoder_cannot_honour_is_refused(family, change, says):
    with pytest.raises(JobError, match=says) as caught:
        parse_config(TABLES[family] | change)
    assert caught.value.code == "model/unknown"


@pytest.mark.parametrize(
    ("family", "change", "where"),
    [
        ("llama3", {"num_key_value_heads": 3}, "num_kv_heads"),
        ("llama3", {"head_dim": 7}, "head_dim"),
        ("llama3", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ("llama3", {"rope_scaling": LLAMA_ROPE | {"factor": 0}}, "rope factor"),
        ("llama3", {"rope_scaling": LLAMA_ROPE | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        (
            "llama3",
            {"rope_scaling": LLAMA_ROPE | {"original_max_position_embeddings": 0}},
            "original_max_position_embeddings",
        ),
        ("qwen3", {"use_sliding_window": 1}, "use_sliding_window"),
        ("gemma4", {"global_head_dim": 0}, "global_head_dim"),
        ("gemma4", {"num_kv_shared_layers": -1}, "num_kv_shared_layers"),
        ("gemma4", {"per_layer_config": {"5": 16}}, "per_layer_config"),
        ("gemma4_ple", {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input"),
    ],
)
def test_a_value_of_another_type_or_out_of_range_is_named(family, change, where):
    with pytest.raises(JobError) as caught:
        parse_config(TABLES[family] | change)
    assert caught.value.code == "job/bad-value" and where in caught.value.where


def test_llama_scaling_is_read_from_both_forms():
    older = tiny_config("llama3")
    kind = older.kind("full")
    assert (kind.rope_factor, kind.rope_bands) == (8.0, FrequencyBands(1.0, 4.0, 64))
    table = dict(TABLES["llama3"])
    newer = {"rope_theta": table.pop("rope_theta"), **table.pop("rope_scaling")}
    assert parse_config(table | {"rope_parameters": newer}) == older


def test_head_size_follows_from_the_width_unless_given():
    table = {k: v for k, v in TABLES["llama3"].items() if k not in ("head_dim",)}
    assert parse_config(table).kind("full").head_dim == 8
    assert parse_config(table | {"head_dim": None}).kind("full").head_dim == 8
    assert parse_config(table | {"head_dim": 20}).kind("full").head_dim == 20
    assert parse_config(table | {"num_key_value_heads": None}).kind("full").num_kv_heads == 8


def test_windows_of_qwen3_need_their_switch():
    table = TABLES["qwen3"] | {"sliding_window": 4, "max_window_layers": 1}
    assert parse_config(table).layer_kinds == ("full",) * 3
    windowed = parse_config(table | {"use_sliding_window": True})
    assert windowed.layer_kinds == ("full", "sliding", "sliding")
    assert windowed.kind("sliding").window == 4
    assert parse_config(to_huggingface(windowed)) == windowed


def test_sizes_of_full_layers_are_read_from_both_forms():
    table = {
        key: value
        for key, value in TABLES["gemma4"].items()
        if key not in ("global_head_dim", "num_global_key_value_heads")
    }
    newer = {"per_layer_config": {"5": {"head_dim": 16, "num_key_value_heads": 2}}}
    assert parse_config(table | newer) == tiny_config("gemma4")


def test_full_layers_without_sizes_of_their_own_take_the_global_ones():
    empty = TABLES["gemma4"] | {"per_layer_config": {"5": {}}}
    assert parse_config(empty) == tiny_config("gemma4")


def test_sharing_layers_use_the_last_of_their_kind():
    config = tiny_config("gemma4_ple")
    assert config.kv_sources == (0, 1, 2, 1, 1, 2)
    assert config.ffn_widths == (56, 56, 56, 112, 112, 112)


def multimodal(family: str, **outer: Any) -> dict[str, Any]:
    names = {"gemma3": "gemma3", "gemma4": "gemma4"}
    return {
        "architectures": [f"{family.capitalize()}ForConditionalGeneration"],
        "model_type": names[family],
        "text_config": TABLES[family],
        "vision_config": {"hidden_size": 32},
        "image_token_id": 5,
        "tie_word_embeddings": True,
    } | outer


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_a_multimodal_config_is_read_through_its_text_config(family):
    assert parse_config(multimodal(family)) == tiny_config(family)
    several = parse_config(multimodal(family, eos_token_id=[1, 106], dtype="bfloat16"))
    assert several.eos_tokens == (1, 106) and several.dtype == "bfloat16"


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_transformers_multimodal_configs_are_read(family, tmp_path):
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(family, text_config=TABLES[family])
    theirs.save_pretrained(tmp_path)
    assert read_config(tmp_path) == tiny_config(family)


def test_a_published_text_config_that_leaves_sizes_out_means_those_of_transformers(tmp_path):
    from transformers import AutoConfig

    text = {
        "hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    ours = parse_config({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    theirs = AutoConfig.for_model("gemma3", text_config=text, eos_token_id=[1, 106])
    theirs.save_pretrained(tmp_path)
    assert read_config(tmp_path) == ours
    # Gemma 3 technical report, table 1: 675 M of embedding, 3,209 M of the rest
    assert round(num_params(ours) / 1e6, -1) == pytest.approx(675 + 3209, abs=5)


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"text_config": None}, "job/missing", "text_config"),
        ({"text_config": [1]}, "job/bad-value", "text_config"),
        ({"text_config": {"model_type": "llama"}}, "model/unknown", "gemma4_text"),
        ({"tie_word_embeddings": False}, "model/unknown", "tie_word_embeddings"),
        ({"imge_token_id": 5}, "model/unknown", "image_token_id"),
    ],
)
def test_a_multimodal_config_that_cannot_be_honoured_is_refused(change, code, says):
    with pytest.raises(JobError, match=says) as caught:
        parse_config(multimodal("gemma4") | change)
    assert caught.value.code == code


def test_an_unsupported_family_names_those_that_are():
    with pytest.raises(JobError, match="gemma2") as caught:
        parse_config({"model_type": "gemma2"})
    legal = {"gemma3", "gemma3_text", "gemma4", "gemma4_text", "llama", "qwen3"}
    assert set(caught.value.legal) == legal


OTHERS_FAMILY = """
from dataclasses import replace
from phalanx.models.families import Family
from phalanx.models.families.llama import FAMILY as LLAMA

def read(table, where):
    return replace(LLAMA.read({**table, "model_type": "llama"}, where), family="smol")

FAMILY = Family(model_type="smol", architecture="SmolForCausalLM", read=read, write=LLAMA.write)
"""


def test_a_family_of_another_package_joins_by_its_entry_point(tmp_path):
    (tmp_path / "smol_family.py").write_text(OTHERS_FAMILY)
    info = tmp_path / "smol_family-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: smol-family\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[phalanx.families]\nsmol = smol_family:FAMILY\n")
    table = TABLES["llama3"] | {"model_type": "smol"}
    code = (
        "from phalanx.models.config import parse_config, to_huggingface\n"
        f"config = parse_config({table!r})\n"
        "again = to_huggingface(config)\n"
        "assert again['model_type'] == 'smol' and parse_config(again) == config\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, timeout=60,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
