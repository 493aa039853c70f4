"""Where rows come from: built-in `python-docs`, or a JSON-lines file of conversations or text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import JobError, nearest_names

ROLES = ("system", "user", "assistant")
BUILT_IN = ("python-docs",)
_FORMS = ('{"messages": [...]}', '{"prompt": ..., "completion": ...}', '{"text": ...}')


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is one of `ROLES`."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a source.

    Attributes:
        messages: a conversation; only assistant turns are learnt.
        text: plain text instead (every token is learnt).
        where: file and line, or qualified name, for errors.
    """

    messages: tuple[Message, ...] = ()
    text: str = ""
    where: str = ""

    @property
    def key(self) -> int:
        """64 bits of the content's hash: the identity of a row, wherever it stands."""
        turns = [self.text, *(part for m in self.messages for part in (m.role, m.content))]
        digest = hashlib.blake2b("\x00".join(turns).encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "little")


def read_examples(source: str) -> list[Example]:
    """All rows of a source, each content once, in the source's order.

    Args:
        source: "python-docs", or the path of a .jsonl file.

    Raises:
        JobError: `job/not-found`, or `data/row` naming the line that cannot be used.
    """
    examples = _built_in() if source == "python-docs" else list(_read_jsonl(Path(source)))
    first_by_key: dict[int, Example] = {}
    for example in examples:
        first_by_key.setdefault(example.key, example)
    return list(first_by_key.values())


def content_hash(source: str) -> str:
    """Hash of what `read_examples` would read, cheap enough to be asked at every start."""
    if source == "python-docs":
        from phalanx.data.python_docs import fingerprint

        return fingerprint()
    return hashlib.sha256(_require_file(Path(source)).read_bytes()).hexdigest()


def _built_in() -> list[Example]:
    from phalanx.data.python_docs import question_answer_pairs

    return [
        Example((Message("user", pair.question), Message("assistant", pair.answer)), "", pair.name)
        for pair in question_answer_pairs()
    ]


def _require_file(path: Path) -> Path:
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path(".")
        near = nearest_names(path.name, [each.name for each in folder.glob("*.jsonl")])
        rule = f"is neither a file nor built-in data ({', '.join(BUILT_IN)})"
        raise JobError("job/not-found", "data.source", path, rule, legal=near or BUILT_IN)
    return path


def _read_jsonl(path: Path) -> Iterator[Example]:
    with _require_file(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                rule = f"is not valid JSON: {error}"
                raise JobError("data/row", where, line.strip()[:60], rule) from error
            yield _example(row, where)


def _example(row: Any, where: str) -> Example:
    if isinstance(row, Mapping):
        if "messages" in row:
            return Example(_messages(row["messages"], where), "", where)
        if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
            turns = (Message("user", row["prompt"]), Message("assistant", row["completion"]))
            return Example(turns, "", where)
        if isinstance(row.get("text"), str) and row["text"]:
            return Example((), row["text"], where)
    keys = sorted(row) if isinstance(row, Mapping) else type(row).__name__
    raise JobError("data/row", where, keys, "is a row of no known form", legal=_FORMS)


def _messages(turns: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise JobError(
            "data/row", f"{where}: messages", turns, "must be a list with a turn or more"
        )
    found = []
    for index, turn in enumerate(turns):
        at = f"{where}: messages[{index}]"
        role = turn.get("role") if isinstance(turn, Mapping) else None
        if role not in ROLES:
            raise JobError("data/row", f"{at}.role", repr(role), "is no role", legal=ROLES)
        if not isinstance(turn.get("content"), str):
            raise JobError("data/row", f"{at}.content", turn.get("content"), "must be text")
        found.append(Message(role, turn["content"]))
    return tuple(found)
