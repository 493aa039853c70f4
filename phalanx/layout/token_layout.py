"""Which rank of a context group holds which tokens of a row: a value, never part of an algorithm.

| name         | a rank holds                                                  | tokens     |
|--------------|---------------------------------------------------------------|------------|
| contiguous   | one block                                                     | k N        |
| striped      | every N-th token                                              | k N        |
| head_tail    | of 2N chunks one from the front and its mirror image          | k 2N       |
| per_document | head_tail of every document; what 2N does not divide in turn  | k N        |
| balanced     | chunks dealt so that all ranks see about as many pairs        | k N        |

Every rank holds its tokens in rising order. So the tokens that a query may see (of its document,
not behind it, within the window) are one stretch of those that any rank holds: every mask of every
layout is two numbers a query, `KeysSeen`.

Rows are permuted once, before the embedding (ids, positions, labels, what counts), and never back.

Sources: contiguous, Liu et al., arXiv 2310.01889; striped, Brandon et al., arXiv 2311.09431;
head_tail, Chu et al., ISCA 2025 (DOI 10.1145/3695053.3731410), section 4; per_document, Wang et
al., arXiv 2503.17924, section 5. Unlike the last, remainders are dealt to all ranks in turn, so
that all ranks hold equally many tokens without padding. `balanced` is ours: equal counts, and the
longest work first to the rank with the least.

Legend: S tokens of a row, N ranks, c = S / N tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from phalanx.errors import JobError, PlanError, nearest_names

_CHUNKS = 16  # of a rank in `balanced`: the worst of 60 packed rows is 2 % off, with 8 16 %


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """Who holds the tokens of a row.

    Attributes:
        name: one of `LAYOUTS`.
        tokens_Nc: indices into the row by rank, each rank's rising; all S once.
    """

    name: str
    tokens_Nc: np.ndarray

    @property
    def num_ranks(self) -> int:
        """N."""
        return self.tokens_Nc.shape[0]

    @property
    def num_tokens(self) -> int:
        """S."""
        return self.tokens_Nc.size

    @cached_property
    def permutation_S(self) -> np.ndarray:
        """The token at each place where the ranks' tokens follow one another."""
        return self.tokens_Nc.reshape(-1)

    @cached_property
    def inverse_S(self) -> np.ndarray:
        """The place of each token there: `x[permutation_S][inverse_S]` is x."""
        places_S = np.empty_like(self.permutation_S)
        places_S[self.permutation_S] = np.arange(self.num_tokens)
        return places_S

    def joined(self, size: int) -> TokenLayout:
        """The layout over groups of `size` consecutive ranks, each holding what its members hold.

        Raises:
            PlanError: `layout/divide` unless `size` divides the ranks.
        """
        if size < 1 or self.num_ranks % size:
            rule = f"does not divide the {self.num_ranks} ranks that share a row"
            legal = [n for n in range(1, self.num_ranks + 1) if self.num_ranks % n == 0]
            raise PlanError("layout/divide", "ranks of an inner group", size, rule, legal=legal)
        tokens = self.tokens_Nc.reshape(self.num_ranks // size, -1)
        return TokenLayout(self.name, np.sort(tokens, axis=1))

    def divided(self, size: int) -> TokenLayout:
        """Each rank's tokens cut into `size` blocks for as many consecutive ranks.

        `layout.divided(size).joined(size)` is the layout again: a ring over N ranks with `size`
        ranks at each of its places.

        Raises:
            PlanError: `layout/divide` unless `size` divides a rank's tokens.
        """
        if size < 1 or self.tokens_Nc.shape[1] % size:
            rule = f"does not divide the {self.tokens_Nc.shape[1]} tokens of a place in the ring"
            raise PlanError("layout/divide", "ranks of an inner group", size, rule)
        return TokenLayout(self.name, self.tokens_Nc.reshape(self.num_ranks * size, -1))


@dataclass(frozen=True, eq=False)
class KeysSeen:
    """The keys that each query sees: `first <= key < last`; none where both are equal.

    Attributes:
        first_Q, last_Q: int64, neither falls from a query to the next.
        num_keys: that there are.
    """

    first_Q: np.ndarray
    last_Q: np.ndarray
    num_keys: int

    @classmethod
    def between(
        cls,
        queries_Q: np.ndarray,
        keys_T: np.ndarray,
        bounds: Sequence[int],
        window: int | None = None,
    ) -> KeysSeen:
        """Of these keys, as they follow one another, what these queries see.

        Args:
            queries_Q, keys_T: tokens of a row, rising.
            bounds: 0, the end of the first document, ..., S.
            window: keys that a query sees, its own included; None: all earlier ones.
        """
        ends = np.asarray(bounds)
        oldest_Q = ends[np.searchsorted(ends, queries_Q, side="right") - 1]
        if window is not None:
            oldest_Q = np.maximum(oldest_Q, queries_Q - window + 1)
        last_Q = np.searchsorted(keys_T, queries_Q, side="right")
        first_Q = np.minimum(np.searchsorted(keys_T, oldest_Q), last_Q)
        return cls(first_Q, last_Q, len(keys_T))

    def within(self, start: int, stop: int) -> KeysSeen:
        """The same of the keys start .. stop - 1, counted from `start`."""
        first_Q, last_Q = (x.clip(start, stop) - start for x in (self.first_Q, self.last_Q))
        return KeysSeen(first_Q, last_Q, stop - start)

    @cached_property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        return int((self.last_Q - self.first_Q).sum())

    @cached_property
    def span(self) -> range:
        """The keys from the first to the last that any query sees; empty where none does."""
        sees_Q = self.last_Q > self.first_Q
        if not sees_Q.any():
            return range(0)
        return range(int(self.first_Q[sees_Q].min()), int(self.last_Q[sees_Q].max()))


def pairs_NN(
    layout: TokenLayout, bounds: Sequence[int] | None = None, window: int | None = None
) -> np.ndarray:
    """Pairs that the rank of the row computes of the rank of the column's keys.

    In a ring rank j meets the keys of rank k in round (j - k) mod N.
    """
    bounds = (0, layout.num_tokens) if bounds is None else bounds
    parts = layout.tokens_Nc
    counts = [[KeysSeen.between(q, k, bounds, window).num_pairs for k in parts] for q in parts]
    return np.array(counts)


def row_multiple(name: str, num_ranks: int) -> int:
    """What the tokens of a row must be a multiple of.

    Raises:
        JobError: `registry/unknown` for a name that no layout has.
    """
    _builder(name)
    return num_ranks * (2 if name == "head_tail" else 1)


def require_divisible(
    name: str, num_tokens: int, num_ranks: int, where: str = "tokens of a row"
) -> None:
    """Refuse rows that a layout cannot share out equally.

    Raises:
        PlanError: `layout/divide`, with the lengths below and above that it can.
    """
    multiple = row_multiple(name, num_ranks)
    if num_tokens < 1 or num_tokens % multiple:
        below = num_tokens // multiple * multiple
        legal = sorted({max(multiple, below), below + multiple}, key=lambda n: abs(n - num_tokens))
        rule = f"a {name} layout over {num_ranks} ranks needs a multiple of {multiple}"
        raise PlanError("layout/divide", where, num_tokens, rule, legal=legal)


def token_layout(
    name: str, num_tokens: int, num_ranks: int, bounds: Sequence[int] | None = None
) -> TokenLayout:
    """A row of `num_tokens` shared by `num_ranks` ranks.

    Args:
        name: one of `LAYOUTS`.
        bounds: 0, the end of the first document, ..., `num_tokens`; None: one document.

    Raises:
        JobError: `registry/unknown` for a name that no layout has.
        PlanError: `layout/divide` where ranks would hold unequally many tokens.
    """
    require_divisible(name, num_tokens, num_ranks)
    bounds = (0, num_tokens) if bounds is None else tuple(bounds)
    tokens_Nc = _builder(name)(num_tokens, num_ranks, bounds)
    return TokenLayout(name, np.ascontiguousarray(tokens_Nc, dtype=np.int64))


def _contiguous(num_tokens: int, num_ranks: int, bounds: tuple[int, ...]) -> np.ndarray:
    return np.arange(num_tokens).reshape(num_ranks, -1)


def _striped(num_tokens: int, num_ranks: int, bounds: tuple[int, ...]) -> np.ndarray:
    return np.arange(num_tokens).reshape(-1, num_ranks).T


def _head_tail(num_tokens: int, num_ranks: int, bounds: tuple[int, ...]) -> np.ndarray:
    chunks = np.arange(num_tokens).reshape(2 * num_ranks, -1)
    return np.concatenate([chunks[:num_ranks], chunks[: num_ranks - 1 : -1]], axis=1)


def _per_document(num_tokens: int, num_ranks: int, bounds: tuple[int, ...]) -> np.ndarray:
    holder_S = np.empty(num_tokens, dtype=np.int64)
    mirrored = np.concatenate([np.arange(num_ranks), np.arange(num_ranks)[::-1]])
    num_dealt = 0
    for start, end in pairwise(bounds):
        chunk, rest = divmod(end - start, 2 * num_ranks)
        holder_S[start : end - rest] = np.repeat(mirrored, chunk)
        holder_S[end - rest : end] = (num_dealt + np.arange(rest)) % num_ranks
        num_dealt += rest
    return _by_holder(holder_S, num_ranks)


def _balanced(num_tokens: int, num_ranks: int, bounds: tuple[int, ...]) -> np.ndarray:
    """Chunks of a rank differ by one token at most, and every rank has as many of each length."""
    per_rank = num_tokens // num_ranks
    num_chunks = min(_CHUNKS, per_rank)
    length, num_longer = divmod(per_rank, num_chunks)
    is_longer = np.tile(np.arange(num_chunks) < num_longer, num_ranks)
    lengths = length + is_longer
    starts = np.repeat(np.asarray(bounds[:-1]), np.diff(bounds))
    pairs_S = np.arange(num_tokens) - starts + 1
    work = np.add.reduceat(pairs_S, np.cumsum(lengths) - lengths)
    holders = np.empty(len(work), dtype=np.int64)
    loads = [0] * num_ranks
    room = [[num_chunks - num_longer] * num_ranks, [num_longer] * num_ranks]
    for chunk in np.argsort(-work, kind="stable"):
        left = room[int(is_longer[chunk])]
        rank = min((r for r in range(num_ranks) if left[r]), key=loads.__getitem__)
        holders[chunk] = rank
        loads[rank] += int(work[chunk])
        left[rank] -= 1
    return _by_holder(np.repeat(holders, lengths), num_ranks)


def _by_holder(holder_S: np.ndarray, num_ranks: int) -> np.ndarray:
    return np.argsort(holder_S, kind="stable").reshape(num_ranks, -1)


_Builder = Callable[[int, int, tuple[int, ...]], np.ndarray]
LAYOUTS: dict[str, _Builder] = {
    "contiguous": _contiguous,
    "striped": _striped,
    "head_tail": _head_tail,
    "per_document": _per_document,
    "balanced": _balanced,
}


def _builder(name: str) -> _Builder:
    if name not in LAYOUTS:
        rule = "there is no such token layout"
        legal = nearest_names(name, LAYOUTS)
        raise JobError("registry/unknown", "token layout", name, rule, legal=legal)
    return LAYOUTS[name]
