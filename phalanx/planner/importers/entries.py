"""Keys, values and lines of a configuration file: YAML, JSON and TOML as one flat list."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from phalanx.errors import JobError
from phalanx.strict import parse_toml

MOST_BYTES = 1 << 18
UNREADABLE, AMBIGUOUS = "foreign/unreadable", "foreign/ambiguous"
BAD_VALUE = "foreign/value"
_MOST_NODES, _DEEPEST, _MOST_BRACKETS, _MERGE = 20_000, 24, 64, "<<"


class Entry(NamedTuple):
    """One key.

    Attributes:
        key: dotted from the top of the file; an option without its dashes.
        value: text, number, boolean, None or a list of these.
        line: counted from 1; 0: unknown.
    """

    key: str
    value: Any
    line: int


class Document(NamedTuple):
    """A file as its keys.

    Attributes:
        path: as errors name it.
        entries: by dotted key; for a list of tables the members are keys "name.0.inner".
    """

    path: str
    entries: Mapping[str, Entry]

    def place(self, key: str) -> str:
        """ "file.yaml:12: key"."""
        entry = self.entries.get(key)
        line = f":{entry.line}" if entry and entry.line else ""
        return f"{self.path}{line}: {key}"

    def has(self, *keys: str) -> bool:
        """Whether some of these keys, or a table of that name, is there."""
        return any(
            key in self.entries or any(each.startswith(f"{key}.") for each in self.entries)
            for key in keys
        )


def unreadable(path: str, line: int, rule: str) -> JobError:
    """What is said of a file that cannot be read."""
    return JobError(UNREADABLE, f"{path}:{line}" if line else path, None, rule)


def yaml_document(text: str, path: str) -> Document | None:
    """A YAML (or JSON) mapping as its keys; None for a document that is no mapping.

    Raises:
        JobError: `foreign/unreadable` with the line.
    """
    _require_shallow(text, path)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            return None
        walk = _YamlWalk(path)
        walk.visit(node, "", 0)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise unreadable(path, mark.line + 1 if mark else 0, f"is not YAML: {problem}") from None
    except RecursionError:
        raise unreadable(path, 0, "is nested too deeply") from None
    return Document(path, walk.entries)


def _require_shallow(text: str, path: str) -> None:
    """Brackets in brackets cost the reader of YAML the square of their depth."""
    depth = 0
    for match in re.finditer(r"[\[{]|[\]}]", text):
        depth = max(0, depth + (1 if match[0] in "[{" else -1))
        if depth > _MOST_BRACKETS:
            line = text.count("\n", 0, match.start()) + 1
            raise unreadable(path, line, "is nested too deeply")


class _YamlWalk:
    """Nodes of a YAML document as entries; ends on documents that refer to themselves."""

    def __init__(self, path: str) -> None:
        self.path, self.entries, self.visits = path, dict[str, Entry](), 0
        self.constructor = yaml.constructor.SafeConstructor()

    def visit(self, node: Any, name: str, depth: int) -> None:
        """Add a node and all below it."""
        line = node.start_mark.line + 1
        self.visits += 1
        if depth > _DEEPEST or self.visits > _MOST_NODES:
            rule = "is nested too deeply, refers to itself or is too large"
            raise unreadable(self.path, line, rule)
        if isinstance(node, yaml.MappingNode):
            self._mapping(node, name, depth)
        elif isinstance(node, yaml.SequenceNode):
            if all(isinstance(each, yaml.ScalarNode) for each in node.value):
                self.entries[name] = Entry(name, [self._scalar(each) for each in node.value], line)
                return
            for at, value in enumerate(node.value):
                self.visit(value, f"{name}.{at}", depth + 1)
        else:
            self.entries[name] = Entry(name, self._scalar(node), line)

    def _mapping(self, node: Any, name: str, depth: int) -> None:
        pairs = [(self._key(key), value) for key, value in node.value]
        for key, value in sorted(pairs, key=lambda pair: pair[0] != _MERGE):  # own keys win
            inner = f"{name}.{key}" if name else key
            self.visit(value, name if key == _MERGE else inner, depth + 1)

    def _key(self, node: Any) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise unreadable(self.path, node.start_mark.line + 1, "has a key that is not text")
        return str(node.value)

    def _scalar(self, node: Any) -> Any:
        """A scalar by YAML's own rules; what its tag cannot hold stays text."""
        try:
            value = self.constructor.construct_object(node)
        except (ValueError, yaml.YAMLError, OverflowError, AttributeError, KeyError, TypeError):
            return str(node.value)
        if isinstance(value, str):
            return _number(value)
        return value if isinstance(value, bool | int | float | None) else str(node.value)


def _number(text: str) -> Any:
    """YAML 1.1 reads 1e-4 as text, every program that takes it as a number."""
    if len(text) < 32 and text[:1] in "0123456789.-+" and "e" in text.lower():
        try:
            return float(text)
        except ValueError:
            return text
    return text


def toml_document(text: str, path: str) -> Document:
    """A TOML document as its keys.

    Raises:
        JobError: `foreign/unreadable` with the line.
    """
    try:
        table = tomllib.loads(text)
    except ValueError as error:
        raise unreadable(path, 0, f"is not TOML: {error}") from None
    except RecursionError:
        raise unreadable(path, 0, "is nested too deeply") from None
    entries: dict[str, Entry] = {}
    lines = _toml_lines(text)
    _flatten(table, "", entries, lines, path, 0)
    return Document(path, entries)


def _flatten(
    value: Any,
    name: str,
    entries: dict[str, Entry],
    lines: Mapping[str, int],
    path: str,
    depth: int,
) -> None:
    if depth > _DEEPEST:
        raise unreadable(path, lines.get(name, 0), "is nested too deeply")
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(inner, f"{name}.{key}" if name else key, entries, lines, path, depth + 1)
    elif isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        for at, inner in enumerate(value):
            _flatten(inner, f"{name}.{at}", entries, lines, path, depth + 1)
    else:
        kept = value if isinstance(value, str | bool | int | float | list) else str(value)
        entries[name] = Entry(name, kept, lines.get(name, 0))


def _toml_lines(text: str) -> dict[str, int]:
    """Dotted key -> line, for keys that stand at the start of one."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if bare.startswith("["):
            table = bare.split("#")[0].strip(" []").replace(" ", "")
        elif "=" in bare and not bare.startswith("#"):
            key = bare.split("=")[0].strip().replace(" ", "").replace('"', "")
            lines.setdefault(f"{table}.{key}" if table else key, number)
    return lines


def is_toml(text: str) -> bool:
    """Whether it can be read as TOML with at least one key."""
    try:
        return bool(parse_toml(text, ""))
    except JobError:
        return False
