"""Text in front of tokens: encoding, decoding piece by piece, stop strings. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from phalanx.errors import JobError

_CONTEXT = 8  # tokens before the output that decide how its first one is spelt
_BROKEN = "\ufffd"  # what an incomplete character decodes to


class Tokeniser:
    """The tokenizer of a model folder; without a tokenizer.json only token ids can be served."""

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else None

    @property
    def has_text(self) -> bool:
        """Whether text can be encoded and decoded."""
        return self._tokenizer is not None

    def encode(self, text: str) -> list[int]:
        """Ids, with the special tokens that the tokenizer adds at the start.

        Raises:
            JobError: `serve/request` without a tokenizer, or for half a surrogate pair.
        """
        if self._tokenizer is None:
            rule = "the model folder has no tokenizer.json; send token ids"
            raise JobError("serve/request", "prompt", None, rule)
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise JobError("serve/request", "prompt", None, "holds half a surrogate pair")
        return self._tokenizer.encode(text).ids

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Text ("" without a tokenizer)."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special)


class TextStream:
    """Decodes tokens as they come; the pieces together are the text of the whole.

    Args:
        context: tokens before the output: they decide whether it starts with a space.
    """

    def __init__(self, tokeniser: Tokeniser, context: Sequence[int] = ()) -> None:
        self._tokeniser = tokeniser
        self._tokens = list(context[-_CONTEXT:])
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
        known = self._tokeniser.decode(self._tokens[self._start : self._end])
        text = self._tokeniser.decode(self._tokens[self._start :])
        if len(text) <= len(known) or (whole_only and text.endswith(_BROKEN)):
            return ""
        self._start, self._end = self._end, len(self._tokens)
        return text[len(known) :]


class StopFinder:
    """Cuts text at the first stop string; holds back what could be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Text that is safe to give away; `found` when a stop string came."""
        self._held += text
        places = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            text, self._held = self._held[: min(places)], ""
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
