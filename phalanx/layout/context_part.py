"""What one rank of a context group needs to know about one row, without tensors.

Legend: S tokens of the row, N ranks, c tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

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
    def _outers(self) -> dict[int, ContextPart]:
        return {}

    @cached_property
    def _orders(self) -> dict[int, np.ndarray]:
        return {}


def require_head_split(num_heads: int, num_kv_heads: int, num_ranks: int, where: str) -> None:
    """Refuse heads that `num_ranks` cannot share: each takes equally many whole query heads, and
    the key/value heads are shared out too, or each of them goes to equally many ranks.

    Raises:
        PlanError: `layout/divide`, with the numbers of ranks that can.
    """

    def fits(n: int) -> bool:
        return num_heads % n == 0 and (num_kv_heads % n == 0 or n % num_kv_heads == 0)

    if num_ranks < 1 or not fits(num_ranks):
        rule = f"cannot share {num_heads} query and {num_kv_heads} key/value heads"
        legal = nearest_numbers(num_ranks, [n for n in range(1, num_heads + 1) if fits(n)])
        raise PlanError("layout/divide", where, num_ranks, rule, legal=legal)


@lru_cache(maxsize=64)
def _layout(
    name: str, num_tokens: int, num_places: int, bounds: tuple[int, ...], inner: int
) -> TokenLayout:
    layout = token_layout(name, num_tokens, num_places, bounds)
    return layout if inner == 1 else layout.divided(inner)
