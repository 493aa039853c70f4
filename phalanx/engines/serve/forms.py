"""What answers look like: completions, chat, and plain tokens. No torch.

A form turns the pieces of a generation into JSON: `whole` for an answer at once, `part` for the
events of a stream, `last` for its usage.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any, Protocol

from phalanx.engines.serve.generation import Choice, Generation, Piece
from phalanx.engines.serve.protocol import Asked
from phalanx.engines.serve.settings import TokenScore
from phalanx.engines.serve.text import Tokeniser

Json = dict[str, Any]


class Form(Protocol):
    """How one route answers."""

    def whole(self, generation: Generation, pieces: Sequence[Piece]) -> Json:
        """The answer at once."""
        ...

    def part(self, choice: Choice, piece: Piece) -> list[Json]:
        """The events of one piece."""
        ...

    def last(self, generation: Generation) -> Json:
        """The event with the usage."""
        ...


def usage(generation: Generation) -> Json:
    """Token counts of an answer."""
    num_prompt, num_output = generation.num_prompt_tokens, generation.num_output_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }


class _OpenAIForm(ABC):
    """What completions and chat share.

    Args:
        asked: the request.
        tokeniser: spells tokens.
        request_id: becomes part of the answer's id.
        model: name that the client used.
        weight_version: when no token says it.
    """

    prefix = kind = part_kind = ""

    def __init__(
        self, asked: Asked, tokeniser: Tokeniser, request_id: str, model: str, weight_version: str
    ) -> None:
        self._asked, self._tokeniser, self._version = asked, tokeniser, weight_version
        self._head: Json = {
            "id": f"{self.prefix}-{request_id}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, generation: Generation, pieces: Sequence[Piece]) -> Json:
        """See `Form`."""
        table = [
            self._choice(choice, piece) | self._of_prompt(choice)
            for choice, piece in zip(generation.choices, pieces)
        ]
        head = self._headed(self.kind, pieces[-1].weight_version)
        return head | {"choices": table, "usage": usage(generation)}

    def last(self, generation: Generation) -> Json:
        """See `Form`."""
        return self._headed(self.part_kind, "") | {"choices": [], "usage": usage(generation)}

    def _headed(self, kind: str, weight_version: str) -> Json:
        return self._head | {"object": kind, "system_fingerprint": weight_version or self._version}

    def _event(self, piece: Piece, choice: Json) -> Json:
        event = self._headed(self.part_kind, piece.weight_version) | {"choices": [choice]}
        return event | {"usage": None} if self._asked.include_usage else event

    @abstractmethod
    def _choice(self, choice: Choice, piece: Piece) -> Json:
        """The piece as an element of `choices`."""

    def _common(self, choice: Choice, piece: Piece, logprobs: Json | None) -> Json:
        table: Json = {
            "index": choice.index,
            "finish_reason": piece.reason or None,
            "logprobs": logprobs,
        }
        if self._asked.return_token_ids:
            table["token_ids"] = piece.tokens
        return table

    def _of_prompt(self, choice: Choice) -> Json:
        """The prompt's scores, with ids as keys: an addition to the interface, vLLM's."""
        num_best = self._asked.prompt_logprobs
        if num_best is None:
            return {}
        rows: list[Json | None] = [None]
        for token, score in zip(choice.prompt[1:], choice.prompt_scores):
            ranked = _best(score, num_best)
            ranks = {each: rank for rank, (each, _) in enumerate(ranked, 1)}
            row = {each: p for each, p in [(token, score[0]), *ranked]}
            rows.append(
                {
                    str(each): {
                        "logprob": p,
                        "rank": ranks.get(each),
                        "decoded_token": self._tokeniser.spell(each),
                    }
                    for each, p in row.items()
                }
            )
        return {"prompt_logprobs": rows}


class CompletionForm(_OpenAIForm):
    """`/v1/completions`."""

    prefix, kind, part_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._offsets: dict[int, int] = {}  # characters of each choice that have been told

    def part(self, choice: Choice, piece: Piece) -> list[Json]:
        """See `Form`."""
        return [self._event(piece, self._choice(choice, piece))]

    def _choice(self, choice: Choice, piece: Piece) -> Json:
        logprobs = self._logprobs(choice, piece)
        return {"text": piece.text} | self._common(choice, piece, logprobs)

    def _logprobs(self, choice: Choice, piece: Piece) -> Json | None:
        num_best = self._asked.sampling.num_logprobs
        if num_best is None:
            return None
        start = self._offsets.get(choice.index, 0)
        *offsets, end = accumulate(piece.lengths, initial=start)
        self._offsets[choice.index] = end
        return {
            "tokens": [self._tokeniser.spell(token) for token in piece.tokens],
            "token_logprobs": [None if score is None else score[0] for score in piece.scores],
            "top_logprobs": [
                None
                if score is None
                else {self._tokeniser.spell(token): p for token, p in _best(score, num_best)}
                for score in piece.scores
            ],
            "text_offset": offsets,
        }


class ChatForm(_OpenAIForm):
    """`/v1/chat/completions`."""

    prefix, kind, part_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._begun: set[int] = set()

    def part(self, choice: Choice, piece: Piece) -> list[Json]:
        """See `Form`: the role first, then the text, with the last of it the reason."""
        events = []
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            role = {"role": "assistant", "content": ""}
            events.append(self._event(piece, {"delta": role} | self._common(choice, Piece(), None)))
        own = {"delta": {"content": piece.text} if piece.text else {}}
        tail = self._common(choice, piece, self._logprobs(piece))
        return [*events, self._event(piece, own | tail)]

    def _choice(self, choice: Choice, piece: Piece) -> Json:
        message = {"role": "assistant", "content": piece.text}
        return {"message": message} | self._common(choice, piece, self._logprobs(piece))

    def _logprobs(self, piece: Piece) -> Json | None:
        num_best = self._asked.sampling.num_logprobs
        if num_best is None:
            return None
        content = []
        for token, score in zip(piece.tokens, piece.scores):
            if score is None:
                continue
            best = [self._entry(each, p) for each, p in _best(score, num_best)]
            content.append(self._entry(token, score[0]) | {"top_logprobs": best})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        spelt, as_bytes = self._tokeniser.spell(token), self._tokeniser.bytes_of(token)
        return {"token": spelt, "logprob": logprob, "bytes": as_bytes}


class TokenForm:
    """`/generate`: tokens with the weights that made them, nothing else."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def whole(self, generation: Generation, pieces: Sequence[Piece]) -> Json:
        """See `Form`."""
        (choice,), (piece,) = generation.choices, pieces
        table = self._table(piece) | {"usage": usage(generation)}
        if self._asked.prompt_logprobs is not None:
            table["prompt_logprobs"] = [None, *(score[0] for score in choice.prompt_scores)]
        return table

    def part(self, choice: Choice, piece: Piece) -> list[Json]:
        """See `Form`."""
        return [self._table(piece)]

    def last(self, generation: Generation) -> Json:
        """See `Form`."""
        return {"usage": usage(generation)}

    def _table(self, piece: Piece) -> Json:
        runs = [[version, len(list(run))] for version, run in groupby(piece.weight_versions)]
        table: Json = {
            "token_ids": piece.tokens,
            "logprobs": None,
            "weight_version": piece.weight_version,
            "weight_versions": runs,
            "finish_reason": piece.reason or None,
        }
        num_best = self._asked.sampling.num_logprobs
        if num_best is not None:
            table["logprobs"] = [None if each is None else each[0] for each in piece.scores]
            table["top_logprobs"] = [
                None if each is None else [list(pair) for pair in _best(each, num_best)]
                for each in piece.scores
            ]
        return table


def _best(score: TokenScore, num_best: int) -> list[tuple[int, float]]:
    """The most probable tokens; a step scores as many as the neediest request of it asked for."""
    return list(zip(score[1], score[2]))[:num_best]
