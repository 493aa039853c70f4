"""A model's config.json: any file is the sizes of a decoder or one clear line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.errors import PhalanxError
from phalanx.models.config import DecoderConfig, read_config
from tests.fuzz.inputs import json_values, near_tables, near_texts, outcome
from tests.models.families import FAMILIES, TABLES

VALID = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 21,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
    "attention_bias": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


def read(folder, content: str | bytes) -> Any:
    path = folder / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return outcome(read_config, folder)


def test_the_valid_one_is_read(folder):
    assert read(folder, json.dumps(VALID)).num_layers == 4


@settings(max_examples=60, deadline=None)
@given(content=st.text() | st.binary() | json_values.map(json.dumps))
@example(content=b"\xff")
@example(content="[]")
@example(content="[" * 100_000)
def test_any_file_is_refused(folder, content: str | bytes):
    assert isinstance(read(folder, content), PhalanxError)


@settings(max_examples=100, deadline=None)
@given(content=near_texts(json.dumps(VALID)))
def test_slips_of_the_pen_are_refused_or_harmless(folder, content: str):
    assert isinstance(read(folder, content), DecoderConfig | PhalanxError)


@settings(max_examples=250, deadline=None)
@given(table=near_tables(VALID, json_values))
@example(table=VALID | {"rope_theta": None})
@example(table=VALID | {"query_pre_attn_scalar": None})
@example(table=VALID | {"sliding_window": "21"})
@example(table=VALID | {"layer_types": 4})
@example(table=VALID | {"layer_types": [[]] * 4})
@example(table=VALID | {"model_type": []})
@example(table=VALID | {"torch_dtype": {}})
def test_wrong_entries_are_refused_or_harmless(folder, table: dict[str, Any]):
    assert isinstance(read(folder, json.dumps(table)), DecoderConfig | PhalanxError)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_wrong_entries_of_any_family_are_refused_or_harmless(folder, family: str, data):
    table = data.draw(near_tables(TABLES[family], json_values))
    assert isinstance(read(folder, json.dumps(table)), DecoderConfig | PhalanxError)
