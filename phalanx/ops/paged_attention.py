"""Attention of decoding requests over a paged cache, read through block tables.

Legend: R requests, H query heads, K kv heads, C channels per head, N blocks of the longest request,
B blocks of the pool, T tokens of a block, t tokens of N blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.ops import native

_BLOCK_TOKENS = 16


def paged_decode(
    q_RHC: Tensor,
    keys_BKTC: Tensor,
    values_BKTC: Tensor,
    blocks_RN: Tensor,
    seen_R2: Tensor,
    scale: float,
    soft_cap: float | None = None,
) -> Tensor:
    """softmax(capped(scale * q k^T)) v of one query row per request, [R, H, C].

    In bfloat16 on CPUs nothing is gathered: scores and sums are float32, over parts of 256 tokens
    that are joined as in Flash-Decoding (Dao et al., 2023), so that one long request keeps all
    threads busy. Parts depend on the table alone: a request's result depends neither on its
    companions nor on threads. Elsewhere blocks are gathered and masked.

    Args:
        keys_BKTC, values_BKTC: pools of a layer, contiguous.
        blocks_RN: block table, int64; places behind the last one that a request sees are not read.
        seen_R2: first token that a request sees and the one behind its last, int64, counted from
            the first token of its first block; at least one. A window is a first token above 0.
        scale: factor on the scores.
        soft_cap: c of c * tanh(scores / c); None: none.
    """
    arguments = (q_RHC, keys_BKTC, values_BKTC, blocks_RN, seen_R2, scale, soft_cap)
    return registered(*arguments) if torch.compiler.is_compiling() else _computed(*arguments)


def serves_paged(q_RHC: Tensor, keys_BKTC: Tensor, values_BKTC: Tensor) -> bool:
    """Whether the compiled form may be given these."""
    heads, channels = q_RHC.shape[1:]
    fits = keys_BKTC.shape[2] == _BLOCK_TOKENS and channels % native.HEAD_STEP == 0
    few = heads // keys_BKTC.shape[1] <= native.MOST_GROUP
    whole = keys_BKTC.is_contiguous() and values_BKTC.is_contiguous()
    return fits and few and whole and native.serves(q_RHC, keys_BKTC, values_BKTC)


def _computed(
    q_RHC: Tensor,
    keys_BKTC: Tensor,
    values_BKTC: Tensor,
    blocks_RN: Tensor,
    seen_R2: Tensor,
    scale: float,
    soft_cap: float | None,
) -> Tensor:
    compute = native.paged_decode if serves_paged(q_RHC, keys_BKTC, values_BKTC) else gathered
    return compute(q_RHC, keys_BKTC, values_BKTC, blocks_RN, seen_R2, scale, soft_cap)


def gathered(
    q_RHC: Tensor,
    keys_BKTC: Tensor,
    values_BKTC: Tensor,
    blocks_RN: Tensor,
    seen_R2: Tensor,
    scale: float,
    soft_cap: float | None = None,
) -> Tensor:
    """The reference: blocks are gathered, what a request doesn't see is masked.

    The heads of a kv head stand as query rows, so that nothing is repeated. What a mask hides is
    multiplied by 0, so the pools must be finite.
    """
    k_RKtC, v_RKtC = (_taken(pool, blocks_RN, q_RHC.dtype) for pool in (keys_BKTC, values_BKTC))
    q_RKGC = q_RHC.unflatten(1, (k_RKtC.shape[1], -1))
    at_t = torch.arange(k_RKtC.shape[2], device=q_RHC.device)
    seen_Rt = (at_t >= seen_R2[:, :1]) & (at_t < seen_R2[:, 1:])
    mask_R11t = seen_Rt[:, None, None, :]
    if soft_cap is None:
        out_RKGC = F.scaled_dot_product_attention(
            q_RKGC, k_RKtC, v_RKtC, attn_mask=mask_R11t, scale=scale
        )
    else:
        scores = (q_RKGC @ k_RKtC.mT).to(torch.promote_types(q_RHC.dtype, torch.float32)) * scale
        scores = (soft_cap * torch.tanh(scores / soft_cap)).masked_fill(~mask_R11t, -torch.inf)
        out_RKGC = scores.softmax(-1).to(v_RKtC.dtype) @ v_RKtC
    return out_RKGC.flatten(1, 2)


def _taken(pool_BKTC: Tensor, blocks_RN: Tensor, dtype: torch.dtype) -> Tensor:
    taken = pool_BKTC.index_select(0, blocks_RN.flatten()).unflatten(0, blocks_RN.shape)
    return taken.transpose(1, 2).flatten(2, 3).to(dtype)


@torch.library.custom_op("phalanx::paged_decode", mutates_args=())
def registered(
    q_RHC: Tensor,
    keys_BKTC: Tensor,
    values_BKTC: Tensor,
    blocks_RN: Tensor,
    seen_R2: Tensor,
    scale: float,
    soft_cap: float | None = None,
) -> Tensor:
    """`paged_decode` as an operator of torch, for graphs and fake tensors."""
    return _computed(q_RHC, keys_BKTC, values_BKTC, blocks_RN, seen_R2, scale, soft_cap)


@registered.register_fake
def _(q_RHC, keys_BKTC, values_BKTC, blocks_RN, seen_R2, scale, soft_cap=None):
    return torch.empty_like(q_RHC, memory_format=torch.contiguous_format)
