"""One safetensors file, written in one pass with its digest, on the disk when the call returns.

The format is safetensors': eight bytes with the length of a JSON header, the header, the values.
Written here and not by the library, which offers neither the digest of what it writes nor fsync,
and holds all values in one more copy.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from phalanx.engines.checkpoint.snapshot import Form, Values

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
OFFSETS_KEY = "DCP_SHARDING_INFO"  # where torch's HuggingFaceStorageReader looks for offsets


class FileRecord(NamedTuple):
    """What a file must be: its size and the digest of its content."""

    num_bytes: int
    sha256: str


def write_shard(
    path: Path, values: Values, names: Iterable[str], offsets: Mapping[str, tuple[int, ...]]
) -> FileRecord:
    """Write slices of tensors and forget each as soon as it is written.

    Args:
        path: a new file.
        values: that hold the slices.
        names: of those that the file gets.
        offsets: first row of each slice in its whole tensor, kept in the header.

    Raises:
        OSError: as the file system says.
    """
    names = list(names)
    digest, num_bytes = hashlib.sha256(), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(piece: memoryview) -> None:
        nonlocal num_bytes
        digest.update(piece)
        num_bytes += len(piece)
        while piece:
            piece = piece[os.write(handle, piece) :]

    try:
        write(memoryview(_header({name: values.forms[name] for name in names}, offsets)))
        for name in names:
            values.read(name, write)
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileRecord(num_bytes, digest.hexdigest())


def _header(forms: Mapping[str, Form], offsets: Mapping[str, tuple[int, ...]]) -> bytes:
    saved = {name: {"saved_offsets": list(offsets[name])} for name in forms}
    table: dict[str, object] = {"__metadata__": {"format": "pt", OFFSETS_KEY: json.dumps(saved)}}
    start = 0
    for name, form in forms.items():
        end = start + form.num_bytes
        dtype, shape = DTYPES[form.dtype], list(form.shape)
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)  # values start at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text
