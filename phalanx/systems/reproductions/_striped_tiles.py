"""What a balanced layout gains where kernels compute whole tiles of pairs.

A kernel skips a tile of queries by keys only if none of its pairs is seen. So short rows gain less
than their pairs say, and a rank whose block is one tile gains nothing (arXiv 2311.09431, section
4). The slowest rank decides every round of a ring.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from phalanx.layout.token_layout import KeysSeen, token_layout


def live_tiles(seen: KeysSeen, tile_queries: int, tile_keys: int) -> int:
    """Tiles of which some pair is seen; queries see all keys up to a last one."""
    assert not seen.first_Q.any(), "tiles are counted from the first key"
    last_Q = np.maximum.reduceat(seen.last_Q, np.arange(0, len(seen.last_Q), tile_queries))
    return int((-(-last_Q // tile_keys)).sum())


@cache
def ring_tiles(layout: str, ranks: int, tokens: int, tile_queries: int, tile_keys: int) -> int:
    """Sum over rounds of the slowest rank's tiles, for a causal row of one document."""
    parts = token_layout(layout, tokens, ranks).tokens_Nc
    bounds = (0, tokens)
    return sum(
        max(
            live_tiles(
                KeysSeen.between(parts[j], parts[(j - step) % ranks], bounds),
                tile_queries,
                tile_keys,
            )
            for j in range(ranks)
        )
        for step in range(ranks)
    )


def tiled_speedup(
    ranks: int,
    tokens: int,
    tile: tuple[int, int],
    *,
    linear_flops: float,
    pair_flops: float,
) -> float:
    """Striped over contiguous blocks, a layer's other work included.

    Args:
        tile: queries and keys of a tile.
        linear_flops: of a token, outside attention.
        pair_flops: of a query and a key that it sees, weighted by how slow they are.
    """
    other = linear_flops * tokens / ranks
    ring_s, striped_s = (
        other + pair_flops * tile[0] * tile[1] * ring_tiles(layout, ranks, tokens, *tile)
        for layout in ("contiguous", "striped")
    )
    return ring_s / striped_s
