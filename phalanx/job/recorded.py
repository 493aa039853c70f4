"""A job that was written down, perhaps by another release, compared key by key with one of now.

A hash of all keys says only that something differs, and it differs as soon as a release has one key
more. The tables say what.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from phalanx.job.sections import SECTIONS


class _Unknown:
    def __repr__(self) -> str:
        return "unknown to this release"


UNKNOWN = _Unknown()


@dataclass(frozen=True)
class Change:
    """A key whose value is another now.

    Attributes:
        key: dotted.
        was, now: the values, as JSON holds them; `UNKNOWN` where a table lacks a key that has no
            default here.
    """

    key: str
    was: Any
    now: Any

    def told(self) -> str:
        """In words."""
        return f"{self.key} was {self.was!r} and is {self.now!r}"


def changes(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Keys whose values differ, in the order of their names.

    A key that one of the tables lacks counts as its default: the release that wrote the table had
    no such key, and a new key's default is what happened before there was one.

    Args:
        recorded, now: section -> key -> value, as `Job.result_table` has them.
    """
    was, is_now = _flat(recorded), _flat(now)
    pairs = {
        key: (_value(was, key), _value(is_now, key)) for key in sorted(was.keys() | is_now.keys())
    }
    return [Change(key, before, after) for key, (before, after) in pairs.items() if before != after]


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value, lists for tuples."""
    plain = json.loads(json.dumps(dict(table)))
    flat: dict[str, Any] = {}
    for section, keys in plain.items():
        is_section = isinstance(keys, dict)
        flat |= {f"{section}.{key}": value for key, value in keys.items()} if is_section else {}
        flat |= {} if is_section else {section: keys}
    return flat


def _value(flat: Mapping[str, Any], key: str) -> Any:
    if key in flat:
        return flat[key]
    section, _, name = key.partition(".")
    for each in fields(SECTIONS[section]) if section in SECTIONS else ():
        if each.name == name:
            default = each.default if each.default_factory is MISSING else each.default_factory()
            return json.loads(json.dumps(default))
    return UNKNOWN
