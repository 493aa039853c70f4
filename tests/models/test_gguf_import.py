"""A small GGUF file written here is read back as canonical tensors, config and tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.errors import JobError
from phalanx.models.parameters import initial_values
from phalanx.models.spec import canonical_tensors, small_config

gguf = pytest.importorskip("gguf")

from phalanx.models.gguf_forms import FORMS  # noqa: E402
from phalanx.models.gguf_import import GgufModel  # noqa: E402
from phalanx.models.gguf_vocabulary import recovered_merges  # noqa: E402

gguf_name = FORMS["gemma3"].stored_name

# control tokens, a space run in real spaces, then pieces of which later ones merge earlier ones
TOKENS = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "  ",
    "<b>",
    "\u2581",
    "a",
    "b",
    "ab",
    "\u2581ab",
    "<0x21>",
]
KINDS = [3, 3, 3, 3, 4, 4, 1, 1, 1, 1, 1, 6]
CONFIG = small_config(
    vocab_size=len(TOKENS),
    hidden_size=64,
    intermediate_size=96,
    num_layers=7,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    window=9,
    max_positions=128,
)


def values() -> dict[str, torch.Tensor]:
    drawn = dict(initial_values(3, canonical_tensors(CONFIG.with_dtype("float32")).values()))
    for name, value in drawn.items():
        if "norm" in name:
            value += torch.linspace(-0.5, 0.75, value.numel())
    return {name: value.bfloat16().float() for name, value in drawn.items()}


def write(path: Path, *, architecture: str = "gemma3", skip: str = "", **more: float) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {
        "context_length": 128,
        "embedding_length": 64,
        "block_count": 7,
        "feed_forward_length": 96,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.sliding_window": 9,
    }
    for key, value in sizes.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    for key, value in more.items():
        writer.add_float32(f"{architecture}.{key.replace('__', '.')}", value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_types(KINDS)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    for name, value in values().items():
        if name != skip:
            stored = value + 1 if "norm" in name else value  # as llama.cpp converts
            quantised = gguf.GGMLQuantizationType.Q8_0
            if value.dim() == 2:
                rows = gguf.quantize(stored.numpy(), quantised)
                writer.add_tensor(gguf_name(name), rows, raw_dtype=quantised)
            else:
                writer.add_tensor(gguf_name(name), stored.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_config_is_the_one_written(tmp_path):
    assert GgufModel(write(tmp_path / "m.gguf", rope__freq_base=1e6)).config == CONFIG


def test_norms_are_exact_and_matrices_within_a_quantisation_step(tmp_path):
    expected = values()
    read = dict(GgufModel(write(tmp_path / "m.gguf")).tensors())
    assert list(read) == list(canonical_tensors(CONFIG))
    for name, value in read.items():
        assert value.dtype == torch.bfloat16
        if value.dim() == 1:
            assert torch.equal(value.float(), expected[name])
        else:  # Q8_0: 127 steps to the largest of 32 values; then 8 bits of bfloat16
            peak = expected[name].abs().max()
            assert (value.float() - expected[name]).abs().max() <= peak / 254 + peak * 2**-8


def test_tokenizer_merges_pieces_and_keeps_special_tokens_whole(tmp_path):
    tokenizer = GgufModel(write(tmp_path / "m.gguf")).vocabulary.tokenizer("")
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).tokens  # noqa: E731
    assert tokenizer.encode("ab").tokens == ["<bos>", "ab"]
    assert encode("a ab  b<b>!<eos>") == [
        "a", "\u2581ab", "\u2581\u2581", "b", "<b>", "<0x21>", "<eos>",
    ]  # fmt: skip
    assert tokenizer.decode(tokenizer.encode("a ab  b!").ids) == "a ab  b!"


def test_merges_come_in_the_order_of_what_they_make():
    merges = recovered_merges({"a": 0, "b": 1, "abb": 3, "ab": 2, "bb": 4, "xy": 5})
    assert merges == [("a", "b"), ("ab", "b"), ("a", "bb"), ("b", "b")]


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ({"architecture": "gemma2"}, "model/unknown", "gemma3"),
        ({"rope__scaling__factor": 8.0}, "model/unknown", r"rope\.scaling\.factor"),
        ({"attention__scale": 0.5}, "model/unknown", r"attention\.scale"),
        ({"skip": "model.norm.weight"}, "model/tensor", r"output_norm\.weight"),
    ],
)
def test_files_that_would_be_misread_are_refused(tmp_path, options, code, says):
    path = write(tmp_path / "m.gguf", **options)
    with pytest.raises(JobError, match=says) as caught:
        GgufModel(path)
    assert caught.value.code == code
