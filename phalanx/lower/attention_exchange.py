"""What attention exchanges by head where ranks share a sequence, in bytes.

Symbols: c tokens of a rank, N ranks, h query heads and g key and value heads of a rank (after
tensor parallelism), b bytes of a token in one head.
"""

from __future__ import annotations

from functools import lru_cache
from math import lcm

from phalanx.action import Compute
from phalanx.layout.context_part import ContextPart
from phalanx.layout.token_layout import row_multiple
from phalanx.lower.chunk import Placed
from phalanx.policy import Exchange, Rule
from phalanx.workload import Heads

OF_HEADS = ("keys_values", "queries", "heads")
RING_PLACEMENT, WANTED_PLACEMENT = "ring", "wanted"
_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def heads_bytes(
    action: Compute,
    heads: Heads,
    rule: Rule,
    exchange: Exchange,
    layout: str,
    degree: int,
    placed: Placed,
) -> float:
    """Payload of an exchange of keys and values (2 g heads), queries (h) or all of them (h + 2 g).

    Gathered or reduced: N c tokens, the whole sequence; sums of gradients in the dtype that the
    rule names, else in float32 at least. All to all of heads: the c tokens of a rank, with each key
    and value head as often as ranks need it; of what is wanted: what the rank that gives most gives
    to others, which see so much of it if the row is one document.

    Args:
        layout: of tokens.
    """
    num_tokens, key_value, scale = action.num_tokens, heads.key_value, 1.0
    is_sum = exchange.collective == "reduce_scatter"
    if rule.placement == WANTED_PLACEMENT:
        assert heads.window is not None
        num_tokens = most_wanted(layout, degree, num_tokens * degree, heads.window)
        is_sum = exchange.phase == "B"
    elif exchange.collective == "all_to_all":
        key_value = lcm(key_value, degree)
    else:
        num_tokens *= degree
    if is_sum:
        itemsize = placed.work.param_bytes
        scale = _DTYPE_BYTES.get(rule.reduce_dtype, max(itemsize, 4)) / itemsize
    count = 0 if exchange.of == "keys_values" else heads.query
    count += 0 if exchange.of == "queries" else 2 * key_value
    return num_tokens * count * heads.head_bytes * scale


@lru_cache(maxsize=256)
def most_wanted(layout: str, num_ranks: int, num_tokens: int, window: int) -> int:
    """Keys that the rank with most of them sends to others, which see `window` keys each of one
    document; rows are filled up to what the layout needs."""
    multiple = row_multiple(layout, num_ranks)
    length = -(-num_tokens // multiple) * multiple
    ranks = [ContextPart.of_row(layout, r, num_ranks, (0,), length) for r in range(num_ranks)]
    sent = [
        sum(len(other.keys_seen(own.rank, window).span) for other in ranks if other is not own)
        for own in ranks
    ]
    return max(sent)
