"""Model folders as Hugging Face writes them: config.json, safetensors shards, tokenizer files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phalanx.errors import JobError, nearest_names
from phalanx.models.config import to_huggingface
from phalanx.models.decoder import Decoder
from phalanx.models.folders import atomic_folder
from phalanx.models.parameters import load_parameters
from phalanx.models.spec import DecoderConfig, TensorSpec, canonical_tensors, read_config

INDEX = "model.safetensors.index.json"
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "LICENSE",
    "Notice",
    "GEMMA_TERMS.html",
)


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, "pt") as reader:
            yield reader
    except SafetensorError as error:
        raise JobError("model/tensor", str(path), None, f"cannot be read: {error}") from error


def weight_files(folder: str | Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it.

    Raises:
        JobError: `job/not-found` for a folder without safetensors or an index that names a file
            which is not there, `model/tensor` for a damaged file.
    """
    folder = Path(folder)
    index = folder / INDEX
    if index.is_file():
        files = {n: folder / f for n, f in json.loads(index.read_text())["weight_map"].items()}
        for path in set(files.values()):
            if not path.is_file():
                raise JobError("job/not-found", str(index), path.name, "names an absent file")
        return files
    shards = sorted(folder.glob("model*.safetensors"))
    if not shards:
        near = sorted({str(path.parent) for path in folder.glob("*/*.safetensors")})[:3]
        raise JobError(
            "job/not-found", "model folder", folder, "holds no safetensors weights", legal=near
        )
    files = {}
    for shard in shards:
        with _opened(shard) as reader:
            files |= dict.fromkeys(reader.keys(), shard)
    return files


def read_tensors(
    folder: str | Path, names: Iterable[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor), one at a time, shard by shard.

    Args:
        names: which tensors; None: all.

    Raises:
        JobError: `job/not-found` as `weight_files`, `model/tensor` for a name that is not stored.
    """
    files = weight_files(folder)
    wanted = list(files) if names is None else list(names)
    for name in wanted:
        if name not in files:
            legal = nearest_names(name, files)
            rule = "is not among the stored tensors"
            raise JobError("model/tensor", str(folder), name, rule, legal=legal)
    for path in dict.fromkeys(files[name] for name in wanted):
        with _opened(path) as reader:
            for name in wanted:
                if files[name] == path:
                    yield name, reader.get_tensor(name)


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
    decoder = Decoder(config.with_dtype(dtype or config.dtype), device=device, layers=layers)
    names = [name for name, _ in decoder.named_parameters()]
    load_parameters(decoder, read_tensors(folder, names))
    return decoder


def save_folder(
    target: str | Path,
    config: DecoderConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    extras_from: str | Path | None = None,
    max_shard_bytes: float = 4e9,
    overwrite: bool = False,
) -> Path:
    """Write a model folder that transformers loads; it appears whole or not at all.

    Args:
        tensors: every canonical tensor once, in any order; only one shard is held in memory.
        extras_from: folder whose tokenizer, generation and licence files are copied.

    Raises:
        JobError: `model/tensor` for an unknown, doubled, missing or misshapen tensor;
            `job/bad-value` when `target` exists and may not be overwritten.
    """
    with atomic_folder(target, overwrite=overwrite) as folder:
        _write_shards(folder, canonical_tensors(config), tensors, max_shard_bytes)
        _write_json(folder / "config.json", to_huggingface(config))
        generation = {
            "bos_token_id": config.bos_token,
            "eos_token_id": list(config.eos_tokens),
            "pad_token_id": config.pad_token,
        }
        _write_json(folder / "generation_config.json", generation)
        for name in COMPANION_FILES if extras_from is not None else ():
            if (source := Path(extras_from) / name).is_file():
                shutil.copyfile(source, folder / name)
    return Path(target)


def _write_json(path: Path, table: dict) -> None:
    path.write_text(json.dumps(table, indent=2) + "\n")


def _write_shards(
    folder: Path,
    missing: dict[str, TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
    max_shard_bytes: float,
) -> None:
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    shard_bytes = total_bytes = 0

    def close_shard() -> None:
        nonlocal shard, shard_bytes
        save_file(shard, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(shard))
        shard, shard_bytes = {}, 0

    known = set(missing)
    for name, tensor in tensors:
        spec = missing.pop(name, None)
        if spec is None:
            rule = "comes twice" if name in known else "is no tensor of this model"
            raise JobError(
                "model/tensor", "weights", name, rule, legal=nearest_names(name, missing)
            )
        if tuple(tensor.shape) != spec.shape:
            rule = f"must have the shape {spec.shape}"
            raise JobError("model/tensor", name, tuple(tensor.shape), rule)
        tensor = tensor.detach().to("cpu", getattr(torch, spec.dtype)).contiguous()
        if shard and shard_bytes + spec.num_bytes > max_shard_bytes:
            close_shard()
        shard[name] = tensor
        shard_bytes += spec.num_bytes
        total_bytes += spec.num_bytes
    if missing:
        rule = f"{len(missing)} tensors of the model are missing"
        raise JobError("model/tensor", "weights", None, rule, legal=list(missing)[:3])
    close_shard()
    _name_shards(folder, shards, total_bytes)


def _name_shards(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    if len(shards) == 1:
        (folder / "0.part").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.part").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    table = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(folder / INDEX, table)
