"""One attention over a row that several ranks share; how keys and queries meet is a choice.

| function             | forward                           | backward                             |
|----------------------|-----------------------------------|--------------------------------------|
| `ring_attention`     | k, v from rank to rank, N-1 hops  | again, dk and dv one step behind     |
| `gathered_attention` | one all-gather of k, v            | one reduce-scatter of dk, dv         |
| `wanted_attention`   | all-to-all of the k, v that are   | all-to-all of their dk, dv           |
|                      | seen elsewhere: halos             |                                      |
| `ulysses_attention`  | all-to-all to all tokens of some  | the same two, in mirror order        |
|                      | heads, all-to-all back            |                                      |

All four take any token layout, packed documents, windows and fewer key/value heads, and give every
rank the output of its own queries. Ulysses inside a ring (USP) is
`ulysses_attention(..., attend=partial(ring_attention, group=outer))`.

Payload of a rank and layer, e bytes an element, w = max(e, 4) or that of `sum_dtype`:

    ring       (N-1) 2cKCe sent; backward (N-1) 2cKC (e + w)
    gathered   2SKCe gathered; backward 2SKCw scattered (on the wire (N-1)/N of it)
    wanted     2KCe a key sent; backward 2KCw
    Ulysses    c (H + 2K') C e in, c H C e out (on the wire (N-1)/N), K' = lcm(K, N); backward same

In Ring Attention dk and dv make N hops; here a rank keeps its own part at home and adds
it when the others' arrives, so they make N-1. Partial sums are at least float32 on the way.

Sources: Liu et al., arXiv 2310.01889; Brandon et al., arXiv 2311.09431; Chu et al., ISCA 2025,
section 4 (gathered); Jacobs et al., arXiv 2309.14509 (Ulysses); Fang and Zhao, arXiv 2405.07719
(USP).

Legend: S tokens of the row, N ranks, c = S / N tokens of a rank, H query heads, K key/value heads,
C channels per head.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.layout.context_part import ContextPart, key_copies, require_head_split
from phalanx.ops.attention import Documents, packed_attention
from phalanx.ops.context_gather import GatheredAttention, WantedAttention
from phalanx.ops.context_heads import to_heads, to_tokens
from phalanx.ops.context_ring import RingAttention
from phalanx.ops.placed import placed


class PartAttend(Protocol):
    """One of the functions here, with its group bound."""

    def __call__(
        self,
        q_cHC: Tensor,
        k_cKC: Tensor,
        v_cKC: Tensor,
        part: ContextPart,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Output of the queries of this rank, [c, H, C]."""
        ...


def ring_attention(
    q_cHC: Tensor,
    k_cKC: Tensor,
    v_cKC: Tensor,
    part: ContextPart,
    group: dist.ProcessGroup,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Keys and values travel round the ring while this rank's queries meet those that are here.

    Args:
        part: which tokens of the row the rows are; its rank is the rank in `group`.
        scale: factor on the scores.
        window: keys that a query sees, its own included; None: all earlier ones of its document.
    """
    return RingAttention.apply(q_cHC, k_cKC, v_cKC, part, group, scale, window)


def gathered_attention(
    q_cHC: Tensor,
    k_cKC: Tensor,
    v_cKC: Tensor,
    part: ContextPart,
    group: dist.ProcessGroup,
    *,
    scale: float,
    window: int | None = None,
    sum_dtype: torch.dtype | None = None,
) -> Tensor:
    """Every rank gathers all keys and values and computes its own queries.

    Args:
        sum_dtype: in which gradients of keys and values are summed over ranks; None: at least
            float32.
    """
    return GatheredAttention.apply(q_cHC, k_cKC, v_cKC, part, group, scale, window, sum_dtype)


def wanted_attention(
    q_cHC: Tensor,
    k_cKC: Tensor,
    v_cKC: Tensor,
    part: ContextPart,
    group: dist.ProcessGroup,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Ranks send one another the stretch of keys and values that the other's queries see.

    With a window of a few tokens that is a halo, with packed documents it leaves out those that the
    other has no token of.
    """
    return WantedAttention.apply(q_cHC, k_cKC, v_cKC, part, group, scale, window)


def ulysses_attention(
    q_cHC: Tensor,
    k_cKC: Tensor,
    v_cKC: Tensor,
    part: ContextPart,
    group: dist.ProcessGroup,
    *,
    scale: float,
    window: int | None = None,
    attend: PartAttend | None = None,
) -> Tensor:
    """Ranks exchange tokens for heads, so that each attends over all their tokens with some heads.

    Args:
        group: consecutive ranks of the context group (all of it without `attend`).
        attend: attention among the groups, each of which then holds a part of the row.

    Raises:
        PlanError: `layout/divide` for heads that the group cannot share.
    """
    size, (num_heads, num_kv_heads) = group.size(), (q_cHC.shape[1], k_cKC.shape[1])
    require_head_split(num_heads, num_kv_heads, size, "ranks that share heads")
    copies = key_copies(num_kv_heads, size)
    k_cKC, v_cKC = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (k_cKC, v_cKC))
    parts = [x.unflatten(1, (size, -1)) for x in (q_cHC, k_cKC, v_cKC)]
    order = placed(part.order(size), q_cHC.device)
    both = to_heads(torch.cat(parts, dim=2).flatten(1, 2), order, group)
    q_SHC, k_SKC, v_SKC = both.split([x.shape[2] for x in parts], dim=1)
    if attend is None:
        assert size == part.num_ranks, "attention among the groups is missing"
        documents = Documents(part.bounds)
        out = packed_attention(q_SHC, k_SKC, v_SKC, documents, scale=scale, window=window)
    else:
        out = attend(q_SHC, k_SKC, v_SKC, part.outer(size), scale=scale, window=window)
    return to_tokens(out, order, group)
