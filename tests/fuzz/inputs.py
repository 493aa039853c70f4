"""What users and broken disks may hand in: any text, any table, and near misses of valid files.

`outcome` is the law that all fuzz tests share: an answer, or one clear line with a listed code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from datetime import date
from typing import Any

from hypothesis import strategies as st

from phalanx.errors import CODES, PhalanxError

_SEPARATORS = "[]{}=\",'#.\n\\ \t"
_HUGE = 10**400  # too large for a float

words = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=8)
numbers = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([_HUGE, -_HUGE, 2**63, 0.5, -0.5]),
    st.floats(),
)
scalars = st.one_of(
    st.booleans(), numbers, words, st.text(max_size=6), st.just("1 GiB"), st.dates()
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(words | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
# JSON has nothing like dates, and null
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    """The answer of a call, or the `PhalanxError` that it refused with.

    Any other exception goes through, and with it the test fails. A refusal has a listed code and
    says what it has to say in one line; more lines are its detail.
    """
    try:
        return call(*arguments)
    except PhalanxError as error:
        head = error.sentence().removesuffix(f"\n{error.detail}" if error.detail else "")
        assert error.code in CODES and error.exit_code == 2
        assert head and len(head.splitlines()) == 1, repr(head)
        return error


@st.composite
def near_texts(draw: st.DrawFn, text: str, max_edits: int = 3) -> str:
    """A valid text after a few slips: something cut out, put in, doubled or replaced."""
    for _ in range(draw(st.integers(1, max_edits))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.sampled_from([0, 1, 1, 5, 40])))
        middle = draw(
            st.one_of(
                st.just(""),
                st.text(_SEPARATORS, max_size=3),
                st.text(max_size=3),
                st.just(text[start:stop] * 2),
            )
        )
        text = text[:start] + middle + text[stop:]
    return text


@st.composite
def near_bytes(draw: st.DrawFn, data: bytes, max_edits: int = 4) -> bytes:
    """A valid file after bit rot: some bytes changed, or its end cut off."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(0, max_edits))):
        changed[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    whole = draw(st.booleans())
    return bytes(changed if whole else changed[: draw(st.integers(0, len(data)))])


@st.composite
def near_tables(
    draw: st.DrawFn, table: Mapping[str, Any], others: st.SearchStrategy[Any] = values
) -> dict[str, Any]:
    """A valid table in which one entry, however deep, is gone, renamed, added or something else."""
    changed = deepcopy(dict(table))
    places = list(_places(changed))
    parent, key = draw(st.sampled_from(places))
    what = draw(st.sampled_from(["replace", "replace", "remove", "rename", "add"]))
    if what == "replace":
        parent[key] = draw(others)
    elif isinstance(parent, list):
        del parent[key]
    elif what == "add":
        parent[draw(words)] = draw(others)
    else:
        value = parent.pop(key)
        if what == "rename":
            name = str(key)
            at = draw(st.integers(0, len(name)))
            parent[name[:at] + draw(st.sampled_from("xs._")) + name[at + 1 :]] = value
    return changed


def _places(value: Any):
    """(table or list, key) of every entry."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def to_toml(table: Mapping[str, Any]) -> str:
    """A document of top-level keys, tables inline."""
    return "".join(f"{_key(name)} = {toml_value(value)}\n" for name, value in table.items())


def toml_value(value: Any) -> str:
    """One value as TOML writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int):
        return hex(value) if value >= 0 else str(value)  # decimal digits have a limit in Python
    return value.isoformat() if isinstance(value, date) else repr(value)


def _key(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)
