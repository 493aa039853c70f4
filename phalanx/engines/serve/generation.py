"""The choices of a request: from the engine's tokens to text, with stop strings and scores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from phalanx.engines.serve.client import Delta, EngineClient
from phalanx.engines.serve.parameters import wrong
from phalanx.engines.serve.protocol import Asked
from phalanx.engines.serve.settings import TokenScore
from phalanx.engines.serve.text import StopFinder, TextStream, Tokeniser
from phalanx.errors import PhalanxError

_IMPOSSIBLE = -9999.0


@dataclass(slots=True)
class Piece:
    """A part of a choice: text and tokens of it, and the reason when it is the last.

    Attributes:
        lengths: characters that each token adds to the text, before any stop string is cut off.
        weight_versions: of the weights that made each output token.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    scores: list[TokenScore | None] = field(default_factory=list)
    reason: str = ""
    weight_versions: list[str] = field(default_factory=list)

    @property
    def weight_version(self) -> str:
        """Of the last token ("" when there is none)."""
        return self.weight_versions[-1] if self.weight_versions else ""


class Choice:
    """One choice of one request.

    Args:
        index: its place in the answer.
        asked: the request.
        prompt: token ids.
        adapter: that computes it ("": none).

    Attributes:
        num_output: output tokens so far.
        prompt_scores: of the prompt's tokens from the second on, where asked for.
    """

    def __init__(
        self,
        index: int,
        asked: Asked,
        prompt: Sequence[int],
        client: EngineClient,
        tokeniser: Tokeniser,
        adapter: str,
    ) -> None:
        self.index, self.prompt, self.num_output = index, list(prompt), 0
        self.prompt_scores: Sequence[TokenScore] = ()
        self._asked, self._tokeniser = asked, tokeniser
        sampling = asked.sampling_of(index, max_new_of(asked, prompt, client))
        self._stream = client.submit(self.prompt, sampling, adapter)
        self._text = TextStream(tokeniser, self.prompt, skip_special=asked.skip_special)
        self._stops = StopFinder(asked.stops, keep=asked.include_stop)

    def close(self) -> None:
        """Cancel it unless it has ended."""
        self._stream.close("stop" if self._stops.found else "cancelled")

    async def pieces(self) -> AsyncIterator[Piece]:
        """The parts, one per output token; the prompt first when it is to be echoed."""
        try:
            async for delta in self._stream:
                if not self.num_output:
                    self.prompt_scores = [_finite(each) for each in delta.prompt_scores or ()]
                    if self._asked.echo:
                        yield self._prompt_piece()
                self.num_output += 1
                piece = self._piece(delta)
                if self._asked.max_new != 0:
                    yield piece
                elif piece.reason:
                    self.num_output = 0
                    yield Piece(reason="length", weight_versions=piece.weight_versions)
                if piece.reason:
                    return
        finally:
            self.close()

    def _prompt_piece(self) -> Piece:
        scores: list[TokenScore | None] = [None] * len(self.prompt)
        scores[1 : 1 + len(self.prompt_scores)] = self.prompt_scores
        stream = TextStream(self._tokeniser, skip_special=self._asked.skip_special)
        texts = [stream.push(token) for token in self.prompt]
        texts[-1] += stream.flush()
        return Piece("".join(texts), list(self.prompt), list(map(len, texts)), scores)

    def _piece(self, delta: Delta) -> Piece:
        is_end = delta.reason == "stop" and not self._asked.include_stop
        raw = "" if is_end else self._text.push(delta.token)
        raw += self._text.flush() if delta.reason else ""
        # before `min_new` tokens a stop string is text like any other
        is_free = self.num_output <= self._asked.sampling.min_new
        text = raw if is_free else self._stops.push(raw)
        reason = "stop" if self._stops.found else delta.reason
        text += self._stops.flush() if delta.reason else ""
        scores = [None if delta.score is None else _finite(delta.score)]
        versions = [delta.weight_version]
        return Piece(text, [delta.token], [len(raw)], scores, reason, versions)


class Generation:
    """All choices of a request, or none of them.

    Args:
        asked: the request.
        prompts: its prompts as token ids.
        adapter: that computes it ("": none).

    Raises:
        JobError: `serve/request` for a prompt that cannot be served.
        WorldError: `serve/busy`, `serve/engine`, `serve/asleep`.
    """

    def __init__(
        self,
        asked: Asked,
        prompts: Sequence[Sequence[int]],
        client: EngineClient,
        tokeniser: Tokeniser,
        adapter: str = "",
    ) -> None:
        self.asked, self.tokeniser = asked, tokeniser
        self.choices: list[Choice] = []
        most, number = client.settings.max_running + client.settings.max_queued, len(prompts)
        if number * asked.num_each > most:  # no time will mend it
            rule = f"this server takes at most {most} requests at once"
            raise wrong("prompts times n", number * asked.num_each, rule, [most])
        client.require_room(number * asked.num_each)
        for prompt in prompts:
            client.require_length(len(prompt), max_new_of(asked, prompt, client))
        try:
            for prompt in prompts:
                for _ in range(asked.num_each):
                    index = len(self.choices)
                    self.choices.append(Choice(index, asked, prompt, client, tokeniser, adapter))
        except PhalanxError:
            self.close()
            raise

    def close(self) -> None:
        """Cancel what has not ended."""
        for choice in self.choices:
            choice.close()

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt once, however many choices it has."""
        return sum(len(choice.prompt) for choice in self.choices[:: self.asked.num_each])

    @property
    def num_output_tokens(self) -> int:
        """Of all choices, so far."""
        return sum(choice.num_output for choice in self.choices)

    async def whole(self) -> list[Piece]:
        """Every choice as one piece, once all have ended."""

        async def joined(choice: Choice) -> Piece:
            return join([piece async for piece in choice.pieces()])

        tasks = [asyncio.create_task(joined(choice)) for choice in self.choices]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            self.close()

    async def parts(self) -> AsyncIterator[tuple[Choice, Piece]]:
        """The pieces of all choices as they come.

        Raises:
            PhalanxError: what ended a choice before its time; it ends the others.
        """
        queue: asyncio.Queue[tuple[Choice, Piece | Exception | None]] = asyncio.Queue()

        async def feed(choice: Choice) -> None:
            try:
                async for piece in choice.pieces():
                    queue.put_nowait((choice, piece))
                queue.put_nowait((choice, None))
            except Exception as error:  # raised again where the queue is read
                queue.put_nowait((choice, error))

        tasks = [asyncio.create_task(feed(choice)) for choice in self.choices]
        try:
            num_open = len(tasks)
            while num_open:
                choice, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield choice, item
        finally:
            for task in tasks:
                task.cancel()
            self.close()


def max_new_of(asked: Asked, prompt: Sequence[int], client: EngineClient) -> int:
    """Output tokens at most: as asked for, or as many as the context has room for."""
    if asked.max_new is None:
        return max(1, client.settings.max_tokens - len(prompt))
    return max(1, asked.max_new)


def _finite(score: TokenScore) -> TokenScore:
    """JSON has no infinity: what cannot come gets the interface's smallest number."""
    own, tokens, best = score
    return max(own, _IMPOSSIBLE), tokens, [max(each, _IMPOSSIBLE) for each in best]


def join(pieces: Sequence[Piece]) -> Piece:
    """All parts of a choice as one."""
    whole = Piece()
    for piece in pieces:
        whole.text += piece.text
        whole.tokens += piece.tokens
        whole.lengths += piece.lengths
        whole.scores += piece.scores
        whole.reason = whole.reason or piece.reason
        whole.weight_versions += piece.weight_versions
    return whole
