"""From the keys of a document to a `ForeignPlan`, with the origin of every value."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from phalanx.errors import JobError, nearest_names, shown
from phalanx.planner.importers.entries import BAD_VALUE, Document
from phalanx.planner.importers.foreign import (
    ASSUMED,
    NOT_MODELLED,
    NOT_PRICED,
    UNKNOWN,
    ForeignPlan,
    Note,
)

_MOST = 2**53


@cache
def known_keys(kind: str) -> Mapping[str, Any]:
    """Keys that a program's published version has: "version", "keys", "source"."""
    text = files(__package__).joinpath("keys", f"{kind}.json").read_text(encoding="utf-8")
    return json.loads(text)


class Reading:
    """One document on its way to a plan; what is never asked for becomes a note.

    Args:
        kind: the program.
        document: its keys.
        not_modelled: key, or table of keys, -> why it may change a price that does not know it.
    """

    def __init__(
        self, kind: str, document: Document, not_modelled: Mapping[str, str] | None = None
    ) -> None:
        self.kind, self.document = kind, document
        self.version: str = known_keys(kind)["version"]
        self._known = known_keys(kind)["keys"]
        self._not_modelled = not_modelled or {}
        self._used: set[str] = set()
        self._values: dict[str, Any] = {}
        self._origin: dict[str, str] = {}
        self._notes: list[Note] = []

    def whole(self, key: str, field: str = "", default: int | None = None, low: int = 1) -> Any:
        """A whole number of at least `low`."""

        def read(value: Any) -> int | None:
            number = _as_number(value)
            if number is None or number != int(number) or not low <= number <= _MOST:
                return None
            return int(number)

        return self._take(key, field, default, read, f"must be a whole number of at least {low}")

    def number(self, key: str, field: str = "", default: float | None = None) -> Any:
        """A finite number of at least 0."""

        def read(value: Any) -> float | None:
            number = _as_number(value)
            return None if number is None or number < 0 else float(number)

        return self._take(key, field, default, read, "must be a number of at least 0")

    def flag(self, key: str, field: str = "", default: bool | None = None) -> Any:
        """A truth value, as YAML, TOML or a bare option writes it."""
        return self._take(key, field, default, _as_bool, "must be true or false")

    def text(self, key: str, field: str = "", default: str | None = None) -> Any:
        """Text, as it stands."""

        def read(value: Any) -> str | None:
            return str(value) if isinstance(value, str | int | float) and value != "" else None

        return self._take(key, field, default, read, "must be text")

    def word(
        self, key: str, meanings: Mapping[str, Any], field: str = "", default: Any = None
    ) -> Any:
        """One of the words that the program has, as what it means here; case does not matter."""
        folded = {name.lower(): meaning for name, meaning in meanings.items()}

        def read(value: Any) -> Any:
            return folded.get(str(value).lower())

        rule, near = "no such choice", list(meanings)
        return self._take(key, field, default, read, rule, legal=near)

    def names(self, key: str, field: str = "", default: tuple[str, ...] | None = None) -> Any:
        """A list of names; one name, or several separated by commas, stands for a list."""

        def read(value: Any) -> tuple[str, ...] | None:
            if isinstance(value, str):
                value = [each.strip() for each in value.split(",") if each.strip()]
            if not isinstance(value, list) or not value:
                return None
            return tuple(map(str, value))

        return self._take(key, field, default, read, "must be a list of names")

    def use(self, *keys: str) -> None:
        """Mark keys as read that change nothing beyond what was read from others."""
        self._used.update(keys)

    def raw(self, key: str) -> Any:
        """The value as it stands, or None; the key counts as read."""
        self._used.add(key)
        entry = self.document.entries.get(key)
        return entry.value if entry else None

    def where(self, key: str) -> str:
        """ "line 12: key", or the key alone."""
        entry = self.document.entries.get(key)
        return f"line {entry.line}: {key}" if entry and entry.line else key

    def set(self, field: str, value: Any, where: str) -> None:
        """A field that follows from several keys."""
        if value is not None:
            self._values[field], self._origin[field] = value, where

    def get(self, field: str) -> Any:
        """A field that was read, or None."""
        return self._values.get(field)

    def assume(self, key: str, text: str) -> None:
        """A note about what the file leaves open."""
        self._notes.append(Note("", key, ASSUMED, text))

    def note(self, key: str, kind: str, text: str) -> None:
        """A note about a key; it counts as read."""
        self._used.add(key)
        self._notes.append(Note(self._line(key), key, kind, text))

    def error(self, key: str, rule: str, legal: Sequence[Any] = ()) -> JobError:
        """A value that cannot be meant, with its line."""
        entry = self.document.entries.get(key)
        value = shown(entry.value) if entry else None
        return JobError(BAD_VALUE, self.document.place(key), value, rule, legal=legal)

    def finish(self, **more: Any) -> ForeignPlan:
        """The plan; keys that nobody read become notes."""
        notes = [*self._notes, *(self._left(key) for key in self.document.entries)]
        return ForeignPlan(
            kind=self.kind,
            version=self.version,
            path=self.document.path,
            origin=self._origin,
            notes=tuple(each for each in notes if each),
            **(self._values | more),
        )

    def _outside(self, key: str, default: Any) -> Any:
        """A variable that a script takes from elsewhere: text may be open, a size may not."""
        if default is None:
            self.note(key, ASSUMED, "is set outside the file")
            return None
        raise self.error(key, "is set outside the file; write its value")

    def _line(self, key: str) -> str:
        entry = self.document.entries.get(key)
        return f"line {entry.line}" if entry and entry.line else ""

    def _left(self, key: str) -> Note | None:
        if key in self._used or self.document.entries[key].value in (None, []):
            return None
        if key.startswith("$"):
            return Note(self._line(key), key, ASSUMED, "further options may come from outside")
        table = _table_of(key, self._not_modelled)
        if table:
            return Note(self._line(key), key, NOT_MODELLED, self._not_modelled[table])
        if _table_of(key, self._known):
            return Note(self._line(key), key, NOT_PRICED, "is no part of the price")
        near = nearest_names(key, self._known)
        told = f"; did you mean {near[0]}?" if near else ""
        rule = f"{self.kind} {self.version} has no such key{told}"
        return Note(self._line(key), key, UNKNOWN, rule)

    def _take(
        self,
        key: str,
        field: str,
        default: Any,
        read: Callable[[Any], Any],
        rule: str,
        legal: Sequence[Any] = (),
    ) -> Any:
        self._used.add(key)
        entry = self.document.entries.get(key)
        if entry is None or entry.value is None:
            if default is not None and field:
                self.set(field, default, f"default of {self.kind} {self.version}: {key}")
            return default
        if isinstance(entry.value, str) and entry.value.startswith("$"):
            return self._outside(key, default)
        value = read(entry.value)
        if value is None:
            raise self.error(key, rule, legal)
        if field:
            self.set(field, value, self.where(key))
        return value


def _table_of(key: str, known: Any) -> str:
    """The key, or the innermost table around it, that is among the known ones."""
    parts = key.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if name in known:
            return name
    return ""


def _as_number(value: Any) -> float | int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            value = float(value) if len(value) < 64 else None
        except ValueError:
            return None
    if not isinstance(value, int | float) or not abs(value) <= _MOST:
        return None
    return value


def _as_bool(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    return {"true": True, "yes": True, "1": True, "on": True, "": True}.get(
        str(value).lower(),
        {"false": False, "no": False, "0": False, "off": False}.get(str(value).lower()),
    )
