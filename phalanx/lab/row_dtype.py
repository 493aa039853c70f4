"""Formats of numbers, however a table spells them."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SPELLINGS = (
    (r"bfloat[-_ ]?|bf[-_ ]", "bf"),
    (r"(?<!b)float[-_ ]?|\bfp[-_ ]", "fp"),
    (r"\bhalf\b", "fp16"),
    (r"\be[45]m[23]\w*", "fp8"),
    (r"\be2m1\w*", "fp4"),
    (r"\bw4a\d+", "int4"),
    (r"\bw8a\d+", "int8"),
)


def plain_dtype(text: str) -> str:
    """In lower case, formats as "bf16", "fp8", "int4"; "Float8 E4M3" gives "fp8 fp8"."""
    text = text.lower()
    for pattern, name in _SPELLINGS:
        text = re.sub(pattern, name, text)
    return text


def first_named(text: str, names: Sequence[tuple[str, str]]) -> str:
    """The name of the first word that a text holds; empty where it holds none."""
    return next((name for word, name in names if word in text), "")
