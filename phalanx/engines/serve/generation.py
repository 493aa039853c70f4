"""One choice of a completion: from the engine's tokens to text, with stop strings and scores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.engines.serve.client import Delta, EngineClient
from phalanx.engines.serve.protocol import Completion
from phalanx.engines.serve.settings import TokenScore
from phalanx.engines.serve.text import StopFinder, TextStream, Tokeniser


@dataclass(slots=True)
class Piece:
    """A part of a choice: text and tokens of it, and the reason when it is the last."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenScore | None] = field(default_factory=list)
    reason: str = ""
    weight_version: str = ""


class Choice:
    """One choice of one request.

    Args:
        index: its place in the answer.
        asked: the request.
        prompt: token ids.

    Attributes:
        num_output: output tokens so far.
    """

    def __init__(
        self,
        index: int,
        asked: Completion,
        prompt: Sequence[int],
        client: EngineClient,
        tokeniser: Tokeniser,
    ) -> None:
        self.index, self.prompt, self.num_output = index, list(prompt), 0
        self._asked, self._tokeniser = asked, tokeniser
        self._stream = client.submit(self.prompt, asked.sampling_of(index))
        self._text = TextStream(tokeniser, self.prompt)
        self._stops = StopFinder(asked.stops)
        self._offset = 0

    def close(self) -> None:
        """Cancel it unless it has ended."""
        self._stream.close()

    async def pieces(self) -> AsyncIterator[Piece]:
        """The parts, one per output token; the prompt first when it is to be echoed."""
        try:
            async for delta in self._stream:
                if self._asked.echo and not self.num_output:
                    yield self._prompt_piece(delta)
                self.num_output += 1
                piece = self._piece(delta)
                if self._asked.wants_output:
                    yield piece
                elif piece.reason:
                    self.num_output = 0
                    yield Piece(reason="length", weight_version=delta.weight_version)
                if piece.reason:
                    return
        finally:
            self.close()

    def _prompt_piece(self, delta: Delta) -> Piece:
        scores = [None, *(delta.prompt_scores or [])]
        text = self._tokeniser.decode(self.prompt)
        return Piece(text, list(self.prompt), scores, "", delta.weight_version)

    def _piece(self, delta: Delta) -> Piece:
        text = self._stops.push("" if delta.reason == "stop" else self._text.push(delta.token))
        reason = "stop" if self._stops.found else delta.reason
        if delta.reason and not self._stops.found:
            text += self._stops.push(self._text.flush()) + self._stops.flush()
        return Piece(text, [delta.token], [delta.score], reason, delta.weight_version)

    def to_json(self, piece: Piece) -> dict[str, Any]:
        """The piece as an element of `choices`."""
        table: dict[str, Any] = {
            "index": self.index,
            "text": piece.text,
            "finish_reason": piece.reason or None,
            "logprobs": self._logprobs(piece),
        }
        if self._asked.return_token_ids:
            table["token_ids"] = piece.tokens
        self._offset += len(piece.text)
        return table

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self._asked.sampling.num_logprobs is None:
            return None
        spelt = [self._spell(token) for token in piece.tokens]
        offsets, at = [], self._offset
        for text in spelt:
            offsets.append(at)
            at += len(text)
        num_best = self._asked.sampling.num_logprobs
        return {
            "tokens": spelt,
            "token_logprobs": [None if score is None else score[0] for score in piece.scores],
            "top_logprobs": [self._best(score, num_best) for score in piece.scores],
            "text_offset": offsets,
        }

    def _best(self, score: TokenScore | None, num_best: int) -> dict[str, float] | None:
        if score is None:
            return None
        return {self._spell(t): p for t, p in list(zip(score[1], score[2]))[:num_best]}

    def _spell(self, token: int) -> str:
        return self._tokeniser.decode([token], skip_special=False) or f"token_id:{token}"


def join(pieces: Sequence[Piece]) -> Piece:
    """All parts of a choice as one."""
    whole = Piece()
    for piece in pieces:
        whole.text += piece.text
        whole.tokens += piece.tokens
        whole.scores += piece.scores
        whole.reason = whole.reason or piece.reason
        whole.weight_version = piece.weight_version
    return whole
