"""Which part of a conversation's text an assistant says, found with any stock template.

Templates do not tell. Three ways, the first that applies:

blocks      The template has `{% generation %}` blocks: they are what is said.
prefixes    The turns up to and with an assistant's render to a prefix of the whole, and so do the
            turns before it with the opening that the model is given (the generation prompt). What
            lies between is what the model has to say.
marker      Some templates write a turn differently when more turns follow (Qwen 3 drops earlier
            reasoning), or open it differently than they prompt for it (Gemma 4 31B). Then the whole
            conversation is rendered once more for each assistant turn, a marker in place of its
            content. Text that changes is what was said; the turn goes on to the special token
            behind it, and begins behind the generation prompt where its opening has that.

Where none of them can be trusted, the row is refused: a wrong mask is silent, an error is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from phalanx.data.chat import CLOSING, OPENING, ChatTemplate
from phalanx.data.rows import Example, Message
from phalanx.errors import JobError

_MARKER = "\U000f1a03marker\U000f1a03"
_ENDLESS = "the chat template does not end an assistant turn in a special token"


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: the whole.
        learnt: (start, end) in characters of each learnt turn: what the model has to say, the
            token that ends the turn included, white space after it excluded.
        cuts: where a user's turn begins behind an assistant's, in characters.
    """

    text: str
    learnt: tuple[tuple[int, int], ...]
    cuts: tuple[int, ...]


@dataclass(frozen=True)
class _Turn:
    """Where an assistant turn lies: what is said, and where white space behind it ends."""

    start: int
    end: int
    next: int


def mark_turns(template: ChatTemplate, example: Example, special: Sequence[str]) -> Rendered:
    """The text of a conversation with its assistant turns marked.

    Args:
        special: texts of the tokenizer's special tokens, one of which ends a turn.

    Raises:
        JobError: `data/row` when the template refuses the conversation, leaves out what a turn
            holds, or writes it so that no part of it can be attributed to a turn.
    """
    text = _render(template, example, example.messages)
    _require_tools_shown(template, example)
    if template.has_generation_blocks:
        text, turns = _by_blocks(template, example)
    else:
        found = _by_prefixes(template, example, text)
        turns = _by_marker(template, example, text, special) if found is None else found
    at_turn = dict(zip(_assistants(example), turns))
    learnt = [(t.start, t.end) for at, t in at_turn.items() if example.messages[at].learnt]
    ends = _Ends.of(tuple(special))
    if not all(ends.are_at(text, end) for _, end in learnt):
        raise _refusal(example, _ENDLESS)
    cuts = [
        turn.next
        for at, turn in at_turn.items()
        if at + 1 < len(example.messages) and example.messages[at + 1].role == "user"
    ]
    return Rendered(text, tuple(learnt), tuple(cuts))


@dataclass(frozen=True)
class _Ends:
    """The tokens that may end a turn; some tokenizers have thousands of special ones."""

    texts: frozenset[str]
    lengths: tuple[int, ...]
    pattern: re.Pattern[str]

    @staticmethod
    @lru_cache(maxsize=4)
    def of(texts: tuple[str, ...]) -> _Ends:
        """Those with these texts."""
        by_length = sorted(filter(None, texts), key=len, reverse=True)
        lengths = tuple({len(text) for text in by_length})
        pattern = "|".join(map(re.escape, by_length)) or "(?!)"
        return _Ends(frozenset(by_length), lengths, re.compile(pattern))

    def are_at(self, text: str, end: int) -> bool:
        """Whether one of them ends there."""
        return any(text[max(0, end - length) : end] in self.texts for length in self.lengths)


def _assistants(example: Example) -> list[int]:
    return [at for at, message in enumerate(example.messages) if message.role == "assistant"]


def _render(
    template: ChatTemplate, example: Example, messages: Sequence[Message], **options: bool
) -> str:
    return template.render(messages, where=example.where, tools=example.tools, **options)


def _tried(
    template: ChatTemplate, example: Example, messages: Sequence[Message], **options: bool
) -> str | None:
    """The text of a part of a conversation; None where the template does not write it alone."""
    try:
        return _render(template, example, messages, **options)
    except JobError:
        return None


def _refusal(example: Example, rule: str) -> JobError:
    return JobError("data/row", example.where, f"{len(example.messages)} turns", rule)


def _by_blocks(template: ChatTemplate, example: Example) -> tuple[str, list[_Turn]]:
    if any(mark in m.content + m.extra for m in example.messages for mark in (OPENING, CLOSING)):
        raise _refusal(example, f"holds the private character {OPENING!r} or {CLOSING!r}")
    marked = _render(template, example, example.messages, keep_marks=True)
    spans: list[tuple[int, int]] = []
    removed = 0
    for block in re.finditer(f"{OPENING}(.*?){CLOSING}", marked, re.DOTALL):
        start = block.start() - removed
        removed += len(OPENING) + len(CLOSING)
        spans.append((start, block.end() - removed))
    text = marked.replace(OPENING, "").replace(CLOSING, "")
    turns: list[_Turn] = []
    for start, end in spans:
        if turns and not text[turns[-1].next : start].strip():  # two blocks for one turn
            start = turns.pop().start
        turns.append(_Turn(start, start + len(text[start:end].rstrip()), end))
    if len(turns) != len(_assistants(example)):
        rule = "the chat template has not one generation block for each assistant turn"
        raise _refusal(example, rule)
    return text, turns


