"""One strict reader of what comes from outside: sections of jobs, options of policies, plans.

A dataclass says by its annotations what may stand in its table; a field's metadata may narrow it:
`low` and `high` (inclusive, also for the members of a list or table), `choices`, and `kind`, an
annotation that is read instead of the field's own where that is wider. Nothing is converted but
whole numbers to floats where a float is asked for, and lists to tuples.

Read kinds: str, bool, int (64 bits), float (finite), None, lists, tables, unions of these, nested
dataclasses, and Any, which is whatever JSON can hold.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from phalanx.errors import JobError, PhalanxError, PlanError, nearest_names, shown

_DEEPEST = 32  # tables in tables; whoever walks them later may recurse
_INT_BITS = 63
_LIST, _TABLE = (list, tuple), (Mapping,)
# what a value must be an instance of, and what the rule calls it
_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    str: ((str,), "text"),
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    NoneType: ((NoneType,), "nothing"),
    list: (_LIST, "a list"),
    tuple: (_LIST, "a list"),
    Sequence: (_LIST, "a list"),
    dict: (_TABLE, "a table"),
    Mapping: (_TABLE, "a table"),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """How the errors of a reader are called.

    Attributes:
        error: their class.
        bad_value, unknown_key, missing: their codes.
        complete: fields with a default have to be given too.
    """

    error: type[PhalanxError]
    bad_value: str
    unknown_key: str
    missing: str
    complete: bool = False


JOB = Refusal(JobError, "job/bad-value", "job/unknown-key", "job/missing")
LOCKFILE = Refusal(PlanError, "plan/format", "plan/format", "plan/format", complete=True)


def parse_toml(content: bytes | str, where: str) -> dict[str, Any]:
    """A TOML document.

    Raises:
        JobError: `job/syntax` for what is not TOML, not UTF-8, or nested too deeply to be read.
    """
    try:
        return tomllib.loads(content.decode() if isinstance(content, bytes) else content)
    except RecursionError:
        raise JobError("job/syntax", where, None, "is nested too deeply") from None
    except ValueError as error:
        raise JobError("job/syntax", where, None, str(error)) from None


def read_record(cls: type, table: Any, where: str, refusal: Refusal = JOB) -> Any:
    """A dataclass from its table.

    Args:
        cls: the dataclass.
        table: field -> value.
        where: dotted path of the table, or "file: " for a whole file.
        refusal: how errors are called.

    Raises:
        PhalanxError: as `refusal` says, for an unknown or missing key and for a bad value.
    """
    _require(isinstance(table, Mapping), table, "a table", where, refusal)
    known: dict[str, Field] = {each.name: each for each in fields(cls)}
    _require_keys(table, known, where, refusal)
    for name, each in known.items():
        optional = each.default is not MISSING or each.default_factory is not MISSING
        if name not in table and (refusal.complete or not optional):
            raise refusal.error(refusal.missing, _inner(where, name), None, "is missing")
    return cls(
        **{
            name: read_field(cls, known[name], value, _inner(where, name), refusal)
            for name, value in table.items()
        }
    )


def _require_keys(
    table: Mapping[Any, Any], known: Mapping[str, Any], where: str, refusal: Refusal
) -> None:
    for name in table:
        _require(isinstance(name, str), name, "text, as every key", where, refusal)
        if name not in known:
            path, legal = _inner(where, name), nearest_names(name, known)
            raise refusal.error(refusal.unknown_key, path, None, "no such key", legal=legal)


def read_field(cls: type, each: Field, value: Any, where: str, refusal: Refusal = JOB) -> Any:
    """The value of one field of a dataclass, within the range that its metadata gives.

    Args:
        cls: the dataclass that has it.
        each: the field.
        value: what was given.
        where: dotted path of the value.
        refusal: how errors are called.
    """
    kind = each.metadata.get("kind") or _kinds(cls)[each.name]
    read = read_value(value, kind, where, refusal)
    for path, member in _members(read, where):
        _require_range(each.metadata, member, path, refusal)
    return read


def read_value(value: Any, kind: Any, where: str, refusal: Refusal = JOB) -> Any:
    """A value of a kind: an annotation made of those that this module reads.

    Raises:
        PhalanxError: as `refusal` says.
        TypeError: for an annotation that cannot be read, which is a mistake in the code.
    """
    union = get_origin(kind) in (Union, UnionType)
    members = get_args(kind) if union else (kind,)
    for member in members:
        if _fits(value, member):
            return _built(value, member, where, refusal)
    wanted = " or ".join(dict.fromkeys(_KINDS[_base(member)][1] for member in members))
    near = [round(value)] if int in members and _is_finite(value) else []
    raise refusal.error(refusal.bad_value, where, shown(value), f"must be {wanted}", legal=near)


def _built(value: Any, kind: Any, where: str, refusal: Refusal) -> Any:
    base = _base(kind)
    if base is Any:
        return _plain(value, where, refusal)
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return read_record(kind, value, where, refusal)
    if base is int:
        fits = -(2**_INT_BITS) <= value < 2**_INT_BITS
        _require(fits, value, f"a whole number of {_INT_BITS + 1} bits", where, refusal)
    elif base is float:
        _require(_is_finite(value), value, "a finite number", where, refusal)
        return float(value)
    elif _KINDS[base][0] is _LIST:
        return _list(value, kind, where, refusal)
    elif _KINDS[base][0] is _TABLE:
        return _table(value, get_args(kind)[1:] or (Any,), where, refusal)
    return value


def _list(value: Sequence[Any], kind: Any, where: str, refusal: Refusal) -> Any:
    kinds = [each for each in get_args(kind) if each is not Ellipsis] or [Any]
    if _base(kind) is tuple and get_args(kind) and Ellipsis not in get_args(kind):
        fits = len(value) == len(kinds)
        _require(fits, value, f"a list of {len(kinds)}", where, refusal)
    else:
        kinds = kinds * len(value)
    read = (
        read_value(member, each, f"{where}[{at}]", refusal)
        for at, (member, each) in enumerate(zip(value, kinds))
    )
    return list(read) if _base(kind) is list else tuple(read)


def _table(value: Mapping[Any, Any], kinds: tuple[Any, ...], where: str, refusal: Refusal) -> Any:
    for name in value:
        _require(isinstance(name, str), name, "text, as every key", where, refusal)
    return {
        name: read_value(member, kinds[0], _inner(where, name), refusal)
        for name, member in value.items()
    }


def _plain(value: Any, where: str, refusal: Refusal, depth: int = 0) -> Any:
    """What JSON can hold, however deep; lists for tuples."""
    if value is None or isinstance(value, bool | str):
        return value
    _require(depth <= _DEEPEST, value, f"at most {_DEEPEST} levels deep", where, refusal)
    if isinstance(value, int | float):
        _require(_is_finite(value), value, "a finite number", where, refusal)
        return value
    if isinstance(value, list | tuple):
        return [
            _plain(member, f"{where}[{at}]", refusal, depth + 1) for at, member in enumerate(value)
        ]
    _require(isinstance(value, Mapping), value, "text, a number, a list or a table", where, refusal)
    for name in value:
        _require(isinstance(name, str), name, "text, as every key", where, refusal)
    return {
        name: _plain(member, _inner(where, name), refusal, depth + 1)
        for name, member in value.items()
    }


@cache
def _kinds(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _base(kind: Any) -> Any:
    base = Mapping if is_dataclass(kind) else get_origin(kind) or kind
    if base is not Any and base not in _KINDS:
        raise TypeError(f"values of kind {kind} cannot be read from a table")
    return base


def _fits(value: Any, kind: Any) -> bool:
    base = _base(kind)
    if base is Any:
        return True
    classes = _KINDS[base][0]
    return isinstance(value, classes) and (bool in classes or not isinstance(value, bool))


def _is_finite(value: Any) -> bool:
    """Also False for whole numbers that no float can hold, and for what is no number."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _members(value: Any, where: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(_inner(where, name), member) for name, member in value.items()]
    if isinstance(value, list | tuple):
        return [(f"{where}[{at}]", member) for at, member in enumerate(value)]
    return [(where, value)]


def _require_range(metadata: Mapping[str, Any], value: Any, where: str, refusal: Refusal) -> None:
    choices, low, high = (metadata.get(name) for name in ("choices", "low", "high"))
    if choices and value not in choices:
        near = nearest_names(value, choices) or choices
        rule = "no such choice"
        raise refusal.error(refusal.bad_value, where, shown(value), rule, legal=near)
    if low is not None and value < low:
        rule = f"must be at least {low}"
        raise refusal.error(refusal.bad_value, where, value, rule, legal=[low])
    if high is not None and value > high:
        rule = f"must be at most {high}"
        raise refusal.error(refusal.bad_value, where, value, rule, legal=[high])


def _require(holds: bool, value: Any, what: str, where: str, refusal: Refusal) -> None:
    if not holds:
        path = where.removesuffix(": ")
        raise refusal.error(refusal.bad_value, path, shown(value), f"must be {what}")


def _inner(where: str, name: str) -> str:
    return f"{where}{name}" if where.endswith(": ") else f"{where}.{name}"
