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
    inbox = _Inbox(requests, watched := _WatchedModel(engine.model))
    _drive(subject, engine, watched, inbox)
    sequences = Sequences(prompts, [each.tokens[each.num_prompt :] for each in requests])
    collector = _collector(sequences, watched)
    hidden_PD = torch.cat(inbox.chosen_from)
    for first in range(0, len(hidden_PD), ROWS):
        part = slice(first, first + ROWS)
        logits_RV = watched.model.logits(hidden_PD[part])
        collector.add(inbox.places[part], logits_RV, inbox.choices[part])
    return sequences, collector.observed()


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
    watched = _ReplayedModel(engine.model)
    inbox = _Replay(requests, watched, sequences)
    _drive(subject, engine, watched, inbox)
    return inbox.collector.observed()


def _drive(subject: Subject, engine: ServeEngine, watched: _WatchedModel, inbox: _Inbox) -> None:
    engine.model = watched  # type: ignore[assignment]
    drive(EngineWorld(engine, inbox), reacts=[build("serve", subject.scheduler, "plan.serve")])


def _collector(sequences: Sequences, watched: _WatchedModel) -> Collector:
    dtype = torch.promote_types(watched.model.dtype, torch.float32)
    return Collector(sequences, watched.model.config.vocab_size, dtype)


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
    """The same with whole logits, which are wanted here; the head is then computed once."""

    def greedy(self, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
        """The best token of each row [R] and its logit [R]."""
        self.chosen_from = self.model.logits(hidden_RD)
        best = self.chosen_from.max(-1)
        return best.indices, best.values.float()


class _Inbox:
    """Requests that arrive in groups.

    Attributes:
        places, choices: position and token of each row that a token was chosen from.
        chosen_from: hidden states of these rows, step by step.
    """

    def __init__(self, requests: Sequence[Request], watched: _WatchedModel) -> None:
        self._requests, self._watched = requests, watched
        self._num_arrived = self._num_calls = self._num_ended = 0
        self.places: list[int] = []
        self.choices: list[int] = []
        self.chosen_from: list[Tensor] = []

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
        """Note what was chosen, and from what."""
        if not result.outputs:
            return
        places = []
        for each in result.outputs:
            request = self._requests[each.request]
            places.append(each.request * request.sampling.max_new + request.num_new - 1)
            self._num_ended += bool(each.reason)
        rows = self._watched.chosen_from
        assert rows is not None and len(rows) == len(places)
        self.note(places, [each.token for each in result.outputs], rows)

    def note(self, places: list[int], choices: list[int], rows: Tensor) -> None:
        """Rows of one step."""
        self.places += places
        self.choices += choices
        self.chosen_from.append(rows.clone())

    def refuse(self, request: int, error: PhalanxError) -> None:
        """All requests can be served: an error is one of the engine."""
        raise error


class _Replay(_Inbox):
    """Whatever a step chooses, the request goes on with the given token."""

    def __init__(
        self, requests: Sequence[Request], watched: _WatchedModel, sequences: Sequences
    ) -> None:
        super().__init__(requests, watched)
        self._tokens = sequences.tokens_P().tolist()
        self.collector = _collector(sequences, watched)

    def note(self, places: list[int], choices: list[int], rows: Tensor) -> None:
        """Keep of the logits what is compared, and put the given tokens in place."""
        self.collector.add(places, rows, choices)
        for place in places:
            request = self._requests[place // self._requests[0].sampling.max_new]
            request.tokens[-1] = self._tokens[place]
