"""Held-out loss and greedy samples, with the model as it stands in training.

Legend: S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.data.batches import SampleStream, StepBatch, whole_pass
from phalanx.data.samples import Sample, Samples
from phalanx.data.tokenise import TextTokenizer
from phalanx.engines.result import NUM_SAMPLES, SAMPLE_TOKENS
from phalanx.engines.trainer_model import TrainModel
from phalanx.engines.trainer_step import row_loss


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
    for row in batch.micro_batches:
        total += row_loss(model, row, batch.num_counted_global, device)
    model.decoder.train()
    return model.data.sum(total)


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

    Every rank computes all of them: units are gathered once and then stay, so ranks exchange
    nothing token by token.
    """
    model.decoder.eval()
    with model.sampling():
        outputs = [
            _continue(model, list(prompt), max_new_tokens, set(end_tokens), device)
            for prompt in prompts
        ]
    model.decoder.train()
    return outputs


def _continue(
    model: TrainModel, prompt: list[int], max_new_tokens: int, ends: set[int], device: torch.device
) -> list[int]:
    cache = model.cache(len(prompt) + max_new_tokens)
    made: list[int] = []
    rows_S = torch.tensor(prompt, device=device)
    while len(made) < max_new_tokens:
        hidden_SD = model.decoder(rows_S, caches=[cache])
        token = int(model.logits(hidden_SD[-1:]).argmax())
        if token in ends:
            break
        made.append(token)
        rows_S = torch.tensor([token], device=device)
    return made