def _by_prefixes(template: ChatTemplate, example: Example, text: str) -> list[_Turn] | None:
    messages, turns = example.messages, []
    for at in _assistants(example):
        opening = _tried(template, example, messages[:at], add_generation_prompt=True)
        is_last = at + 1 == len(messages)
        upto = text if is_last else _tried(template, example, messages[: at + 1])
        if opening is None or upto is None:
            return None
        if not (text.startswith(upto) and upto.startswith(opening)):
            return None
        end = len(opening) + len(upto[len(opening) :].rstrip())
        turns.append(_Turn(len(opening), end, len(upto)))
    return turns


def _by_marker(
    template: ChatTemplate, example: Example, text: str, special: Sequence[str]
) -> list[_Turn]:
    turns: list[_Turn] = []
    pattern = _Ends.of(tuple(special)).pattern
    for at in _assistants(example):
        before = turns[-1].next if turns else 0
        start, end = _said(template, example, text, at)
        if start < before:
            raise _refusal(example, "the chat template changes earlier turns with a later one")
        closing = pattern.search(text, end)
        if closing is None or text[end : closing.start()].strip():
            raise _refusal(example, _ENDLESS)
        start = before + _after_opening(template, example, text[before:start], at)
        behind = text[closing.end() :]
        following = closing.end() + len(behind) - len(behind.lstrip())
        turns.append(_Turn(start, closing.end(), following))
    return turns


def _said(template: ChatTemplate, example: Example, text: str, at: int) -> tuple[int, int]:
    """Characters of `text` that change when this turn says something else."""
    marked = [*example.messages]
    marked[at] = Message("assistant", _MARKER)
    other = _tried(template, example, marked)
    if other is None or other.count(_MARKER) != 1:
        rule = "the chat template does not show which part of the text is assistant turn"
        raise _refusal(example, f"{rule} {at}")
    start = _num_common(text, other)
    tail = _num_common(text[start:][::-1], other[start:][::-1])
    changed = other[start : len(other) - tail]
    if not changed.endswith(_MARKER):
        raise _refusal(example, f"the chat template rewrites more than turn {at} with its content")
    return start, len(text) - tail


def _after_opening(template: ChatTemplate, example: Example, header: str, at: int) -> int:
    """Where, in the text before a turn's content, the model begins to speak.

    That is behind the generation prompt, which may be only the first part of the opening (Qwen 3's
    last turn goes on with an empty <think>). Where the two differ, it is the content alone.
    """
    upto = example.messages[:at]
    plain = _tried(template, example, upto)
    asked = None
    if plain is not None:
        asked = _tried(template, example, upto, add_generation_prompt=True)
    if plain is None or asked is None or not asked.startswith(plain):
        return len(header)
    prompt = asked[len(plain) :]
    if not prompt:  # nothing opens a turn: white space before the content is said as well
        return len(header.rstrip())
    place = header.rfind(prompt)
    return place + len(prompt) if place >= 0 else len(header)


def _num_common(one: str, two: str) -> int:
    """Characters that two texts begin with alike."""
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == two[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _require_tools_shown(template: ChatTemplate, example: Example) -> None:
    """A template that knows nothing of tools leaves calls and answers out without a word.

    So each is given another name, which must turn up in the text.
    """
    messages, tools, told = [*example.messages], example.tools, {}
    for at, message in enumerate(messages):
        role, extra = message.role, message.extra
        if role == "tool":
            name = f"{_MARKER}{at}"
            messages[at] = Message(role, name, extra)
            told[name] = f"what turn {at} (tool) holds"
        for index, call in enumerate(message.to_dict().get("tool_calls", ()) if extra else ()):
            name = f"{_MARKER}{at}-{index}"
            told[name] = f"a call of turn {at}"
            extra = _renamed(extra, call.get("function", call)["name"], name)
            messages[at] = Message(role, message.content, extra)
    for index, tool in enumerate(json.loads(tools) if tools else ()):
        name, given = f"{_MARKER}tool-{index}", tool.get("function", tool)
        told[name] = "the definitions of tools"
        tools = _renamed(tools, given.get("name") if isinstance(given, dict) else None, name)
    if not told:
        return
    text = template.render(messages, where=example.where, tools=tools)
    for name, what in told.items():
        if name not in text and json.dumps(name)[1:-1] not in text:
            raise _refusal(example, f"the chat template leaves out {what}")


def _renamed(text: str, old: object, new: str) -> str:
    """The first function of that name in some JSON, with another name."""
    return text.replace(f'"name": {json.dumps(old, ensure_ascii=False)}', f'"name": "{new}"', 1)
