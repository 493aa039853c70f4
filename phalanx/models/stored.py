"""What safetensors files hold, read from their headers only: where each tensor lies. No torch.

The format (safetensors README, "Format"): 8 bytes little-endian length N, N bytes of JSON (name ->
dtype, shape, data_offsets; "__metadata__" aside), then the data without holes. A folder with more
than one file has `model.safetensors.index.json`, which says in which file a tensor is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from phalanx.errors import JobError, nearest_names, shown

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
STORED_DTYPES = {name: stored for stored, name in FLOAT_DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_ITEM_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4},
    **{"F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1},
    **{"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1},
}
_MARKED_BYTES = 64  # of each tensor
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file.

    Attributes:
        name: as the file calls it.
        path: the file.
        dtype: as the format calls it ("BF16").
        shape: whole shape.
        start: offset of its first byte in the file.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return item_bytes(self.dtype)

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def item_bytes(dtype: str) -> int:
    """Bytes of an element of a stored dtype."""
    return _ITEM_BYTES[dtype]


def mark_of(tensors: Iterable[StoredTensor]) -> str:
    """16 hex digits by which weights are known again: names, kinds and first values of all of them.

    Nothing is said of the other values, which would all have to be read.
    """
    digest = hashlib.sha256()
    for path, inside in groupby(sorted(tensors, key=lambda each: (each.path, each.start)), _path):
        with path.open("rb") as file:
            for each in inside:
                digest.update(f"{each.name} {each.dtype} {each.shape}\0".encode())
                file.seek(each.start)
                digest.update(file.read(min(_MARKED_BYTES, each.num_bytes)))
    return digest.hexdigest()[:16]


def _path(tensor: StoredTensor) -> Path:
    return tensor.path


def read_header(path: str | Path) -> dict[str, StoredTensor]:
    """Name -> place of each tensor of a safetensors file, in the order of its bytes.

    Raises:
        JobError: `model/tensor` for a file that cannot be read, is truncated or is damaged; it
            names the file and, where one is to blame, the tensor.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                _damaged(path, f"its header cannot be {length} bytes long in a file of {size}")
            header = file.read(length)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        rule = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise JobError("model/tensor", "weights file", path, rule) from error
    table = _json_object(header, path)
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        _damaged(path, "its __metadata__ is no table")
    tensors = [_stored(path, name, entry, 8 + length) for name, entry in table.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.start + tensor.num_bytes))
    end = 8 + length
    for tensor in tensors:
        if tensor.start != end:
            _damaged(path, "there is a hole or an overlap in front of this tensor", tensor.name)
        end += tensor.num_bytes
        if end > size:
            rule = f"the file is truncated: this tensor ends at byte {end}, the file at {size}"
            _damaged(path, rule, tensor.name)
    if end != size:
        _damaged(path, f"it has {size - end} bytes that belong to no tensor")
    return {tensor.name: tensor for tensor in tensors}


def _damaged(path: Path, rule: str, tensor: str | None = None) -> NoReturn:
    raise JobError("model/tensor", str(path), tensor, rule)


