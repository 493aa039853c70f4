"""The order of samples, the samples of a step, and the packed rows of a rank.

A global counter numbers the samples of all epochs. A step takes the next samples up to the global
batch, whatever the world looks like; only then are they dealt to ranks and rows. So every sample is
seen exactly once an epoch on any world size, and a run resumes from one number.

Legend: S tokens of a row, N targets of a row.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.data.samples import Samples
from phalanx.errors import JobError

_MANY = 16_384
FILLER_OFFSET = -(1 << 40)  # where no document can lie


@dataclass(frozen=True)
class MicroBatch:
    """One packed row: documents one after another.

    Attributes:
        tokens_S: int64 ids.
        document_starts: first token of each document; positions restart there.
        counted_N: tokens whose successor is a target, i.e. rows of hidden states to score.
        targets_N: the tokens to be predicted there.
        samples: global counters of the documents; () for a filler that only keeps ranks in step.
        offsets: place of each document's first token among all tokens of the step, by counter.
    """

    tokens_S: np.ndarray
    document_starts: tuple[int, ...]
    counted_N: np.ndarray
    targets_N: np.ndarray
    samples: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def positions_S(self) -> np.ndarray:
        """0, 1, ... restarting at each document."""
        return np.arange(len(self.tokens_S)) - self._per_token(self.document_starts)

    @property
    def global_tokens_S(self) -> np.ndarray:
        """Place of each token among all tokens of the step: the same on any world size, and below
        0 for filler."""
        return self.positions_S + self._per_token(self.offsets)

    def extended(self, multiple: int) -> MicroBatch:
        """The row with a document of filler behind it, to a whole multiple of tokens.

        Nothing is learnt from the filler and nothing sees it. Libraries that compile a kernel per
        shape (on CPUs) then meet few shapes.
        """
        length = len(self.tokens_S)
        missing = -length % multiple
        if not missing:
            return self
        return replace(
            self,
            tokens_S=np.concatenate([self.tokens_S, np.zeros(missing, dtype=np.int64)]),
            document_starts=(*self.document_starts, length),
            offsets=(*self.offsets, FILLER_OFFSET),
        )

    def _per_token(self, per_document: tuple[int, ...]) -> np.ndarray:
        lengths = np.diff((*self.document_starts, len(self.tokens_S)))
        return np.repeat(np.asarray(per_document), lengths)


@dataclass(frozen=True)
class StepBatch:
    """What one rank computes in one step.

    Attributes:
        micro_batches: as many on every rank; the shortest may be fillers.
        num_counted_global: targets of the step on all ranks, the divisor of the loss.
        num_tokens_global: tokens of the step on all ranks.
        next_sample: counter of the first sample of the next step.
    """

    micro_batches: tuple[MicroBatch, ...]
    num_counted_global: int
    num_tokens_global: int
    next_sample: int


class SampleStream:
    """Samples in training order without end: each epoch in an order of its own.

    Args:
        samples: the training samples.
        seed: of the order. The order depends on the content and the seed, not on the file's order.
    """

    def __init__(self, samples: Samples, seed: int = 0) -> None:
        if not len(samples):
            raise JobError("data/empty", "samples", 0, "there is no sample to train on")
        self.samples, self.seed = samples, seed
        self._lengths, self._counted = samples.lengths, samples.counted_lengths()
        self._epochs: dict[int, _Epoch] = {}

    def index(self, counter: int) -> int:
        """The sample that a global counter names."""
        epoch, at = divmod(counter, len(self.samples))
        return int(self._epoch(epoch).order[at])

    def length(self, counter: int) -> int:
        """Tokens of a sample."""
        return int(self._lengths[self.index(counter)])

    def num_counted(self, counter: int) -> int:
        """Targets of a sample."""
        return int(self._counted[self.index(counter)])

    def indices(self, counters: range) -> np.ndarray:
        """The samples that these consecutive counters name."""
        parts, start, size = [], counters.start, len(self.samples)
        while start < counters.stop:
            epoch, at = divmod(start, size)
            end = min(size, at + counters.stop - start)
            parts.append(self._epoch(epoch).order[at:end])
            start += end - at
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def lengths(self, counters: range) -> np.ndarray:
        """Tokens of these samples."""
        return self._lengths[self.indices(counters)]

    def counted(self, counters: range) -> np.ndarray:
        """Targets of these samples."""
        return self._counted[self.indices(counters)]

    def step_end(self, start: int, num_tokens: int) -> int:
        """Counter behind the most samples from `start` on that hold no more tokens.

        At least one sample, however long it is.
        """
        counter, room, size = start, num_tokens, len(self.samples)
        while True:
            epoch, at = divmod(counter, size)
            ends = self._epoch(epoch).ends
            before = int(ends[at - 1]) if at else 0
            last = int(np.searchsorted(ends, before + room, side="right"))
            counter, room = counter - at + last, room - (int(ends[-1]) - before)
            if last < size or room <= 0:
                return max(counter, start + 1)

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            order = _epoch_order(self.samples.keys, self.seed, epoch)
            kept = {epoch - 1: self._epochs.pop(epoch - 1, None)}  # a step may lie across the edge
            self._epochs = {at: found for at, found in kept.items() if found is not None}
            self._epochs[epoch] = _Epoch(order, np.cumsum(self._lengths[order], dtype=np.int64))
        return self._epochs[epoch]


@dataclass(frozen=True)
class _Epoch:
    """The samples of an epoch in its order, and the tokens up to the end of each."""

    order: np.ndarray
    ends: np.ndarray


def _epoch_order(keys: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    salt = _mixed(np.uint64(seed) ^ _mixed(np.uint64(epoch)))
    mixed = _mixed(keys ^ salt)
    order = np.argsort(mixed)
    ordered = mixed[order]
    if (ordered[1:] == ordered[:-1]).any():  # parts of one row: they stay in their order
        order = np.argsort(mixed, kind="stable")  # slower
    return order


def _mixed(value: np.ndarray | np.uint64) -> np.ndarray:
    """SplitMix64's finaliser (Steele et al., OOPSLA 2014): 64 well-mixed bits."""
    with np.errstate(over="ignore"):
        z = np.asarray(value, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def step_samples(stream: SampleStream, start: int, global_batch_tokens: int) -> range:
    """Counters of the step that begins at `start`: as many as fit, at least one."""
    return range(start, stream.step_end(start, global_batch_tokens))


def num_steps(stream: SampleStream, epochs: float, global_batch_tokens: int) -> int:
    """Steps that see every sample `epochs` times; the last may begin the epoch after it.

    Args:
        epochs: passes over the samples; a fraction counts samples, rounded up.
        global_batch_tokens: tokens of a step, as `step_batch` takes them.

    Raises:
        JobError: `job/bad-value` for epochs that are not above 0.
    """
    if not 0.0 < epochs < math.inf:
        raise JobError("job/bad-value", "train.epochs", epochs, "must be above 0")
    num_samples = math.ceil(epochs * len(stream.samples) - 1e-9)
    steps = counter = 0
    while counter < num_samples:
        counter = stream.step_end(counter, global_batch_tokens)
        steps += 1
    return steps


def step_batch(
    stream: SampleStream,
    start: int,
    *,
    global_batch_tokens: int,
    row_tokens: int,
    num_ranks: int,
    rank: int,
    counted_weight: float = 0.0,
    row_multiple: int = 1,
    least_rows: int = 1,
) -> StepBatch:
    """The rows of `rank` in the step whose first sample is `start`.

    Args:
        global_batch_tokens: tokens of the step on all data-parallel ranks.
        row_tokens: longest packed row, i.e. tokens of a micro-batch.
        counted_weight: extra work of a target, in tokens (the head): balances ranks by time.
        row_multiple: rows are extended to a multiple of so many tokens (`MicroBatch.extended`).
        least_rows: of each rank, also where fewer would hold all documents (a pipeline whose order
            needs them).

    Raises:
        JobError: `job/bad-value` for a sample longer than a row.
    """
    counters = step_samples(stream, start, global_batch_tokens)
    lengths, counted = stream.lengths(counters).tolist(), stream.counted(counters).tolist()
    work = [n + counted_weight * c for n, c in zip(lengths, counted)]
    rows = deal(lengths, work, row_tokens=row_tokens, num_ranks=num_ranks, least_rows=least_rows)
    before = np.concatenate([[0], np.cumsum(lengths)])
    mine = [
        pack(stream, [counters[at] for at in row], [int(before[at]) for at in row]).extended(
            row_multiple
        )
        for row in rows[rank::num_ranks]
    ]
    return StepBatch(tuple(mine), sum(counted), sum(lengths), counters.stop)


def whole_pass(
    stream: SampleStream,
    num_samples: int,
    *,
    row_tokens: int,
    num_ranks: int,
    rank: int,
    counted_weight: float = 0.0,
    row_multiple: int = 1,
    least_rows: int = 1,
) -> StepBatch:
    """The first `num_samples` samples as one step: an evaluation pass."""
    total = int(stream.lengths(range(num_samples)).sum())
    return step_batch(
        stream,
        0,
        global_batch_tokens=total,
        row_tokens=row_tokens,
        num_ranks=num_ranks,
        rank=rank,
        counted_weight=counted_weight,
        row_multiple=row_multiple,
        least_rows=least_rows,
    )


def deal(
    lengths: Sequence[int],
    work: Sequence[float],
    *,
    row_tokens: int,
    num_ranks: int,
    least_rows: int = 1,
) -> list[list[int]]:
    """Documents into the fewest rows per rank: heaviest first, into the lightest row with room.

    A rank gets `least_rows` at least, some of them empty where there are too few documents. Where
    rows are too full for equal work, they are made equal in tokens before one is added.

    Returns:
        Rows of indices, a whole number of rows per rank; row r belongs to rank r % num_ranks.

    Raises:
        JobError: `job/bad-value` when a document is longer than a row.
    """
    longest = max(lengths)
    if longest > row_tokens:
        rule = f"a document has {longest} tokens and rows are never longer than this"
        raise JobError("job/bad-value", "row_tokens", row_tokens, rule, legal=[longest])
    per_rank = row_tokens * num_ranks
    rows_per_rank = max(least_rows, -(-sum(lengths) // per_rank))
    while True:
        num_rows = rows_per_rank * num_ranks
        # of very many documents the work evens out by itself
        rows = _dealt_by_work(lengths, work, row_tokens, num_rows) if len(work) <= _MANY else None
        if rows is None:
            rows, left_out = _dealt_by_tokens(lengths, row_tokens, num_rows)
            rows_per_rank += max(1, left_out // per_rank) if left_out else 0
        else:
            left_out = 0
        if not left_out:
            return _rows_by_work(rows, work, num_ranks)


def _heaviest_first(work: Sequence[float]) -> list[int]:
    return np.argsort(-np.asarray(work), kind="stable").tolist()


def _dealt_by_work(
    lengths: Sequence[int], work: Sequence[float], row_tokens: int, num_rows: int
) -> list[list[int]] | None:
    """Rows of nearly equal work; None when some document finds no room."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    room = [row_tokens] * num_rows
    lightest = [(0.0, row) for row in range(num_rows)]
    for index in _heaviest_first(work):
        passed = []
        while lightest and room[lightest[0][1]] < lengths[index]:
            passed.append(heapq.heappop(lightest))
        if not lightest:
            return None
        weight, row = heapq.heappop(lightest)
        rows[row].append(index)
        room[row] -= lengths[index]
        for entry in (*passed, (weight + work[index], row)):
            heapq.heappush(lightest, entry)
    return rows


def _dealt_by_tokens(
    lengths: Sequence[int], row_tokens: int, num_rows: int
) -> tuple[list[list[int]], int]:
    """Rows of nearly equal tokens, and the tokens of documents that found no room.

    The shortest row has the most room, so no other is looked at.
    """
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    shortest, left_out = [(0, row) for row in range(num_rows)], 0
    for index in _heaviest_first(lengths):
        num_tokens, row = shortest[0]
        if num_tokens + lengths[index] > row_tokens:
            left_out += lengths[index]
            continue
        rows[row].append(index)
        heapq.heapreplace(shortest, (num_tokens + lengths[index], row))
    return rows, left_out


def _rows_by_work(rows: list[list[int]], work: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Rows sorted so that the rows which ranks compute side by side weigh nearly the same.

    Neighbours are dealt back and forth, so no rank gets the heavier one of every pair.
    """
    ordered = sorted(rows, key=lambda row: -sum(work[index] for index in row))
    turns = [ordered[at : at + num_ranks] for at in range(0, len(ordered), num_ranks)]
    return [row for at, turn in enumerate(turns) for row in (turn if at % 2 == 0 else turn[::-1])]


def pack(stream: SampleStream, counters: Sequence[int], offsets: Sequence[int]) -> MicroBatch:
    """These samples in one row; without any, a filler of one token that nothing is learnt from."""
    if not counters:
        nothing = np.zeros(0, dtype=np.int64)
        filler = np.zeros(1, dtype=np.int64)
        return MicroBatch(filler, (0,), nothing, nothing, (), (FILLER_OFFSET,))
    documents = [stream.samples[stream.index(counter)] for counter in counters]
    tokens_S = np.concatenate([each.tokens for each in documents]).astype(np.int64)
    counted_S = np.concatenate([each.counted for each in documents])
    lengths = [len(each.tokens) for each in documents]
    starts = (0, *(int(end) for end in np.cumsum(lengths)[:-1]))
    counted_S[list(starts)] = False
    at_N = np.flatnonzero(counted_S)
    return MicroBatch(tokens_S, starts, at_N - 1, tokens_S[at_N], tuple(counters), tuple(offsets))
