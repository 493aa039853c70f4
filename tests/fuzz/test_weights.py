"""Weight files: any header, any index is a listing of tensors or one clear line."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from phalanx.errors import PhalanxError
from phalanx.models.adapter_folder import read_adapter
from phalanx.models.stored import INDEX, read_header, stored_tensors
from tests.fuzz.inputs import json_values, near_bytes, near_tables, near_texts, outcome

TENSORS = {"a.weight": torch.ones(3, 4), "b": torch.zeros(5).bfloat16(), "c.d": torch.ones(())}
VALID = save(TENSORS, {"format": "pt"})
LENGTH = int.from_bytes(VALID[:8], "little")
HEADER, DATA = json.loads(VALID[8 : 8 + LENGTH]), VALID[8 + LENGTH :]
INDEX_TABLE = {
    "metadata": {"total_size": 62},
    "weight_map": dict.fromkeys(TENSORS, "model-1.safetensors"),
}
ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"], "bias": "none"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


def read(folder, content: bytes) -> Any:
    path = folder / "x.safetensors"
    path.write_bytes(content)
    return outcome(read_header, path)


def with_header(header: str) -> bytes:
    raw = header.encode(errors="surrogatepass")
    return len(raw).to_bytes(8, "little") + raw + DATA


def test_the_valid_one_is_read(folder):
    found = read(folder, VALID)
    assert {name: each.shape for name, each in found.items()} == {
        name: tuple(tensor.shape) for name, tensor in TENSORS.items()
    }


def sound(folder, answer: Any) -> bool:
    """A refusal, or tensors that lie within the file."""
    if isinstance(answer, PhalanxError):
        return True
    size = (folder / "x.safetensors").stat().st_size
    return all(0 <= each.start <= each.start + each.num_bytes <= size for each in answer.values())


@settings(max_examples=150, deadline=None)
@given(content=st.binary() | near_bytes(VALID))
@example(content=b"")
@example(content=b"\xff" * 8)
@example(content=(2**63).to_bytes(8, "little"))
def test_any_bytes_are_refused_or_read_within_the_file(folder, content: bytes):
    assert sound(folder, read(folder, content))


@settings(max_examples=150, deadline=None)
@given(header=st.text() | near_texts(json.dumps(HEADER)) | json_values.map(json.dumps))
@example(header="[" * 100_000)
@example(header='{"a":{"dtype":"F32","shape":[1' + "0" * 5000 + '],"data_offsets":[0,4]}}')
def test_any_header_is_refused_or_read_within_the_file(folder, header: str):
    assert sound(folder, read(folder, with_header(header)))


@settings(max_examples=250, deadline=None)
@given(table=near_tables(HEADER, json_values))
@example(table=HEADER | {"a.weight": {"dtype": "F32", "shape": [-3, -4], "data_offsets": [0, 48]}})
@example(table=HEADER | {"__metadata__": 3})
def test_wrong_entries_are_refused_or_within_the_file(folder, table: dict[str, Any]):
    assert sound(folder, read(folder, with_header(json.dumps(table))))


@settings(max_examples=200, deadline=None)
@given(
    content=st.binary()
    | near_texts(json.dumps(INDEX_TABLE)).map(lambda text: text.encode(errors="surrogatepass"))
    | near_tables(INDEX_TABLE, json_values).map(lambda table: json.dumps(table).encode())
)
@example(content=b"[" * 100_000)
@example(content=json.dumps({"weight_map": {"a.weight": "x" * 400 + ".safetensors"}}).encode())
@example(content=json.dumps({"weight_map": {"a.weight": "\0.safetensors"}}).encode())
def test_any_index_is_refused_or_a_listing(tmp_path_factory, content: bytes):
    folder = tmp_path_factory.mktemp("indexed")
    (folder / "model-1.safetensors").write_bytes(VALID)
    (folder / INDEX).write_bytes(content)
    answer = outcome(stored_tensors, folder)
    assert isinstance(answer, PhalanxError) or set(answer) <= set(TENSORS)


@settings(max_examples=200, deadline=None)
@given(table=near_tables(ADAPTER, json_values))
@example(table=ADAPTER | {"r": 10**400})
@example(table=ADAPTER | {"lora_alpha": None})
def test_any_adapter_config_is_refused_or_read(tmp_path_factory, table: dict[str, Any]):
    folder = tmp_path_factory.mktemp("adapter")
    pair = {"q.lora_A.weight": torch.ones(2, 3), "q.lora_B.weight": torch.ones(4, 2)}
    (folder / "adapter_model.safetensors").write_bytes(save(pair))
    (folder / "adapter_config.json").write_text(json.dumps(table))
    answer = outcome(read_adapter, folder)
    assert isinstance(answer, PhalanxError) or answer.lora.rank == 2
