"""Logits, and the choice of the best few without them: product and selection in one pass.

Legend: R rows, D model, V vocabulary, v a tile of it, N candidates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.ops import native

_TILE_TOKENS = 1 << 14


def greedy(
    hidden_RD: Tensor, head_VD: Tensor, soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The token of each row's largest logit, and that logit.

    Equal logits give the lowest token. A row with a NaN gives a NaN and the first token that has
    one. Logits are compared before the soft-cap, which keeps their order but may make neighbours
    equal.

    Args:
        hidden_RD: output of the last norm.
        head_VD: head weights, of the same dtype.
        soft_cap: c of c * tanh(logits / c); None: logits as they are.

    Returns:
        Tokens [R], int64, and capped logits [R], in at least float32.
    """
    logits_RN, tokens_RN = best(hidden_RD, head_VD, 1, soft_cap)
    return tokens_RN[:, 0], logits_RN[:, 0]


def best(
    hidden_RD: Tensor, head_VD: Tensor, count: int, soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The largest logits of each row in falling order, and their tokens.

    Order, ties, NaN and the soft-cap are as for `greedy`: of equal logits the lowest token comes
    first, and NaN before all numbers.

    For bfloat16 on CPUs and N <= 64, logits are compared and given unrounded, and a row's result
    depends on no other row. Elsewhere they are rounded to the weights' dtype, as `F.linear` gives
    them.

    Args:
        count: N, at most V.

    Returns:
        Capped logits [R, N], in at least float32, and tokens [R, N], int64.
    """
    count = min(count, head_VD.shape[0])
    if torch.compiler.is_compiling():
        return registered(hidden_RD, head_VD, count, soft_cap)
    return _computed(hidden_RD, head_VD, count, soft_cap)


def logits(hidden_RD: Tensor, head_VD: Tensor, soft_cap: float | None = None) -> Tensor:
    """All capped logits [R, V], in at least float32.

    For bfloat16 on CPUs they are the sums that `greedy` and `best` compare, bit for bit, and a row
    depends on no other. Elsewhere they are rounded to the weights' dtype first.
    """
    if not _serves(hidden_RD, head_VD):
        return _capped(F.linear(hidden_RD, head_VD), soft_cap)
    parts = hidden_RD.split(native.MOST_ROWS)
    found = [native.packed_linear(part, head_VD, torch.float32) for part in parts]
    return _capped(found[0] if len(found) == 1 else torch.cat(found), soft_cap)


def _serves(hidden_RD: Tensor, head_VD: Tensor) -> bool:
    is_whole = hidden_RD.shape[0] > 0 and head_VD.is_contiguous()
    return is_whole and native.serves(hidden_RD, head_VD)


def _computed(
    hidden_RD: Tensor, head_VD: Tensor, count: int, soft_cap: float | None
) -> tuple[Tensor, Tensor]:
    if count > native.MOST_CANDIDATES or not _serves(hidden_RD, head_VD):
        logits_RN, tokens_RN = best_by_tiles(hidden_RD, head_VD, count)
    else:
        parts = hidden_RD.split(native.MOST_ROWS)
        pairs = [native.vocabulary_best(part, head_VD, count) for part in parts]
        logits_RN, tokens_RN = (
            torch.cat(each) if len(parts) > 1 else each[0] for each in zip(*pairs)
        )
    return _capped(logits_RN, soft_cap), tokens_RN


def _capped(logits: Tensor, soft_cap: float | None) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if soft_cap is None else soft_cap * torch.tanh(wide / soft_cap)


def best_by_tiles(hidden_RD: Tensor, head_VD: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The reference: tiles of the vocabulary one after the other, in plain torch."""
    logits_RN = tokens_RN = None
    for start in range(0, head_VD.shape[0], _TILE_TOKENS):
        logits_Rv = F.linear(hidden_RD, head_VD[start : start + _TILE_TOKENS])
        tokens_Rv = torch.arange(start, start + logits_Rv.shape[1], device=hidden_RD.device)
        tokens_Rv = tokens_Rv.expand_as(logits_Rv)
        if logits_RN is not None:  # earlier tokens stand in front: they win ties
            logits_Rv = torch.cat([logits_RN, logits_Rv], 1)
            tokens_Rv = torch.cat([tokens_RN, tokens_Rv], 1)
        places_RN = _best_places(logits_Rv, min(count, logits_Rv.shape[1]))
        logits_RN, tokens_RN = logits_Rv.gather(1, places_RN), tokens_Rv.gather(1, places_RN)
    assert logits_RN is not None and tokens_RN is not None
    return logits_RN, tokens_RN


def _best_places(logits_RV: Tensor, count: int) -> Tensor:
    """Places of the largest, of equal ones the first: `topk` leaves open which it takes."""
    ranked_RV = logits_RV.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if count == 1:
        return ranked_RV.max(-1, keepdim=True).indices
    last_R1 = ranked_RV.topk(count).values[:, -1:]
    above_RV, equal_RV = ranked_RV > last_R1, ranked_RV == last_R1
    room_R1 = count - above_RV.sum(-1, keepdim=True)
    taken_RV = above_RV | (equal_RV & (equal_RV.cumsum(-1) <= room_R1))
    places_RN = taken_RV.nonzero()[:, 1].view(-1, count)
    order_RN = ranked_RV.gather(1, places_RN).sort(dim=-1, descending=True, stable=True).indices
    return places_RN.gather(1, order_RN)


@torch.library.custom_op("phalanx::vocabulary_best", mutates_args=())
def registered(
    hidden_RD: Tensor, head_VD: Tensor, count: int, soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """`best` as an operator of torch, for graphs and fake tensors."""
    return _computed(hidden_RD, head_VD, count, soft_cap)


@registered.register_fake
def _(hidden_RD, head_VD, count, soft_cap=None):
    shape = (hidden_RD.shape[0], count)
    wide = torch.promote_types(hidden_RD.dtype, torch.float32)
    return hidden_RD.new_empty(shape, dtype=wide), hidden_RD.new_empty(shape, dtype=torch.int64)
