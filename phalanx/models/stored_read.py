"""Reading parts of stored tensors into place: only the bytes that a process needs.

Plain reads, not memory maps: mapped pages count as the process's memory until they are dropped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from phalanx.errors import JobError
from phalanx.models.stored import FLOAT_DTYPES, StoredTensor

Ranges = tuple[tuple[int, int], ...]  # ascending (start, stop) of indices along a dim
CHUNK_BYTES = 16 * 2**20  # read at once when rows are cut, cast or copied to a device


class TensorReader:
    """Reads tensors of one or several files, which stay open for the next one.

    Use as a context manager.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file = -1

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._path is not None:
            os.close(self._file)
            self._path = None

    def whole(self, stored: StoredTensor) -> Tensor:
        """The whole tensor, in the dtype of the file."""
        tensor = torch.empty(stored.shape, dtype=_dtype(stored))
        self.read(stored, tensor)
        return tensor

    def read(self, stored: StoredTensor, out: Tensor, ranges: Sequence[Ranges | None] = ()) -> None:
        """Fill `out` with a part of a tensor.

        Args:
            out: of the part's shape, any float dtype and device.
            ranges: what to take along each dim; None, or none given: all of it. Beyond dim 1 all
                is read, and cut afterwards.

        Raises:
            JobError: `model/tensor` when the file cannot be read or ends too early.
        """
        rows = _given(ranges, 0) or ((0, stored.shape[0] if stored.shape else 1),)
        if prod(out.shape) == 0:
            return
        cuts = [_given(ranges, dim) for dim in range(1, len(stored.shape))]
        row_shape = stored.shape[1:]
        row_bytes = prod(row_shape) * stored.item_bytes
        into = out.view(1) if not stored.shape else out
        straight = not any(cuts) and out.dtype == _dtype(stored) and out.is_contiguous()
        at = 0
        for start, stop in rows:
            if straight and out.device.type == "cpu":
                self._read_into(stored, into[at : at + stop - start], start * row_bytes)
            else:
                self._read_chunks(stored, into[at : at + stop - start], start, row_shape, cuts)
            at += stop - start
        assert at == len(into), "the ranges do not fill the part"

    def _read_chunks(
        self,
        stored: StoredTensor,
        out: Tensor,
        first_row: int,
        row_shape: tuple[int, ...],
        cuts: Sequence[Ranges | None],
    ) -> None:
        row_bytes = prod(row_shape) * stored.item_bytes
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        buffer = torch.empty((min(step, len(out)), *row_shape), dtype=_dtype(stored))
        for at in range(0, len(out), step):
            rows = buffer[: min(step, len(out) - at)]
            self._read_into(stored, rows, (first_row + at) * row_bytes)
            out[at : at + len(rows)].copy_(_cut(rows, cuts))

    def _read_into(self, stored: StoredTensor, out: Tensor, offset: int) -> None:
        """Fill contiguous CPU memory from this offset within the tensor's bytes."""
        file = self._opened(stored.path)
        view = memoryview(out.view(-1).view(torch.uint8).numpy())
        done, start = 0, stored.start + offset
        while done < len(view):
            try:
                count = os.preadv(file, [view[done : done + 2**30]], start + done)
            except OSError as error:
                rule = f"cannot be read: {error.strerror}"
                raise JobError("model/tensor", str(stored.path), stored.name, rule) from error
            if count == 0:
                rule = f"the file ends within this tensor, at byte {start + done}"
                raise JobError("model/tensor", str(stored.path), stored.name, rule)
            done += count

    def _opened(self, path: Path) -> int:
        if self._path != path:
            self.__exit__()
            try:
                self._file = os.open(path, os.O_RDONLY)
            except OSError as error:
                rule = f"cannot be read: {error.strerror}"
                raise JobError("model/tensor", "weights file", path, rule) from error
            self._path = path
        return self._file


def _dtype(stored: StoredTensor) -> torch.dtype:
    if stored.dtype not in FLOAT_DTYPES:
        where = f"{stored.path}: {stored.name}"
        rule = "is a dtype that weights are not read from"
        raise JobError("model/tensor", where, stored.dtype, rule, legal=FLOAT_DTYPES)
    return getattr(torch, FLOAT_DTYPES[stored.dtype])


def _given(ranges: Sequence[Ranges | None], dim: int) -> Ranges | None:
    return ranges[dim] if dim < len(ranges) else None


def _cut(rows: Tensor, cuts: Sequence[Ranges | None]) -> Tensor:
    for dim, ranges in enumerate(cuts, start=1):
        if ranges is not None:
            parts = [rows.narrow(dim, start, stop - start) for start, stop in ranges]
            rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return rows
