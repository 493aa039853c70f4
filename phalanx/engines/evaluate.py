"""Held-out loss and greedy samples, with the model as it stands in training.

Legend: S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.data.batches import SampleStream, StepBatch, whole_pass
from phalanx.data.samples import Sample, Samples
from phalanx.data.tokenise import TextTokenizer
from phalanx.engines.result import NUM_SAMPLES, SAMPLE_TOKENS
from phalanx.engines.row_loss import hidden_loss, row_inputs
from phalanx.engines.stage_pass import next_tokens, stage_pass
from phalanx.engines.trainer_model import TrainModel
from phalanx.models.cache import KvCache


class HeldOut:
    """The held-out rows of a run: their loss, and answers to the first of them.

    Args:
        samples: may be empty: then there is nothing to evaluate.
        max_rows: evaluate at most so many.
        rows: how rows are packed and dealt, as `data.batches.step_batch` takes it.
    """

    def __init__(
        self,
        samples: Samples,
        model: TrainModel,
        device: torch.device,
        *,
        seed: int,
        max_rows: int,
        rows: Mapping[str, Any],
    ) -> None:
        self.samples, self.model, self.device = samples, model, device
        self.num_rows = min(max_rows, len(samples))
        self._batch: StepBatch | None = None
        self._seed, self._rows = seed, rows

    def __bool__(self) -> bool:
        return self.num_rows > 0

    @property
    def batch(self) -> StepBatch:
        """The rows of one evaluation; made at the first."""
        if self._batch is None:
            stream = SampleStream(self.samples, self._seed)
            self._batch = whole_pass(stream, self.num_rows, **self._rows)
        return self._batch

    def loss(self) -> float:
        """Mean loss over the targets of all ranks' rows, in nats; all ranks call it."""
        return float(held_out_loss(self.model, self.batch, self.device))

    def answers(self, end_tokens: Sequence[int]) -> list[list[int]]:
        """Greedy answers to the first rows that have something to answer; all ranks call it."""
        chats = self._chats()
        # the last target of a conversation ends a turn
        ends = {int(each.tokens[each.counted][-1]) for each in chats}
        return greedy(
            self.model,
            [each.tokens[: each.counted.argmax()].tolist() for each in chats],
            max_new_tokens=SAMPLE_TOKENS,
            end_tokens=[*end_tokens, *ends],
            device=self.device,
        )

    def as_text(
        self, tokenizer_folder: Path, before: list[list[int]], after: list[list[int]]
    ) -> list[dict[str, str]]:
        """Prompts and answers as text. Only now is the tokenizer built: it takes hundreds of
        megabytes."""
        if not before:
            return []
        decode = TextTokenizer(tokenizer_folder).decode
        return [
            {
                "prompt": decode(chat.tokens[: chat.counted.argmax()].tolist()),
                "before": decode(old),
                "after": decode(new),
            }
            for chat, old, new in zip(self._chats(), before, after)
        ]

    def _chats(self) -> list[Sample]:
        samples = (self.samples[at] for at in range(len(self.samples)))
        chats = (each for each in samples if each.counted[1:].argmax() > 0)
        return list(islice(chats, NUM_SAMPLES))


@torch.no_grad()
def held_out_loss(model: TrainModel, batch: StepBatch, device: torch.device) -> Tensor:
    """Mean loss over the targets of all ranks' rows, in nats; all ranks call it."""
    model.decoder.eval()
    total = torch.zeros((), device=device)
    rows, num_counted = batch.micro_batches, batch.num_counted_global

    def add(at: int, hidden_SD: Tensor) -> None:
        total.add_(hidden_loss(model, hidden_SD, rows[at], num_counted, device))

    if model.stages is None:
        for at, row in enumerate(rows):
            tokens_S, keywords = row_inputs(model, row, device)
            add(at, model.decoder(tokens_S, **keywords))
    else:
        stage_pass(model, len(rows), lambda at, _: row_inputs(model, rows[at], device), add)
    model.decoder.train()
    # of ranks that share rows (a tensor group, the stages of a pipeline) one counts
    total *= float(model.counts_loss)
    dist.all_reduce(total)
    return total


@torch.no_grad()
def greedy(
    model: TrainModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_tokens: Sequence[int],
    device: torch.device,
) -> list[list[int]]:
    """The most likely continuation of each prompt, without its end token; all ranks call it.

    Every data rank computes all of them: units are gathered once and then stay, so ranks exchange
    nothing token by token but the hidden states between stages. Prompts go on side by side, so that
    each stage has one to work on.
    """
    made: list[list[int]] = [[] for _ in prompts]
    going = {
        at: _Going(
            torch.tensor(prompt, device=device), _caches(model, len(prompt) + max_new_tokens)
        )
        for at, prompt in enumerate(prompts)
    }
    model.decoder.eval()
    with model.sampling():
        for _ in range(max_new_tokens):
            tokens = _next(model, list(going.values())) if going else []
            for at, token in zip(list(going), tokens):
                if token in end_tokens:
                    del going[at]
                    continue
                made[at].append(token)
                going[at] = going[at]._replace(rows_S=torch.tensor([token], device=device))
    model.decoder.train()
    return made


class _Going(NamedTuple):
    """An answer that is not complete: tokens that its caches, one per stage, do not hold yet."""

    rows_S: Tensor
    caches: dict[int, KvCache]


def _caches(model: TrainModel, capacity: int) -> dict[int, KvCache]:
    stages = [0] if model.stages is None else model.stages.parts
    return {stage: model.cache(capacity) for stage in stages}


def _next(model: TrainModel, going: Sequence[_Going]) -> list[int]:
    """The most likely token behind each."""
    if model.stages is not None:
        return next_tokens(model, [each.rows_S for each in going], [each.caches for each in going])
    hidden = (model.decoder(each.rows_S, caches=[each.caches[0]]) for each in going)
    return [int(model.logits(hidden_SD[-1:]).argmax()) for hidden_SD in hidden]
