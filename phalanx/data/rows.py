"""Rows of a source as examples: conversations in four forms, or plain text.

Nothing is guessed: a turn without content, an unknown role, a picture or a weight that is neither 0
nor 1 is refused with the file and the line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.errors import JobError, shown

ROLES = ("system", "user", "assistant", "tool")
# First come, first served: a row of chat may carry other columns beside its turns.
FORMS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
_CHAT_COLUMNS = ("messages", "conversations", "tools", "prompt", "completion")
COLUMNS = (*_CHAT_COLUMNS, "instruction", "input", "output", "text")
_LEGAL = (
    '{"messages": [{"role", "content"}]}',
    '{"conversations": [{"from", "value"}]}',
    '{"prompt", "completion"}',
    '{"instruction", "input", "output"}',
    '{"text"}',
)
_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
} | {role: role for role in ROLES}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: one of `ROLES`.
        content: its text; "" only where `extra` holds tool calls.
        extra: what else the template may read (tool_calls, name, reasoning_content ...), as JSON.
        learnt: whether an assistant turn is learnt ("weight": 0 says no).
    """

    role: str
    content: str
    extra: str = ""
    learnt: bool = True

    def to_dict(self) -> dict[str, Any]:
        """As chat templates read it."""
        more = json.loads(self.extra) if self.extra else {}
        return {"role": self.role, "content": self.content} | more


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a source.

    Attributes:
        messages: a conversation; only assistant turns are learnt.
        text: plain text instead (every token is learnt).
        where: file and line, or qualified name, for errors.
        tools: definitions of functions that the conversation may call, as JSON.
    """

    messages: tuple[Message, ...] = ()
    text: str = ""
    where: str = ""
    tools: str = ""

    @property
    def key(self) -> int:
        """64 bits of the content's hash: the identity of a row, wherever it stands."""
        parts = [self.text, *(part for m in self.messages for part in (m.role, m.content))]
        parts += [f"{at}:{m.extra}" for at, m in enumerate(self.messages) if m.extra]
        parts += [f"{at}:masked" for at, m in enumerate(self.messages) if not m.learnt]
        parts += [self.tools] if self.tools else []
        digest = hashlib.blake2b("\x00".join(parts).encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "little")


def examples_of(rows: Iterable[tuple[Any, str]]) -> Iterator[Example]:
    """Rows of one file, each with its place, as examples.

    Raises:
        JobError: `data/row` for a row that cannot be used, or one of another form than the first.
    """
    first_form = first_where = ""
    for row, where in rows:
        form = form_of(row, where)
        first_form, first_where = first_form or form, first_where or where
        if form != first_form:
            rule = f"is a row of another form than {first_where} (with {first_form!r})"
            hint = "keep one form in a file, or drop the other columns"
            raise JobError("data/row", where, f"row with {form!r}", f"{rule}; {hint}")
        yield example_of(row, form, where)


def form_of(row: Any, where: str) -> str:
    """The form of a row: a key of `FORMS`."""
    if isinstance(row, Mapping):
        for form, needed in FORMS.items():
            if all(row.get(name) is not None for name in needed):
                return form
    found = sorted(map(str, row)) if isinstance(row, Mapping) else row
    raise JobError("data/row", where, shown(found), "is a row of no known form", legal=_LEGAL)


def example_of(row: Mapping[str, Any], form: str, where: str) -> Example:
    """A row of this form."""
    if form == "text":
        return Example((), _text(row["text"], f"{where}: text", may_be_empty=True), where)
    if form in ("messages", "conversations"):
        return Example(_turns(row[form], form, where), "", where, _tools(row.get("tools"), where))
    question, answer = FORMS[form]
    asked = _text(row[question], f"{where}: {question}")
    if form == "instruction" and row.get("input"):
        asked = f"{asked}\n\n{_text(row['input'], f'{where}: input')}"
    turns = (
        Message("user", asked),
        Message("assistant", _text(row[answer], f"{where}: {answer}")),
    )
    return Example(turns, "", where)


def _turns(turns: Any, form: str, where: str) -> tuple[Message, ...]:
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        rule = "must be a list with a turn or more"
        raise JobError("data/row", f"{where}: {form}", shown(turns), rule)
    return tuple(_turn(turn, f"{where}: {form}[{index}]") for index, turn in enumerate(turns))


