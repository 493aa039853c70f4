"""Commands of a shell script with their variables filled in: enough to find a program's options.

Read are assignments, arrays, `${NAME:-default}`, whole-number arithmetic, quotes, comments and
continued lines. Conditions are not decided: every branch is read, the last assignment stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from phalanx.planner.importers.entries import Document, Entry, unreadable

_MOST_WORDS, _MOST_TEXT = 5_000, 1 << 16
OUTSIDE = ("$@", "$*")  # options that the script is started with
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
_NAME = r"(?P<braced>[A-Za-z_]\w*|\d+)(?:\[[@*]\])?(?::?-(?P<other>[^}]*))?"
_REFERENCE = re.compile(
    rf"\$\{{{_NAME}\}}|\$(?P<plain>[A-Za-z_]\w*|\d)|\$\(\((?P<sum>[\w\s$*+/()-]{{1,80}})\)\)"
)
_ASSIGNS, _OPENS = (re.compile(rf"[A-Za-z_]\w*\+?={end}") for end in ("", r"\("))
_PLAIN = re.compile(r"[^\s\\'\"$#(){};|&]+")
_KEYWORDS = {"if", "then", "else", "elif", "do", "fi", "done", "while", "for", "export", "exec"}
_KEYWORDS |= {"time", "nohup", "sudo", "local", "declare", "readonly", "set", "{", "}"}


class Word(NamedTuple):
    """A word of a command.

    Attributes:
        quoted: it stood in quotes that keep it whole.
    """

    text: str
    line: int
    quoted: bool = False


class _Raw(NamedTuple):
    """A word before its variables are filled in; `literal` says that none are."""

    text: str
    line: int
    quoted: bool
    literal: bool


def commands(text: str, path: str) -> list[list[Word]]:
    """Every command of a script, in order, without the assignments.

    Raises:
        JobError: `foreign/unreadable` for a quote or bracket that never closes, with its line.
    """
    return _played(text, path)[0]


def assigned_options(text: str, path: str) -> list[Word]:
    """Words of all variables that hold options: of a file that another script reads.

    Raises:
        JobError: `foreign/unreadable`, as `commands`.
    """
    values = _played(text, path)[1].values()
    held = [[part for word in words for part in _split(word, False)] for words in values]
    return [word for words in held if words and words[0].text.startswith("--") for word in words]


def _played(text: str, path: str) -> tuple[list[list[Word]], dict[str, list[Word]]]:
    """Commands, and what variables hold at the end."""
    values: dict[str, list[Word]] = {}
    found: list[list[Word]] = []
    for statement in _statements(text, path):
        words = list(statement)
        while words and (words[0].text in _KEYWORDS or _assign(words[0], words, values, path)):
            words.pop(0)
        filled = [word for raw in words for word in _fill(raw, values)]
        if sum(map(len, found)) + len(filled) > _MOST_WORDS:
            raise unreadable(path, words[0].line, "is too long to be read")
        if filled:
            found.append(filled)
    return found, values


def options(words: Sequence[Word], path: str, short: dict[str, str] | None = None) -> Document:
    """Options of a command as keys: text, a list of texts, or True where no value follows.

    Args:
        short: one-dash names -> long names.
    """
    entries: dict[str, Entry] = {}
    key, values, line = "", list[str](), 0

    def close() -> None:
        if key:
            value = True if not values else values[0] if len(values) == 1 else list(values)
            entries[key] = Entry(key, value, line)

    for word in words:
        if word.text in OUTSIDE:
            entries[word.text] = Entry(word.text, word.text, word.line)
            continue
        name = _option_name(word, short or {})
        if name is None and word.text.endswith(".py"):  # the program; what follows is its own
            close()
            key, values = "", []
        elif name is None:
            values.append(word.text)
        else:
            close()
            key, has_value, first = name.partition("=")
            values, line = [first] if has_value else [], word.line
    close()
    return Document(path, entries)


def _option_name(word: Word, short: dict[str, str]) -> str | None:
    if word.text.startswith("--") and len(word.text) > 2:
        return word.text[2:]
    name, has_value, value = word.text[1:].partition("=")
    if word.text.startswith("-") and name in short:
        return short[name] + (f"={value}" if has_value else "")
    return None


def _assign(raw: _Raw, words: list[_Raw], values: dict[str, list[Word]], path: str) -> bool:
    """Carry out `NAME=value` or `NAME=( ... )`, whose words follow; whether it was one."""
    match = _ASSIGN.fullmatch(raw.text)
    if not match:
        return False
    name, how, value = match.groups()
    before = values.get(name, []) if how == "+=" else []
    if value == "(":  # up to the word that closes it
        inner: list[Word] = []
        while len(words) > 1 and words[1].text != ")":
            inner += _fill(words.pop(1), values)
        if len(words) > 1:
            words.pop(1)
        values[name] = [*before, *inner]
    elif how == "+=" and before:
        added = _interpolated(value, values)
        values[name] = [*before[:-1], Word(before[-1].text + added, before[-1].line)]
    else:
        filled = value if raw.literal else _interpolated(value, values)
        values[name] = [Word(filled, raw.line)]
    kept = values[name]
    if len(kept) > _MOST_WORDS or sum(len(word.text) for word in kept) > _MOST_TEXT:
        raise unreadable(path, raw.line, f"makes {name} too long to be read")
    return True


def _fill(raw: _Raw, values: dict[str, list[Word]]) -> list[Word]:
    """A word with its variables; an array, or text with spaces outside quotes, is several."""
    if raw.literal:
        return [Word(raw.text, raw.line, True)]
    match = _REFERENCE.fullmatch(raw.text)
    name = (match["braced"] or match["plain"]) if match else None
    if name and name in values:
        found = values[name]
        return [part for each in found for part in _split(each, raw.quoted)]
    text = _interpolated(raw.text, values)
    return _split(Word(text, raw.line), raw.quoted)


def _split(word: Word, quoted: bool) -> list[Word]:
    """At spaces, unless quotes keep it whole; an option and its value in quotes are two words."""
    if (quoted or word.quoted) and not word.text.lstrip().startswith("--"):
        return [word]
    parts = re.finditer(r"\S+", word.text)
    return [
        Word(each[0].strip("'\""), word.line + word.text.count("\n", 0, each.start()))
        for each in parts
    ]


def _interpolated(text: str, values: dict[str, list[Word]]) -> str:
    def value(match: re.Match[str]) -> str:
        if match["sum"] is not None:
            return _arithmetic(match["sum"], values) or match[0]
        name = match["braced"] or match["plain"]
        if name in values:
            return " ".join(each.text for each in values[name])
        return match["other"].strip("'\"") if match["other"] is not None else match[0]

    return _REFERENCE.sub(value, text)


def _arithmetic(text: str, values: dict[str, list[Word]]) -> str:
    """Products and sums of whole numbers and variables, as `$((A * 8))`; "" for more than that."""
    total, term, sign = 0, None, 1
    for token in re.findall(r"\w+|[*+-]", re.sub(r"[$\s]", "", text) + "+"):
        if token in "+-":
            if term is None:
                return ""
            total, term, sign = total + sign * term, None, 1 if token == "+" else -1
        elif token != "*":
            number = token if token.isdigit() else "".join(w.text for w in values.get(token, []))
            if not number.isdecimal() or len(number) > 12 or "/" in text or "(" in text:
                return ""
            term = int(number) * (1 if term is None else term)
    return str(total)


def _statements(text: str, path: str) -> Iterator[list[_Raw]]:
    """Words of each statement; the words of an array stay within theirs."""
    words: list[_Raw] = []
    array_line = 0
    for token in _Lexer(text, path).tokens():
        if token.text == "\n" and not token.quoted:
            if not array_line and words:
                yield words
                words = []
            continue
        words.append(token)
        if len(words) > _MOST_WORDS:
            raise unreadable(path, token.line, "has a command that is too long to be read")
        if not token.quoted and array_line and token.text == ")":
            array_line = 0
        elif not token.quoted and _OPENS.fullmatch(token.text):
            array_line = token.line
    if array_line:
        raise unreadable(path, array_line, "has an array that never closes")
    if words:
        yield words


class _Lexer:
    """Words of a script; a line's end is the word "\\n", brackets of an array are words too."""

    def __init__(self, text: str, path: str) -> None:
        self.text, self.path = text.replace("\r\n", "\n"), path
        self.at, self.line = 0, 1
        self._begin()

    def tokens(self) -> Iterator[_Raw]:
        """All of them, in order."""
        text = self.text
        while self.at < len(text):
            char = text[self.at]
            if text.startswith("\\\n", self.at):
                yield from self._end()
                self._skip(2)
            elif char in "'\"":
                self._quote()
            elif text.startswith(("$(", "${"), self.at):
                self._take(_bracketed(text, self.at + 1))
            elif char == "#" and not self.is_open:
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            elif char == "(" and self._assigns():
                self.parts.append("(")
                yield from self._end()
                self._skip(1)
            elif char.isspace() or char in ";|&)":
                yield from self._end()
                if char in "\n;|&)":
                    yield _Raw(")" if char == ")" else "\n", self.line, False, False)
                self._skip(1)
            elif char == "\\":
                self.at += 1
                self._take(self.at + 1)
            else:
                plain = _PLAIN.match(text, self.at)
                self._take(plain.end() if plain else self.at + 1)
        yield from self._end()

    def _begin(self) -> None:
        self.parts, self.start, self.is_open = list[str](), 0, False
        self.quoted, self.literal = False, False

    def _assigns(self) -> bool:
        """Whether the word so far is `NAME=`, so that a bracket opens an array."""
        last = self.parts[-1] if self.parts else ""
        return last.endswith("=") and bool(_ASSIGNS.fullmatch("".join(self.parts)))

    def _end(self) -> Iterator[_Raw]:
        if self.is_open:
            yield _Raw("".join(self.parts), self.start, self.quoted, self.literal)
        self._begin()

    def _skip(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def _take(self, end: int) -> None:
        """What stands up to there belongs to the word."""
        self.start = self.start or self.line
        self.is_open = True
        self.parts.append(self.text[self.at : end])
        self._skip(end - self.at)

    def _quote(self) -> None:
        quote, end = self.text[self.at], _closing(self.text, self.at)
        if end < 0:
            raise unreadable(self.path, self.line, "has a quote that never closes")
        if not self.is_open:
            self.quoted, self.literal = True, quote == "'"
        self._skip(1)
        self._take(end)
        self.parts[-1] = self.parts[-1].replace("\\\n", "\n")
        self._skip(1)


def _closing(text: str, at: int) -> int:
    """Where the quote that opens at `at` closes; -1: nowhere."""
    quote, at = text[at], at + 1
    while at < len(text):
        if text[at] == "\\" and quote == '"':
            at += 1
        elif text[at] == quote:
            return at
        at += 1
    return -1


def _bracketed(text: str, at: int) -> int:
    """Behind the bracket that closes the one at `at`; the end of the line where none does."""
    closes, depth = {"(": ")", "{": "}"}[text[at]], 0
    for end in range(at, len(text)):
        depth += (text[end] == text[at]) - (text[end] == closes)
        if not depth:
            return end + 1
        if text[end] == "\n" and closes == "}":
            return end
    return len(text)