def _json_object(content: bytes, path: Path) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a name comes twice")
        return table

    try:
        table = json.loads(content.decode(), object_pairs_hook=once)
    except RecursionError:
        raise JobError("model/tensor", str(path), None, "is nested too deeply") from None
    except ValueError as error:
        raise JobError("model/tensor", str(path), None, f"is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise JobError("model/tensor", str(path), shown(table), "must be a JSON object")
    return table


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _stored(path: Path, name: str, entry: object, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict):
        _damaged(path, f"its entry is {shown(entry)}", name)
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        legal = nearest_names(dtype, _ITEM_BYTES) if isinstance(dtype, str) else list(FLOAT_DTYPES)
        rule = f"its dtype is {shown(dtype)}, which is not known"
        raise JobError("model/tensor", str(path), name, rule, legal=legal)
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        _damaged(path, f"its shape is {shown(shape)}", name)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        _damaged(path, f"its data_offsets are {shown(offsets)}", name)
    num_bytes = offsets[1] - offsets[0]
    if num_bytes != prod(shape) * _ITEM_BYTES[dtype]:
        _damaged(path, f"{shown(shape)} of {dtype} does not take {shown(num_bytes)} bytes", name)
    return StoredTensor(name, path, dtype, tuple(shape), data_start + offsets[0], num_bytes)


def stored_tensors(folder: str | Path) -> dict[str, StoredTensor]:
    """Name -> place of every tensor of a model folder, under the names of its files.

    As transformers does, `model.safetensors` is preferred, then the index, then `model*` files.

    Raises:
        JobError: `job/not-found` for a folder without weights or an absent shard,
            `environment/trust` for one that holds pickles only, `model/tensor` for damaged files
            or an index that does not fit them.
    """
    folder = Path(folder)
    try:
        present = sorted(os.listdir(folder))
    except (OSError, ValueError) as error:
        raise JobError("job/not-found", "model folder", folder, "cannot be listed") from error
    if SINGLE in present:
        return read_header(folder / SINGLE)
    if INDEX in present:
        return _indexed(folder, present)
    shards = [name for name in present if name.startswith("model") and _is_safetensors(name)]
    if not shards:
        _refuse_without_weights(folder, present)
    tensors: dict[str, StoredTensor] = {}
    for name in shards:
        for found in read_header(folder / name).values():
            if found.name in tensors:
                rule = f"lies in {tensors[found.name].path.name} too"
                raise JobError("model/tensor", str(folder / name), found.name, rule)
            tensors[found.name] = found
    return tensors


def _is_safetensors(name: str) -> bool:
    return name.endswith(".safetensors")


def _refuse_without_weights(folder: Path, present: list[str]) -> NoReturn:
    if pickles := [name for name in present if name.endswith(_PICKLES)]:
        rule = (
            f"holds weights only as pickle ({pickles[0]}), which can run code when it is read; "
            "convert it once where you trust it: AutoModelForCausalLM.from_pretrained(FOLDER)"
            ".save_pretrained(NEW_FOLDER) of transformers writes safetensors"
        )
        raise JobError("environment/trust", "model folder", folder, rule)
    near = sorted({str(path.parent) for path in folder.glob("*/*.safetensors")})[:3]
    rule = "holds no safetensors weights"
    raise JobError("job/not-found", "model folder", folder, rule, legal=near)


def _indexed(folder: Path, present: list[str]) -> dict[str, StoredTensor]:
    index = folder / INDEX
    try:
        content = index.read_bytes()
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise JobError("model/tensor", "weights index", index, rule) from error
    files = _json_object(content, index).get("weight_map")
    if not isinstance(files, dict) or not files:
        _damaged(index, "has no weight_map, which says in which file each tensor is")
    held: dict[str, dict[str, StoredTensor]] = {}
    for name, file in files.items():
        if not isinstance(file, str) or not _is_safetensors(file):
            rule = f"is said to be in {shown(file)}, which is no safetensors file beside the index"
            _damaged(index, rule, name)
        if file not in present:
            near = nearest_names(file, filter(_is_safetensors, present))
            rule = f"the index names this file, which is absent; it should hold {name}"
            raise JobError("job/not-found", str(index), file, rule, legal=near)
        if file not in held:
            held[file] = read_header(folder / file)
        if name not in held[file]:
            rule = f"the index says that this tensor is in {file}, which does not hold it"
            near = nearest_names(name, held[file])
            raise JobError("model/tensor", str(index), name, rule, legal=near)
    return {name: held[file][name] for name, file in files.items()}


def by_file(tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, StoredTensor]]:
    """(key, tensor) in the order of files and bytes, so that reading moves forward."""
    order = {path: at for at, path in enumerate(dict.fromkeys(t.path for t in tensors.values()))}
    yield from sorted(tensors.items(), key=lambda item: (order[item[1].path], item[1].start))
