"""Tokenised rows in flat arrays, and the account of what became of every token.

Legend: T tokens of all samples one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sample:
    """One document: token ids, and which of them the model has to predict (never the first)."""

    tokens: np.ndarray
    counted: np.ndarray
    key: int


@dataclass(frozen=True)
class Samples:
    """Many documents.

    Attributes:
        tokens_T: int32 ids.
        counted_T: whether a token is a target of the loss.
        bounds: num_samples + 1 offsets into T.
        keys: 64-bit identity of each sample's content.
    """

    tokens_T: np.ndarray
    counted_T: np.ndarray
    bounds: np.ndarray
    keys: np.ndarray

    @staticmethod
    def of(samples: Sequence[Sample]) -> Samples:
        """The flat form."""
        lengths = [len(each.tokens) for each in samples]
        return Samples(
            _joined([each.tokens for each in samples], np.int32),
            _joined([each.counted for each in samples], np.bool_),
            np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
            np.asarray([each.key for each in samples], dtype=np.uint64),
        )

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Sample:
        start, end = self.bounds[index], self.bounds[index + 1]
        return Sample(self.tokens_T[start:end], self.counted_T[start:end], int(self.keys[index]))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample."""
        return np.diff(self.bounds)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""
        return len(self.tokens_T)

    @property
    def num_counted(self) -> int:
        """Targets of the loss in all samples."""
        return int(self.counted_T.sum())

    def counted_lengths(self) -> np.ndarray:
        """Targets in each sample."""
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        return np.add.reduceat(self.counted_T, self.bounds[:-1], dtype=np.int64)

    def take(self, indices: Iterable[int]) -> Samples:
        """These samples, in this order."""
        return Samples.of([self[int(index)] for index in indices])


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What became of the rows and of every token: tokens_in = trained + masked + dropped.

    Held-out rows are kept apart; all other figures but `rows_beyond_max` are of the training rows.

    Attributes:
        rows_in, rows_dropped: rows of the source; those of which nothing was kept.
        rows_cut: rows that were split or truncated.
        rows_duplicate: dropped because the same content came before.
        rows_beyond_max: distinct rows that data.max_rows left unread.
        samples: documents kept (a split row makes several); longest_sample: in tokens.
        tokens_in: of all training rows, duplicates too, and of what `tokens_repeated` counts: the
            token that begins a document, put before the later parts of split rows.
        tokens_trained: targets of the loss; tokens_masked: context only.
        rows_held_out, samples_held_out: of the other part, as are tokens_held_out (kept) and
            tokens_held_out_dropped.
    """

    rows_in: int
    rows_dropped: int
    rows_cut: int
    samples: int
    tokens_in: int
    tokens_trained: int
    tokens_masked: int
    tokens_dropped: int
    rows_duplicate: int = 0
    rows_beyond_max: int = 0
    longest_sample: int = 0
    tokens_repeated: int = 0
    rows_held_out: int = 0
    samples_held_out: int = 0
    tokens_held_out: int = 0
    tokens_held_out_dropped: int = 0

    def __post_init__(self) -> None:
        accounted = self.tokens_trained + self.tokens_masked + self.tokens_dropped
        assert accounted == self.tokens_in, self
