"""The forms that are served: the engine, its paged cache and the job's scheduling policy.

Requests arrive in groups, so that prompts are computed beside tokens of others.

Legend: R rows whose next token is chosen, D model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.drive import drive
from phalanx.engines.parity.observed import ROWS, Collector, Observed, Sequences
from phalanx.engines.parity.subject import Subject
from phalanx.engines.serve.engine import ServeEngine
from phalanx.engines.serve.settings import Request, Sampling, ServeSettings
from phalanx.engines.serve.start import make_engine
from phalanx.engines.serve.step import StepResult
from phalanx.engines.serve.world import Cancel, EngineWorld
from phalanx.errors import PhalanxError
from phalanx.registry import build

ADAPTER = "trained"
_STEP_TOKENS = 512
_MAX_RUNNING = 32
_GROUP = 8  # requests that arrive together, every other step


def generate(
    subject: Subject, prompts: Sequence[Sequence[int]], num_new: int, dtype: str
) -> tuple[Sequences, Observed]:
    """Greedy continuations by what is served, with the kernels that serve, and their logits."""
    engine = _engine(subject, subject.export, prompts, num_new, dtype)
    requests = _requests(prompts, num_new)
    inbox = _Inbox(requests, _WatchedModel(engine.model))
    _drive(subject, engine, inbox)
    sequences = Sequences(prompts, [each.tokens[each.num_prompt :] for each in requests])
    return sequences, inbox.observed(sequences)


def observe_merged(subject: Subject, sequences: Sequences, dtype: str) -> Observed:
    """The engine on the exported folder, given the continuations token by token."""
    engine = _engine(subject, subject.export, sequences.prompts, sequences.num_new, dtype)
    return _replayed(subject, engine, sequences, "")


def observe_live(subject: Subject, sequences: Sequences, dtype: str) -> Observed:
    """The engine on the base with the adapter in a slot, likewise."""
    assert subject.lora is not None
    engine = _engine(
        subject,
        subject.base,
        sequences.prompts,
        sequences.num_new,
        dtype,
        adapters={ADAPTER: str(subject.adapter)},
        max_adapters=1,
        max_lora_rank=subject.lora.rank,
    )
    return _replayed(subject, engine, sequences, ADAPTER)


def _engine(
    subject: Subject,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    num_new: int,
    dtype: str,
    **more: Any,
) -> ServeEngine:
    settings = ServeSettings(
        folder=str(folder),
        scheduler=subject.scheduler,
        dtype=dtype,
        max_running=_MAX_RUNNING,
        max_step_tokens=_STEP_TOKENS,
        max_tokens=max(map(len, prompts)) + num_new,
        **more,
    )
    return make_engine(settings)


def _requests(prompts: Sequence[Sequence[int]], num_new: int, adapter: str = "") -> list[Request]:
    sampling = Sampling(max_new=num_new, ignore_eos=True)
    return [
        Request(at, list(prompt), len(prompt), sampling, adapter)
        for at, prompt in enumerate(prompts)
    ]


def _replayed(
    subject: Subject, engine: ServeEngine, sequences: Sequences, adapter: str
) -> Observed:
    requests = _requests(sequences.prompts, sequences.num_new, adapter)
    inbox = _Replay(requests, _ReplayedModel(engine.model), sequences)
    _drive(subject, engine, inbox)
    return inbox.observed(sequences)


def _drive(subject: Subject, engine: ServeEngine, inbox: _Inbox) -> None:
    engine.model = inbox.watched  # type: ignore[assignment]
    drive(EngineWorld(engine, inbox), reacts=[build("serve", subject.scheduler, "plan.serve")])


class _WatchedModel:
    """A packed decoder that remembers the hidden states which tokens were last chosen from."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.chosen_from: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def greedy(self, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
        """As the model's."""
        self.chosen_from = hidden_RD
        return self.model.greedy(hidden_RD)


class _ReplayedModel(_WatchedModel):
    """The same where tokens are given: the head, half of the work, is left for later."""

    def greedy(self, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
        """Any token."""
        self.chosen_from = hidden_RD
        nothing_R = hidden_RD.new_zeros(len(hidden_RD))
        return nothing_R.long(), nothing_R.float()


class _Inbox:
    """Requests that arrive in groups, and what their tokens were chosen from.

    Args:
        requests: with ids from 0 on, all of the same `max_new`.
        watched: the model of the engine that serves them.
    """

    def __init__(self, requests: Sequence[Request], watched: _WatchedModel) -> None:
        self.watched = watched
        self._requests = requests
        self._num_arrived = self._num_calls = self._num_ended = 0
        self._places: list[int] = []
        self._choices: list[int] = []
        self._chosen_from: list[Tensor] = []

    def receive(self, wait: bool) -> list[Request | Cancel] | None:
        """A group every other step; None when all requests have ended."""
        if self._num_ended == len(self._requests):
            return None
        self._num_calls += 1
        if not wait and self._num_calls % 2:
            return []
        first, self._num_arrived = self._num_arrived, self._num_arrived + _GROUP
        return list(self._requests[first : self._num_arrived])

    def deliver(self, result: StepResult) -> None:
        """Note positions and choices of a step, and the rows behind them."""
        if not result.outputs:
            return
        rows = self.watched.chosen_from
        assert rows is not None and len(rows) == len(result.outputs)
        self._chosen_from.append(rows.clone())
        for each in result.outputs:
            request = self._requests[each.request]
            self._places.append(each.request * request.sampling.max_new + request.num_new - 1)
            self._choices.append(each.token)
            self._num_ended += bool(each.reason)

    def refuse(self, request: int, error: PhalanxError) -> None:
        """All requests can be served: an error is one of the engine."""
        raise error

    def observed(self, sequences: Sequences) -> Observed:
        """Logits of all positions, once all requests have ended; choices are the engine's."""
        return self._observed(sequences, self._choices)

    def _observed(self, sequences: Sequences, choices: Sequence[int]) -> Observed:
        model = self.watched.model
        dtype = torch.promote_types(model.dtype, torch.float32)
        collector = Collector(sequences, model.config.vocab_size, dtype)
        hidden_PD = torch.cat(self._chosen_from)
        for first in range(0, len(hidden_PD), ROWS):
            part = slice(first, first + ROWS)
            collector.add(self._places[part], model.logits(hidden_PD[part]), choices[part])
        return collector.observed()


class _Replay(_Inbox):
    """Whatever a step chooses, the request goes on with the given token."""

    def __init__(
        self, requests: Sequence[Request], watched: _WatchedModel, sequences: Sequences
    ) -> None:
        super().__init__(requests, watched)
        self._forced = sequences.forced

    def deliver(self, result: StepResult) -> None:
        """As usual; then put the given tokens in place."""
        super().deliver(result)
        for each in result.outputs:
            request = self._requests[each.request]
            request.tokens[-1] = self._forced[each.request][request.num_new - 1]

    def observed(self, sequences: Sequences) -> Observed:
        """Choices are the best of the logits."""
        return self._observed(sequences, ())
