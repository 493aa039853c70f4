"""What the rows of a batch are like on so many data ranks: of fixed length, or packed documents.

Columns: `row_tokens` of a mean row, `longest_tokens` of the longest one (memory asks for it),
`row_limit`, the longest that packing may make; the others as `TrainingPlans` has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.step_work import DealtStep, deal_steps, row_tokens_for
from phalanx.data.batches import SampleStream, step_samples
from phalanx.data.samples import Samples
from phalanx.layout.placement import divisors

MOST_MICRO_TOKENS = 65_536
_DEALT_STEPS = 8  # of the data, to see what a typical step holds
_DEALT_DOCUMENTS = 2048  # of all of them


class Rows(Protocol):
    """Ways to fill micro-batches."""

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        ...

    @property
    def most_ranks(self) -> int:
        """Data ranks that find a row each in a batch."""
        ...

    @property
    def is_fixed(self) -> bool:
        """Whether every row has the same length."""
        ...

    def options(self, data_ranks: int) -> Mapping[str, Sequence[Any]]:
        """Columns, one entry per way."""
        ...


@dataclass(frozen=True)
class FixedRows:
    """A batch of rows of one length, each a document.

    Attributes:
        seq_tokens: of a row.
        batch_rows: of a step.
        micro_tokens: of a micro-batch, where the job names it (0: open).
    """

    seq_tokens: int
    batch_rows: int
    micro_tokens: int = 0

    is_fixed = True

    @property
    def longest(self) -> int:
        """Tokens of a row."""
        return self.seq_tokens

    @property
    def most_ranks(self) -> int:
        """A row each."""
        return self.batch_rows

    def options(self, data_ranks: int) -> Mapping[str, Sequence[Any]]:
        """Micro-batches of every number of rows that divides a rank's share."""
        of_rank = self.batch_rows // data_ranks
        most = max(1, MOST_MICRO_TOKENS // self.seq_tokens)
        counts = [each for each in divisors(of_rank) if each <= most]
        if self.micro_tokens:
            counts = [each for each in counts if each * self.seq_tokens == self.micro_tokens]
        same = {
            "row_tokens": self.seq_tokens,
            "longest_tokens": self.seq_tokens,
            "document_tokens": self.seq_tokens,
            "counted_frac": 1.0,
            "imbalance": 1.0,
        }
        columns: dict[str, Sequence[Any]] = {name: [it] * len(counts) for name, it in same.items()}
        columns["micro_rows"] = counts
        columns["num_micro"] = [of_rank // each for each in counts]
        columns["row_limit"] = [each * self.seq_tokens for each in counts]
        return columns


@dataclass(frozen=True)
class DealtRows:
    """Documents of a data file, packed and dealt as training does (`data.batches.deal`).

    Attributes:
        batch_tokens: of a step.
        num_steps: of the job; the first few are dealt.
        row_tokens: of the longest row, where the job names it (0: open).
    """

    samples: Samples
    shape: ModelShape
    batch_tokens: int
    num_steps: int
    seed: int = 0
    row_tokens: int = 0

    is_fixed = False

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.samples.lengths.max())

    @cached_property
    def most_ranks(self) -> int:
        """Documents of the first step."""
        return len(step_samples(self.stream, 0, self.batch_tokens))

    @cached_property
    def stream(self) -> SampleStream:
        """The samples in training order."""
        return SampleStream(self.samples, self.seed)

    @cached_property
    def _seen(self) -> dict[int, Mapping[str, Sequence[Any]]]:
        return {}

    @cached_property
    def _targets(self) -> tuple[float, float]:
        """(share of tokens that count, mean length of documents weighted by their tokens)."""
        lengths = self.samples.lengths.astype(float)
        mean_tokens = float((lengths**2).sum() / lengths.sum())
        return self.samples.num_counted / self.samples.num_tokens, mean_tokens

    @cached_property
    def _work(self) -> tuple[np.ndarray, np.ndarray, float]:
        """(lengths that occur, forward FLOPs of a document of each, of a target) without head."""
        lengths = np.unique(self.samples.lengths)
        attention = [self.shape.attention_flops(n, n / 2, n) for n in lengths.tolist()]
        flops = lengths * self.shape.product_flops_per_token + np.array(attention)
        return lengths, flops, self.shape.head_flops_per_token

    def options(self, data_ranks: int) -> Mapping[str, Sequence[Any]]:
        """Rows from the shortest that holds every document, doubled up to a rank's share."""
        if data_ranks not in self._seen:
            share = self.batch_tokens / data_ranks
            limits = row_limits(row_tokens_for(self.longest, 1), share, self.row_tokens)
            ways = [self._dealt(data_ranks, limit) for limit in limits]
            self._seen[data_ranks] = {name: [way[name] for way in ways] for name in ways[0]}
        return self._seen[data_ranks]

    def _dealt(self, data_ranks: int, row_limit: int) -> dict[str, Any]:
        """A part of the ranks and of a step's documents is dealt where there are very many: ranks
        are dealt alike; the heaviest of fewer ranks is a little lighter."""
        fold = next(
            (n for n in divisors(data_ranks) if self.most_ranks <= n * _DEALT_DOCUMENTS),
            data_ranks,
        )
        ranks = data_ranks // fold
        most_steps = _DEALT_DOCUMENTS * fold // self.most_ranks
        steps = deal_steps(
            self.stream,
            self.shape.head_flops_per_token / self.shape.product_flops_per_token,
            num_steps=max(1, min(self.num_steps, _DEALT_STEPS, most_steps)),
            global_batch_tokens=self.batch_tokens // fold,
            row_tokens=row_limit,
            num_ranks=ranks,
        )
        num_micro = float(np.mean([len(step.rows) / ranks for step in steps]))
        tokens = float(np.mean([sum(map(sum, step.rows)) / ranks for step in steps]))
        counted, document_tokens = self._targets
        return {
            "micro_rows": 1,
            "row_tokens": tokens / num_micro,
            "num_micro": num_micro,
            "document_tokens": document_tokens,
            "counted_frac": counted,
            "imbalance": float(np.mean([self._imbalance(step, ranks) for step in steps])),
            "longest_tokens": max(sum(row) for step in steps for row in step.rows),
            "row_limit": row_limit,
        }

    def _imbalance(self, step: DealtStep, ranks: int) -> float:
        """Work of the heaviest rank over the mean."""
        known, flops, of_target = self._work
        sizes = [len(row) for row in step.rows]
        row_of = np.repeat(np.arange(len(sizes)), sizes)
        lengths = np.array([n for row in step.rows for n in row], dtype=known.dtype)
        in_layers = np.bincount(row_of, flops[np.searchsorted(known, lengths)], len(sizes))
        work = in_layers + of_target * np.array(step.counted)
        of_ranks = np.bincount(np.arange(len(sizes)) % ranks, work, ranks)
        return float(of_ranks.max() / of_ranks.mean())


def row_limits(least: int, tokens_of_rank: float, fixed: int = 0) -> list[int]:
    """Row lengths to try: the shortest that holds every document, doubled up to a rank's share.

    Args:
        least: what holds the longest document.
        tokens_of_rank: of a batch.
        fixed: what the job names.
    """
    if fixed:
        return [fixed]
    found = [least]
    while found[-1] < min(tokens_of_rank, MOST_MICRO_TOKENS):
        found.append(2 * found[-1])
    return found
