"""Model folders as Hugging Face writes them: config.json, safetensors shards, tokenizer files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from phalanx.errors import JobError, nearest_names
from phalanx.models.config import to_huggingface
from phalanx.models.decoder import Decoder, Part
from phalanx.models.folders import atomic_folder
from phalanx.models.parameters import load_sharded
from phalanx.models.spec import DecoderConfig, canonical_tensors, read_config
from phalanx.models.stored import STORED_DTYPES, StoredTensor, by_file, stored_tensors
from phalanx.models.stored_read import TensorReader
from phalanx.models.stored_write import MAX_SHARD_BYTES, ShardWriter
from phalanx.models.weight_names import (
    canonical_name,
    model_weights,
    stored_name,
    stored_prefix,
)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "LICENSE",
    "Notice",
    "GEMMA_TERMS.html",
)


def read_tensors(
    folder: str | Path, names: Iterable[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, whole tensor), one at a time, file by file.

    Args:
        names: which tensors; None: all of the text decoder.

    Raises:
        JobError: as `stored.stored_tensors`; `model/tensor` for a name that is not stored.
    """
    stored = stored_tensors(folder)
    prefix = stored_prefix(stored)
    named = {canonical_name(name, prefix): each for name, each in stored.items()}
    named.pop(None, None)
    wanted = {}
    for name in named if names is None else names:
        if name not in named:
            rule, near = "is not among the stored tensors", nearest_names(name, named)
            raise JobError("model/tensor", str(folder), name, rule, legal=near)
        wanted[name] = named[name]
    yield from read_whole(wanted)


def read_whole(stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """(key, whole tensor in the dtype of the file), one at a time, in the order of the files."""
    with TensorReader() as reader:
        for name, each in by_file(stored):
            yield name, reader.whole(each)


def load_decoder(
    folder: str | Path,
    *,
    dtype: str | None = None,
    device: torch.device | str = "cpu",
    layers: range | None = None,
) -> Decoder:
    """The decoder of a model folder, or the stage that holds `layers`.

    Args:
        dtype: name of the dtype to hold weights in; None: as the config says.
    """
    config = read_config(folder)
    weights = model_weights(folder, config)
    parts = None if layers is None else [Part.of(config, layers)]
    decoder = Decoder(config.with_dtype(dtype or config.dtype), device=device, parts=parts)
    load_sharded(decoder, weights)
    return decoder


def save_folder(
    target: str | Path,
    config: DecoderConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    extras_from: str | Path | None = None,
    max_shard_bytes: float = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Write a model folder that transformers loads; it appears whole or not at all.

    Args:
        tensors: every canonical tensor once, in any order; only one is held in memory.
        extras_from: folder whose tokenizer, generation and licence files are copied.

    Raises:
        JobError: `model/tensor` for an unknown, doubled, missing or misshapen tensor;
            `job/bad-value` when `target` exists and may not be overwritten; `environment/disk`
            when it would not fit.
    """
    with atomic_folder(target, overwrite=overwrite) as folder:
        fill_folder(folder, config, tensors, max_shard_bytes)
        if extras_from is not None:
            copy_companions(Path(extras_from), folder)
    return Path(target)


def fill_folder(
    folder: Path,
    config: DecoderConfig,
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: float = MAX_SHARD_BYTES,
) -> None:
    """Write weights and config into a folder that exists, as `save_folder` does."""
    specs = canonical_tensors(config).values()
    planned = [(spec.name, STORED_DTYPES[spec.dtype], spec.shape) for spec in specs]
    writer = ShardWriter(folder, planned, max_shard_bytes)
    for name, tensor in tensors:
        writer.put(name, tensor)
    writer.close()
    _write_json(folder / "config.json", to_huggingface(config))
    generation = {
        "bos_token_id": config.bos_token,
        "eos_token_id": list(config.eos_tokens),
        "pad_token_id": config.pad_token,
    }
    _write_json(folder / "generation_config.json", generation)


def save_tuned(
    target: str | Path,
    base: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    extras_from: str | Path | None = None,
    max_shard_bytes: float = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Write the folder `base` again with other values of some tensors.

    Names (with the prefix of `base`), shapes, dtypes and config.json are those of `base`; what is
    not replaced, other modalities included, is copied byte for byte.

    Args:
        tensors: (canonical name, new value) of what changed, in any order; one is held in memory.
        extras_from: another folder than `base` to copy tokenizer files from.

    Raises:
        JobError: as `save_folder`.
    """
    stored = stored_tensors(base)
    prefix = stored_prefix(stored)
    planned = [(each.name, each.dtype, each.shape) for _, each in by_file(stored)]
    head = stored_name(_HEAD, prefix)  # tied, and stored all the same by some
    is_tied = _HEAD not in canonical_tensors(read_config(base))
    doubled = head if is_tied and head in stored else None
    with atomic_folder(target, overwrite=overwrite) as folder:
        writer = ShardWriter(folder, planned, max_shard_bytes)
        for name, tensor in tensors:
            writer.put(stored_name(name, prefix), tensor)
            if name == _EMBEDDING and doubled:
                writer.put(doubled, tensor)
        for name in writer.missing:
            writer.copy(name, stored[name])
        writer.close()
        shutil.copyfile(Path(base) / "config.json", folder / "config.json")
        copy_companions(Path(extras_from or base), folder)
    return Path(target)


def copy_companions(source: Path, folder: Path) -> None:
    """Copy what inference needs beside config and weights; links are followed."""
    for name in COMPANION_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _write_json(path: Path, table: dict) -> None:
    path.write_text(json.dumps(table, indent=2) + "\n")
