"""Text in front of tokens: encoding, decoding piece by piece, stop strings. No torch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from phalanx.errors import JobError

_CONTEXT = 8  # tokens before the output that decide how its first one is spelt
_BROKEN = "\ufffd"  # what an incomplete character decodes to


class Tokeniser:
    """The tokenizer of a model folder; without a tokenizer.json only token ids can be served.

    Raises:
        JobError: `job/syntax` for a tokenizer.json that cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self._tokenizer = _read_tokenizer(Path(folder) / "tokenizer.json")
        self._anchor: list[int] = []
        if self._tokenizer is not None:
            # some drop the space before the first token of a text: spell behind another one
            with contextlib.suppress(Exception):  # one without unknown tokens may know no "a"
                self._anchor = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self.spell = lru_cache(maxsize=1 << 16)(self._spell)

    @property
    def has_text(self) -> bool:
        """Whether text can be encoded and decoded."""
        return self._tokenizer is not None

    def require_text(self, where: str, instead: str) -> None:
        """Raise `serve/request` for a parameter that needs a tokenizer where there is none."""
        if not self.has_text:
            rule = f"needs a tokenizer.json in the model folder; {instead}"
            raise JobError("serve/request", where, None, rule)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids, with the special tokens that the tokenizer adds at the start.

        Raises:
            JobError: `serve/request` without a tokenizer, or for a text that it does not take.
        """
        self.require_text("prompt", "send token ids")
        assert self._tokenizer is not None
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special).ids
        except Exception as error:  # the library raises nothing narrower
            rule = f"the tokenizer does not take it: {error}"
            raise JobError("serve/request", "prompt", None, rule) from error

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Text ("" without a tokenizer)."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special)

    def piece(self, token: int) -> str:
        """The token as its vocabulary writes it."""
        known = None if self._tokenizer is None else self._tokenizer.id_to_token(token)
        return f"token_id:{token}" if known is None else known

    def _spell(self, token: int) -> str:
        """One token as text; "bytes:\\xe2" for a part of a character, "token_id:N" for no text."""
        text = self._text(token)
        if _BROKEN in text:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes_of(token))
        return text or f"token_id:{token}"

    def _text(self, token: int) -> str:
        before = self.decode(self._anchor, skip_special=False)
        both = self.decode([*self._anchor, token], skip_special=False)
        alone = both[len(before) :] if both.startswith(before) else ""
        return alone or self.decode([token], skip_special=False)

    def bytes_of(self, token: int) -> list[int]:
        """The bytes of one token, also where they are only a part of a character."""
        text, piece = self._text(token), self.piece(token)
        if _BROKEN not in text:
            return list((text or piece).encode())
        if found := _BYTE_TOKEN.fullmatch(piece):
            return [int(found[1], 16)]
        known = _byte_alphabet()
        return [known[each] for each in piece if each in known]


def _read_tokenizer(path: Path) -> Tokenizer | None:
    if not path.is_file():
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        rule = f"is no tokenizer: {str(error).splitlines()[0]}"
        raise JobError("job/syntax", str(path), None, rule) from error


_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """How tokenizers that work on bytes write them: printable ones as they are (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): b for at, b in enumerate(others)}


class TextStream:
    """Decodes tokens as they come; the pieces together are the text of the whole.

    Args:
        context: tokens before the output: they decide whether it starts with a space.
        skip_special: whether special tokens are left out.
    """

    def __init__(
        self, tokeniser: Tokeniser, context: Sequence[int] = (), *, skip_special: bool = True
    ) -> None:
        self._tokeniser, self._skip_special = tokeniser, skip_special
        num = min(_CONTEXT, len(context))
        # not from the middle of a character on, which would spoil what follows it
        while num < min(2 * _CONTEXT, len(context)) and _BROKEN in self._decode(context[-num:]):
            num += 1
        self._tokens = list(context[len(context) - num :])
        self._start = 0
        self._end = len(self._tokens)

    def push(self, token: int) -> str:
        """New text, held back while a character is incomplete."""
        self._tokens.append(token)
        return self._read(whole_only=True)

    def flush(self) -> str:
        """What was held back."""
        return self._read(whole_only=False)

    def _read(self, *, whole_only: bool) -> str:
        known = self._decode(self._tokens[self._start : self._end])
        text = self._decode(self._tokens[self._start :])
        if len(text) <= len(known) or (whole_only and text.endswith(_BROKEN)):
            return ""
        self._start, self._end = self._end, len(self._tokens)
        return text[len(known) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokeniser.decode(tokens, skip_special=self._skip_special)


class StopFinder:
    """Cuts text at the stop string that is complete first; holds back what may begin one.

    So the result does not depend on the pieces in which the text comes.

    Args:
        keep: whether the stop string stays at the end of the text.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._keep, self._held = keep, ""
        self.found = False

    def push(self, text: str) -> str:
        """Text that is safe to give away; `found` when a stop string came."""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.found = True
            end, at = min(found)
            text, self._held = self._held[: end if self._keep else at], ""
            return text
        num_held = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        keep = len(self._held) - num_held
        text, self._held = self._held[:keep], self._held[keep:]
        return text

    def flush(self) -> str:
        """What was held back."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
