"""Causal attention over packed rows, one document at a time; the same call on CPU and CUDA.

Legend: S query rows, T key rows, H query heads, K key/value heads, C channels per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.errors import JobError

_QUERY_BLOCK = 256


@dataclass(frozen=True)
class Documents:
    """Where the documents of a packed row lie.

    Args:
        bounds: 0, the end of the first document, ..., S; strictly rising.
    """

    bounds: tuple[int, ...]

    @classmethod
    def from_starts(cls, starts: Sequence[int], num_tokens: int) -> Documents:
        """Documents that begin at `starts` and together fill `num_tokens` rows.

        Raises:
            JobError: `job/bad-value` unless the starts begin at 0 and rise within the row.
        """
        bounds = (*(int(start) for start in starts), num_tokens)
        if bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
            rule = f"must begin at 0 and rise strictly below {num_tokens} tokens"
            raise JobError("job/bad-value", "document_starts", tuple(starts), rule)
        return cls(bounds)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return [end - start for start, end in pairwise(self.bounds)]

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """0, 1, ... restarting at each document, [S]."""
        parts = [torch.arange(length, device=device) for length in self.lengths]
        return torch.cat(parts)

    def bounds_tensor(self, device: torch.device) -> Tensor:
        """The bounds as int32 on `device`, as variable-length kernels read them."""
        return torch.tensor(self.bounds, dtype=torch.int32, device=device)


def packed_attention(
    q_SHC: Tensor,
    k_SKC: Tensor,
    v_SKC: Tensor,
    documents: Documents,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v, causal within each document, [S, H, C].

    Args:
        scale: factor on the scores.
        window: keys that a query sees, its own included; None: all earlier ones.
    """
    lengths = documents.lengths
    outputs = [
        causal_attention(q, k, v, scale=scale, window=window)
        for q, k, v in zip(q_SHC.split(lengths), k_SKC.split(lengths), v_SKC.split(lengths))
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def causal_attention(
    q_SHC: Tensor, k_TKC: Tensor, v_TKC: Tensor, *, scale: float, window: int | None = None
) -> Tensor:
    """Attention of the last S of T tokens of one document, [S, H, C]."""
    num_queries, num_keys = q_SHC.shape[0], k_TKC.shape[0]
    if num_queries == num_keys and (window is None or window >= num_keys):
        return _attend(q_SHC, k_TKC, v_TKC, scale, None, is_causal=num_queries > 1)
    outputs = []
    for start in range(0, num_queries, _QUERY_BLOCK):
        end = min(start + _QUERY_BLOCK, num_queries)
        past = num_keys - num_queries
        first = 0 if window is None else max(0, past + start - window + 1)
        last = past + end
        mask = _block_mask(past + start, past + end, first, last, window, q_SHC.device)
        outputs.append(
            _attend(q_SHC[start:end], k_TKC[first:last], v_TKC[first:last], scale, mask, False)
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _block_mask(
    query_start: int,
    query_end: int,
    key_start: int,
    key_end: int,
    window: int | None,
    device: torch.device,
) -> Tensor | None:
    if query_end - query_start == 1:
        return None
    query = torch.arange(query_start, query_end, device=device)[:, None]
    key = torch.arange(key_start, key_end, device=device)[None, :]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def _attend(
    q_SHC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    scale: float,
    mask_ST: Tensor | None,
    is_causal: bool,
) -> Tensor:
    out_1HSC = F.scaled_dot_product_attention(
        q_SHC.transpose(0, 1)[None],
        k_TKC.transpose(0, 1)[None],
        v_TKC.transpose(0, 1)[None],
        attn_mask=mask_ST,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q_SHC.shape[1] != k_TKC.shape[1],
    )
    return out_1HSC[0].transpose(0, 1)
