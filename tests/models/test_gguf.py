"""GGUF files out and in: bit for bit, in llama.cpp's form, and cached under their content."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.data import cached
from phalanx.errors import JobError
from phalanx.models.config import parse_config
from phalanx.models.hf import load_decoder, read_tensors, save_folder
from phalanx.models.parameters import initial_values
from phalanx.models.spec import canonical_tensors, read_config
from tests.models.families import TABLES

gguf = pytest.importorskip("gguf")

from phalanx.models.gguf_cache import gguf_folder  # noqa: E402
from phalanx.models.gguf_export import export_gguf, require_gguf  # noqa: E402
from phalanx.models.gguf_import import (  # noqa: E402
    GgufModel,
    halves_from_pairs,
    pairs_from_halves,
)
from phalanx.models.gguf_vocabulary import PRE_TOKENIZERS  # noqa: E402

TEXT = "It's  1234 h\u00e9llo\n\n\n  <|end|>x <b> \u4f60\u597d\tend   "
# the pattern of llama.cpp: every sixth layer is full; its query scale is the head size
GEMMA3 = TABLES["gemma3"] | {
    "num_hidden_layers": 7,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 16,
}
MODELS = {name: TABLES[name] for name in ("llama3", "llama3_tied", "qwen3")} | {"gemma3": GEMMA3}


def write_byte_level(folder: Path, pre: str, vocab_size: int) -> None:
    """A tokenizer of Llama 3's or Qwen's kind, with few merges."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*"eh0123456789 ", *bytes_]
    entries = list(dict.fromkeys(e for e in entries if e in bytes_))[: vocab_size - 6]
    vocabulary = {token: number for number, token in enumerate([*entries, "he"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e")]))
    split = pre_tokenizers.Split(Regex(PRE_TOKENIZERS[pre]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("<b>", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    table = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "add_bos_token": pre != "qwen2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def write_sentencepiece(folder: Path) -> None:
    """A tokenizer of Gemma's kind."""
    from phalanx.models.gguf_vocabulary import GgufVocabulary

    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "<b>", "\u2581", "a", "b", "ab", "\u2581ab"]
    kinds = [3, 3, 3, 3, 4, 4, 1, 1, 1, 1, 1]
    tokens += [f"<0x{number:02X}>" for number in range(60)]
    special = {"bos": 2, "eos": 1, "unk": 3, "pad": 0}
    GgufVocabulary("llama", "default", tokens, [*kinds, *[6] * 60], special=special).save(
        folder, ""
    )


def steps(like: torch.Tensor) -> torch.Tensor:
    """Norms that are not the identity, none of them below 2^-15 but zero."""
    return (torch.linspace(-0.5, 0.75, like.numel()) * 64).round().div(64).to(like.dtype)


def make_folder(tmp_path: Path, name: str, dtype: str) -> Path:
    """A random model with a tokenizer."""
    extras = tmp_path / "extras"
    extras.mkdir()
    if name == "gemma3":
        write_sentencepiece(extras)
    else:
        pre = "qwen2" if name == "qwen3" else "llama-bpe"
        write_byte_level(extras, pre, MODELS[name]["vocab_size"])
    config = parse_config(MODELS[name]).with_dtype(dtype)
    drawn = initial_values(3, canonical_tensors(config).values())
    values = ((n, v + steps(v) if v.dim() == 1 else v) for n, v in drawn)
    return save_folder(tmp_path / "model", config, values, extras_from=extras)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_what_goes_out_comes_back_bit_for_bit(tmp_path, name, dtype):
    folder = make_folder(tmp_path, name, dtype)
    model = GgufModel(export_gguf(folder, tmp_path / "model.gguf"))
    config = read_config(folder)
    assert replace(model.config, bos_token=None, eos_tokens=(), pad_token=None) == replace(
        config, bos_token=None, eos_tokens=(), pad_token=None
    )
    back = dict(model.tensors())
    for key, value in read_tensors(folder):
        assert torch.equal(back[key], value), key


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3"])
def test_tokenizer_comes_back_as_it_was(tmp_path, name):
    from tokenizers import Tokenizer

    folder = make_folder(tmp_path, name, "bfloat16")
    model = GgufModel(export_gguf(folder, tmp_path / "model.gguf"))
    assert model.vocabulary.adds_bos == (name != "qwen3")
    (tmp_path / "back").mkdir()
    model.save_tokenizer(tmp_path / "back")
    before, after = (
        Tokenizer.from_file(str(path / "tokenizer.json")) for path in (folder, tmp_path / "back")
    )
    text = "ab  a<b>b<eos>" if name == "gemma3" else TEXT
    ids = [each.encode(text, add_special_tokens=False).ids for each in (before, after)]
    assert ids[0] == ids[1]
    if name != "gemma3":
        assert (tmp_path / "back" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_order_of_rotated_channels_is_undone():
    weight = torch.arange(2 * 6 * 3.0).reshape(12, 3)  # two heads of six channels
    stored = pairs_from_halves(weight, 6)
    assert stored[:4, 0].tolist() == weight[[0, 3, 1, 4], 0].tolist()
    assert torch.equal(halves_from_pairs(stored, 6), weight)


def test_metadata_has_the_keys_of_llama_cpps_converter(tmp_path):
    """As its converter (of llama-cpp-python 0.3.36) writes them for these families."""
    common = {
        *"context_length embedding_length block_count feed_forward_length".split(),
        *(f"attention.{n}" for n in ("head_count", "head_count_kv", "key_length", "value_length")),
        *("attention.layer_norm_rms_epsilon", "rope.freq_base"),
    }
    more = {
        "llama3": {"vocab_size", "rope.dimension_count"},
        "qwen3": set(),
        "gemma3": {"attention.sliding_window", "rope.freq_base_swa"},
    }
    for name, others in more.items():
        (tmp_path / name).mkdir()
        folder = make_folder(tmp_path / name, name, "bfloat16")
        reader = gguf.GGUFReader(export_gguf(folder, tmp_path / f"{name}.gguf"))
        prefix = reader.fields["general.architecture"].contents() + "."
        found = {key.removeprefix(prefix) for key in reader.fields if key.startswith(prefix)}
        scaled = {"rope.scaling.type", "rope.scaling.factor"} if name == "gemma3" else set()
        assert found == common | others | scaled
        assert "tokenizer.ggml.tokens" in reader.fields and "general.file_type" in reader.fields


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gemma3", {"query_pre_attn_scalar": 17}, "it assumes 16"),
        ("gemma3", {"sliding_window_pattern": 3}, "every sixth layer"),
        ("gemma4", {}, "GGUF form"),
    ],
)
def test_models_that_llama_cpp_cannot_be_told_of_are_refused(tmp_path, name, change, says):
    config = parse_config((MODELS | TABLES)[name] | MODELS.get(name, {}) | change)
    with pytest.raises(JobError, match=says) as caught:
        require_gguf(config, tmp_path)
    assert caught.value.code == "model/unknown"


def test_tokenizer_without_a_name_in_llama_cpp_is_refused(tmp_path):
    folder = make_folder(tmp_path, "qwen3", "bfloat16")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("'re|", "'RE|"))
    with pytest.raises(JobError, match="pre_tokenizer") as caught:
        export_gguf(folder, tmp_path / "model.gguf")
    assert caught.value.code == "model/unknown"
    assert "model.gguf" not in os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: b"", "cannot be read as a GGUF"),
        (lambda data: data[: len(data) // 2], "cannot be read as a GGUF"),
        (lambda data: b"GGML" + data[4:], "cannot be read as a GGUF"),
    ],
)
def test_damaged_files_are_one_line(tmp_path, spoil, says):
    path = export_gguf(make_folder(tmp_path, "llama3", "bfloat16"), tmp_path / "model.gguf")
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(JobError, match=says) as caught:
        GgufModel(path)
    assert caught.value.code == "model/tensor" and str(path) in str(caught.value)


def test_file_becomes_a_folder_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_folder(tmp_path, "llama3", "bfloat16")
    path = export_gguf(folder, tmp_path / "model.gguf")
    lines: list[str] = []
    made = gguf_folder(path, lines.append)
    assert made.is_relative_to(cached.cache_folder("models")) and len(lines) == 1
    renamed = path.rename(tmp_path / "other.gguf")
    assert gguf_folder(renamed, lines.append) == made and len(lines) == 1
    ours, theirs = load_decoder(made), load_decoder(folder)
    assert all(torch.equal(v, theirs.state_dict()[k]) for k, v in ours.state_dict().items())


def test_folder_for_llama_cpps_converter_names_its_pieces(tmp_path):
    """tokenizer.model: what the sentencepiece library would read, byte for byte by the format."""
    from phalanx.models.sentencepiece_model import complete_tokenizer

    folder = make_folder(tmp_path, "gemma3", "bfloat16")
    complete_tokenizer(folder, 94)
    content = (folder / "tokenizer.model").read_bytes()
    # piece 9, "ab": text, score (the third merged token: -3), kind NORMAL
    assert b"\x0a\x0b" + b"\x0a\x02ab" + b"\x15\x00\x00\x40\xc0" + b"\x18\x01" in content
    named = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert named["5"]["content"] == "<b>" and not named["5"]["special"] and named["2"]["special"]
    before = content
    complete_tokenizer(folder, 94)
    assert (folder / "tokenizer.model").read_bytes() == before
