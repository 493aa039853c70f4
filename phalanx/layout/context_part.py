"""What one rank of a context group needs to know about one row, without tensors.

Legend: S tokens of the row, N ranks, c tokens of a rank, T keys of several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import lcm

import numpy as np

from phalanx.errors import PlanError, nearest_numbers
from phalanx.layout.token_layout import KeysSeen, TokenLayout, token_layout


@dataclass(frozen=True, eq=False)
class ContextPart:
    """A rank's share of a row.

    Attributes:
        layout: who holds which token.
        rank: in the group.
        bounds: 0, the end of the first document, ..., S, of the whole row.
    """

    layout: TokenLayout
    rank: int
    bounds: tuple[int, ...]

    @classmethod
    def of_row(
        cls,
        name: str,
        rank: int,
        num_ranks: int,
        document_starts: Sequence[int],
        num_tokens: int,
        *,
        inner: int = 1,
    ) -> ContextPart:
        """The share of `rank` of a row of `num_tokens` whose documents begin at `document_starts`.

        Args:
            name: one of `token_layout.LAYOUTS`.
            inner: consecutive ranks that share a place of the layout (the all-to-all inside a
                ring); the layout has num_ranks / inner places.

        Raises:
            PlanError: `layout/divide` where ranks would hold unequally many tokens.
        """
        bounds = (*(int(start) for start in document_starts), num_tokens)
        return cls(_layout(name, num_tokens, num_ranks // inner, bounds, inner), rank, bounds)

    @property
    def num_ranks(self) -> int:
        """N."""
        return self.layout.num_ranks

    @property
    def num_tokens(self) -> int:
        """S."""
        return self.layout.num_tokens

    @property
    def tokens_c(self) -> np.ndarray:
        """The tokens of this rank, rising: what ids, positions and labels are indexed with."""
        return self.layout.tokens_Nc[self.rank]

    def keys_seen(self, origin: int, window: int | None) -> KeysSeen:
        """Of the keys that rank `origin` holds, what the queries of this rank see."""
        return self._remembered(self.layout.tokens_Nc[origin], origin, window)

    def row_seen(self, window: int | None) -> KeysSeen:
        """Of the keys of the whole row in its own order, what the queries of this rank see."""
        return self._remembered(np.arange(self.num_tokens), None, window)

    def peer(self, rank: int) -> ContextPart:
        """The share of another rank."""
        return ContextPart(self.layout, rank, self.bounds)

    def outer(self, inner: int) -> ContextPart:
        """The share of the `inner` consecutive ranks that this rank is one of, taken together."""
        if inner not in self._outers:
            joined = self.layout.joined(inner)
            self._outers[inner] = ContextPart(joined, self.rank // inner, self.bounds)
        return self._outers[inner]

    def wanted(self, window: int | None) -> WantedKeys:
        """What ranks send one another where each gets the keys that its queries see."""
        if window not in self._wanted:  # every layer asks for the same few
            self._wanted[window] = WantedKeys.of_part(self, window)
        return self._wanted[window]

    def order(self, inner: int) -> np.ndarray:
        """What sorts the tokens of those ranks, one rank's behind the other's."""
        if inner not in self._orders:
            first = self.rank // inner * inner
            tokens = self.layout.tokens_Nc[first : first + inner]
            self._orders[inner] = np.argsort(tokens.reshape(-1))
        return self._orders[inner]

    def _remembered(self, keys_T: np.ndarray, origin: int | None, window: int | None) -> KeysSeen:
        if (origin, window) not in self._seen:  # every layer asks for the same few
            seen = KeysSeen.between(self.tokens_c, keys_T, self.bounds, window)
            self._seen[origin, window] = seen
        return self._seen[origin, window]

    @cached_property
    def _seen(self) -> dict[tuple[int | None, int | None], KeysSeen]:
        return {}

    @cached_property
    def _wanted(self) -> dict[int | None, WantedKeys]:
        return {}

    @cached_property
    def _outers(self) -> dict[int, ContextPart]:
        return {}

    @cached_property
    def _orders(self) -> dict[int, np.ndarray]:
        return {}


@dataclass(frozen=True, eq=False)
class WantedKeys:
    """Which keys of a row go from rank to rank, so that each has those that its queries see.

    Attributes:
        sent_T: of this rank's keys, those for rank 0 first.
        num_sent, num_came: keys to and from each rank.
        order_T: what sorts this rank's keys and, behind them, those that came, by token.
        seen: of the sorted keys.
    """

    sent_T: np.ndarray
    num_sent: tuple[int, ...]
    num_came: tuple[int, ...]
    order_T: np.ndarray
    seen: KeysSeen

    @classmethod
    def of_part(cls, part: ContextPart, window: int | None) -> WantedKeys:
        """A query sees `window` keys of its document, its own included; None: all earlier ones."""
        me, ranks, held = part.rank, range(part.num_ranks), part.layout.tokens_Nc
        gives = [part.peer(r).keys_seen(me, window).span if r != me else range(0) for r in ranks]
        takes = [part.keys_seen(r, window).span if r != me else range(0) for r in ranks]
        came = [held[r][rows.start : rows.stop] for r, rows in zip(ranks, takes)]
        tokens = np.concatenate([part.tokens_c, *came])
        order_T = np.argsort(tokens)
        return cls(
            sent_T=np.concatenate([np.asarray(rows, dtype=np.int64) for rows in gives]),
            num_sent=tuple(map(len, gives)),
            num_came=tuple(map(len, takes)),
            order_T=order_T,
            seen=KeysSeen.between(part.tokens_c, tokens[order_T], part.bounds, window),
        )


def key_copies(num_kv_heads: int, num_ranks: int) -> int:
    """How often each key/value head is sent, so that `num_ranks` ranks get equally many, whole."""
    return lcm(num_kv_heads, num_ranks) // num_kv_heads


def require_head_split(num_heads: int, num_kv_heads: int, num_ranks: int, where: str) -> None:
    """Refuse heads that `num_ranks` cannot share: each takes equally many whole query heads, and
    the key/value heads that these need (`key_copies`).

    Raises:
        PlanError: `layout/divide`, with the numbers of ranks that can.
    """
    if num_ranks < 1 or num_heads % num_ranks:
        rule = f"cannot share {num_heads} query and {num_kv_heads} key/value heads"
        ranks = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        legal = nearest_numbers(num_ranks, ranks)
        raise PlanError("layout/divide", where, num_ranks, rule, legal=legal)


@lru_cache(maxsize=8)  # a row is asked for more than once, and may be a million tokens
def _layout(
    name: str, num_tokens: int, num_places: int, bounds: tuple[int, ...], inner: int
) -> TokenLayout:
    layout = token_layout(name, num_tokens, num_places, bounds)
    return layout if inner == 1 else layout.divided(inner)
