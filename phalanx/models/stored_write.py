"""Writing safetensors files tensor by tensor: places are planned first, then filled in any order.

Beside the tensor at hand nothing is in memory. Facts of the format as in `stored`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from math import inf, prod
from pathlib import Path

import torch
from torch import Tensor

from phalanx.errors import JobError, nearest_names
from phalanx.models.folders import require_free
from phalanx.models.stored import FLOAT_DTYPES, INDEX, SINGLE, StoredTensor, item_bytes
from phalanx.models.stored_read import CHUNK_BYTES

MAX_SHARD_BYTES = 5e9
RESERVE_BYTES = 64 * 2**20  # for the small files beside the weights
PlannedTensor = tuple[str, str, tuple[int, ...]]  # name, dtype as the format calls it, shape


class ShardWriter:
    """The weights of a folder, in files of at most `max_shard_bytes` (or one tensor each).

    Headers are written at once, tensors when they come: `put` them in any order, then `close`.

    Args:
        folder: exists; free disk is checked before anything is written.
        planned: every tensor once, in the order of the files.
        max_shard_bytes: of one file; infinite with `single`.
        single: name of the only file; "" as transformers names them.

    Raises:
        JobError: `environment/disk` without room; from `put`, `copy` and `close` `model/tensor`
            for an unknown, doubled, misshapen or missing tensor.
    """

    def __init__(
        self,
        folder: Path,
        planned: Sequence[PlannedTensor],
        max_shard_bytes: float = MAX_SHARD_BYTES,
        single: str = "",
    ) -> None:
        self.folder = folder
        self.total_bytes = sum(map(_num_bytes, planned))
        self._num_elements = sum(prod(shape) for _, _, shape in planned)
        require_free(folder, self.total_bytes + RESERVE_BYTES)
        shards = _shards(planned, inf if single else max_shard_bytes)
        self._places: dict[str, StoredTensor] = {}
        for number, shard in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._begin_file(folder / (single or SINGLE if len(shards) == 1 else file), shard)
        self._missing = dict(self._places)

    def _begin_file(self, path: Path, shard: Sequence[PlannedTensor]) -> None:
        """The header; wider elements come first, so that each tensor is aligned to its own."""
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        ordered = sorted(shard, key=lambda tensor: -item_bytes(tensor[1]))
        end = 0
        for name, dtype, shape in ordered:
            start, end = end, end + _num_bytes((name, dtype, shape))
            entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
            table[name] = entry
        header = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
        header += b" " * (-len(header) % 8)
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + end)
        at = 8 + len(header)
        for name, dtype, shape in ordered:
            size = _num_bytes((name, dtype, shape))
            self._places[name] = StoredTensor(name, path, dtype, shape, at, size)
            at += size

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, cast to the planned dtype; it may be on any device."""
        place = self._take(name, tuple(tensor.shape))
        dtype = getattr(torch, FLOAT_DTYPES[place.dtype])
        flat, step = tensor.detach().reshape(-1), CHUNK_BYTES // place.item_bytes
        with place.path.open("r+b", buffering=0) as file:
            file.seek(place.start)
            for at in range(0, len(flat), step):
                chunk = flat[at : at + step].to("cpu", dtype).contiguous()
                _write_all(file, memoryview(chunk.view(torch.uint8).numpy()))

    def copy(self, name: str, source: StoredTensor) -> None:
        """Write a tensor as another file holds it, byte for byte."""
        place = self._take(name, source.shape)
        assert place.dtype == source.dtype, "bytes are copied between equal dtypes only"
        with source.path.open("rb") as read, place.path.open("r+b", buffering=0) as file:
            read.seek(source.start)
            file.seek(place.start)
            left = source.num_bytes
            while left:
                chunk = read.read(min(left, CHUNK_BYTES))
                if not chunk:
                    rule = "the file ends within this tensor"
                    raise JobError("model/tensor", str(source.path), source.name, rule)
                _write_all(file, memoryview(chunk))
                left -= len(chunk)

    def _take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        place = self._missing.get(name)
        if place is None:
            rule = "comes twice" if name in self._places else "is no tensor of this model"
            near = nearest_names(name, self._missing)
            raise JobError("model/tensor", "weights", name, rule, legal=near)
        if place.shape != shape:
            raise JobError("model/tensor", name, shape, f"must have the shape {place.shape}")
        del self._missing[name]
        return place

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the tensors that have not come yet."""
        return tuple(self._missing)

    def close(self) -> None:
        """All tensors have come: write the index, if there is more than one file."""
        if self._missing:
            rule = f"{len(self._missing)} tensors of the model are missing"
            raise JobError("model/tensor", "weights", None, rule, legal=list(self._missing)[:3])
        files = {name: place.path.name for name, place in self._places.items()}
        if len(set(files.values())) > 1:
            sizes = {"total_parameters": self._num_elements, "total_size": self.total_bytes}
            table = {"metadata": sizes, "weight_map": dict(sorted(files.items()))}
            (self.folder / INDEX).write_text(json.dumps(table, indent=2) + "\n")


def _num_bytes(planned: PlannedTensor) -> int:
    _, dtype, shape = planned
    return prod(shape) * item_bytes(dtype)


def _shards(planned: Sequence[PlannedTensor], max_shard_bytes: float) -> list[list[PlannedTensor]]:
    shards: list[list[PlannedTensor]] = [[]]
    room = max_shard_bytes
    for tensor in planned:
        size = _num_bytes(tensor)
        if shards[-1] and size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= size
    return shards


def _write_all(file, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.write(file.fileno(), view[done:])
