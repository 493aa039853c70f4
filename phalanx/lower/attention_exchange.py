"""What attention exchanges by head where ranks share a sequence, in bytes.

Symbols: c tokens of a rank, N ranks, h query heads and g key and value heads of a rank (after
tensor parallelism), b bytes of a token in one head.
"""

from __future__ import annotations

from math import lcm

from phalanx.action import Compute
from phalanx.lower.chunk import Placed
from phalanx.policy import Exchange, Rule
from phalanx.workload import Heads

OF_HEADS = ("keys_values", "queries", "heads")
RING_PLACEMENT = "ring"
_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def heads_bytes(
    action: Compute, heads: Heads, rule: Rule, exchange: Exchange, degree: int, placed: Placed
) -> float:
    """Payload of an exchange of keys and values (2 g heads), queries (h) or all of them (h + 2 g).

    Gathered or reduced: N c tokens, the whole sequence; sums of gradients in the dtype that the
    rule names, else in float32 at least. All to all: the c tokens of a rank, with each key and
    value head as often as ranks need it.
    """
    num_tokens, key_value, scale = action.num_tokens, heads.key_value, 1.0
    if exchange.collective == "all_to_all":
        key_value = lcm(key_value, degree)
    else:
        num_tokens *= degree
    if exchange.collective == "reduce_scatter":
        itemsize = placed.work.param_bytes
        scale = _DTYPE_BYTES.get(rule.reduce_dtype, max(itemsize, 4)) / itemsize
    count = 0 if exchange.of == "keys_values" else heads.query
    count += 0 if exchange.of == "queries" else 2 * key_value
    return num_tokens * count * heads.head_bytes * scale
