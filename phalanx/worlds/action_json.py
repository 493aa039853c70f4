"""Actions as JSON: how decisions of a leader travel, readable in a log and without pickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from phalanx.action import (
    Action,
    Alloc,
    Collective,
    Compute,
    Free,
    Mark,
    Move,
    Recv,
    Send,
    Timer,
)

_CLASSES: dict[str, type[Action]] = {
    cls.kind: cls for cls in (Compute, Send, Recv, Collective, Move, Alloc, Free, Timer, Mark)
}


def actions_to_json(actions: Sequence[Action]) -> list[dict[str, Any]]:
    """Plain dictionaries with the fields that differ from their default.

    `Compute.batch` must be made of dictionaries, lists, tuples, numbers and strings.
    """
    return [_to_json(action) for action in actions]


def actions_from_json(rows: Sequence[Mapping[str, Any]]) -> list[Action]:
    """The actions again; lists become tuples, as actions hold no lists."""
    return [_CLASSES[row["kind"]](**_frozen(row["fields"])) for row in rows]


def _to_json(action: Action) -> dict[str, Any]:
    values = {}
    for each in fields(action):
        value = getattr(action, each.name)
        if each.default is MISSING or value != each.default:
            values[each.name] = value
    return {"kind": action.kind, "fields": values}


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _frozen(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_frozen(each) for each in value)
    return value