def _turn(turn: Any, at: str) -> Message:
    if not isinstance(turn, Mapping):
        raise JobError("data/row", at, shown(turn), "must be a turn with a role and content")
    given = {name: value for name, value in turn.items() if value is not None}
    keys = ("from", "value") if "from" in given and "role" not in given else ("role", "content")
    legal = _SHAREGPT if keys[0] == "from" else {role: role for role in ROLES}
    named, content = given.pop(keys[0], None), given.pop(keys[1], None)
    role = legal.get(named) if isinstance(named, str) else None
    if role is None:
        raise JobError("data/row", f"{at}.{keys[0]}", shown(named), "is no role", legal=legal)
    learnt = _weight(given.pop("weight", 1), at)
    calls = given.get("tool_calls")
    if calls:
        given["tool_calls"] = _tool_calls(calls, at)
    elif "tool_calls" in given:
        del given["tool_calls"]
    may_be_empty = bool(calls) and role == "assistant"
    text = "" if content is None and may_be_empty else _content(content, at, may_be_empty)
    return Message(role, text, _json(given, at) if given else "", learnt)


def _content(content: Any, at: str, may_be_empty: bool) -> str:
    """Text, or parts that are all text, joined."""
    if not isinstance(content, list | tuple):
        return _text(content, f"{at}.content", may_be_empty)
    texts = []
    for index, part in enumerate(content):
        place = f"{at}.content[{index}]"
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            texts.append(_text(part, place, True))
        elif kind == "text" and isinstance(part, Mapping):
            texts.append(_text(part.get("text"), f"{place}.text", True))
        else:
            rule = "is no part of text; pictures and sound cannot be trained on"
            raise JobError("data/row", f"{place}.type", shown(kind), rule, legal=("text",))
    return _text("".join(texts), f"{at}.content", may_be_empty)


def _weight(weight: Any, at: str) -> bool:
    if isinstance(weight, bool) or weight not in (0, 1):
        rule = "must be 0 (do not learn this turn) or 1"
        raise JobError("data/row", f"{at}.weight", shown(weight), rule, legal=(0, 1))
    return bool(weight)


def _tool_calls(calls: Any, at: str) -> list[Any]:
    """Calls with their arguments as a table, which templates expect; APIs write them as text."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise JobError("data/row", f"{at}.tool_calls", shown(calls), "must be a list of calls")
    return [_tool_call(call, f"{at}.tool_calls[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, at: str) -> dict[str, Any]:
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise JobError("data/row", at, shown(call), "must name the function that is called")
    inner = dict(inner)
    if isinstance(inner.get("arguments"), str):
        try:
            inner["arguments"] = json.loads(inner["arguments"])
        except (ValueError, RecursionError) as error:
            rule = f"is not valid JSON: {error}"
            raise JobError("data/row", f"{at}.arguments", shown(inner["arguments"]), rule) from None
    return dict(call) | {"function": inner} if "function" in call else inner


def _tools(tools: Any, where: str) -> str:
    if not tools:
        return ""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            rule = f"is not valid JSON: {error}"
            raise JobError("data/row", f"{where}: tools", shown(tools), rule) from None
    if not isinstance(tools, list) or not all(isinstance(each, Mapping) for each in tools):
        rule = "must be a list of function definitions"
        raise JobError("data/row", f"{where}: tools", shown(tools), rule)
    return _json(tools, f"{where}: tools")


def _json(value: Any, at: str) -> str:
    try:
        return _text(json.dumps(value, sort_keys=True, ensure_ascii=False), at)
    except (TypeError, ValueError, RecursionError) as error:  # dates of parquet files, huge numbers
        raise JobError("data/row", at, shown(value), f"is no JSON: {error}") from None


def _text(value: Any, at: str, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise JobError("data/row", at, shown(value), "must be text")
    if not may_be_empty and not value.strip():
        raise JobError("data/row", at, shown(value), "is empty, and so a turn without content")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, as "\ud83d" in JSON
        rule = f"is no text: {error.reason} at character {error.start}"
        raise JobError("data/row", at, shown(value), rule) from None
    return value
