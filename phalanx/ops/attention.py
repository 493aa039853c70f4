"""Causal attention over packed rows, one document at a time; the same call on CPU and CUDA.

Legend: S query rows, T key rows, H query heads, K key/value heads, C channels per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.errors import JobError
from phalanx.ops import native
from phalanx.ops.placed import placed

_QUERY_BLOCK = 128  # a block's scores stay in cache; measured best of 64 to 512 on AVX-512
_MOST_FLASH_CHANNELS = 256


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
        return _bounds_tensor(self.bounds, device)


@lru_cache(maxsize=8)  # every layer asks for the same one
def _bounds_tensor(bounds: tuple[int, ...], device: torch.device) -> Tensor:
    return placed(np.array(bounds, dtype=np.int32), device)


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
    if _has_varlen_kernel(q_SHC):
        return _varlen_attention(q_SHC, k_SKC, v_SKC, documents, scale, window)
    if native.serves_attention(q_SHC, k_SKC, v_SKC, max(documents.lengths)):
        return _CompiledAttention.apply(q_SHC, k_SKC, v_SKC, documents.bounds, scale, window)
    lengths = documents.lengths
    outputs = [
        causal_attention(q, k, v, scale=scale, window=window)
        for q, k, v in zip(q_SHC.split(lengths), k_SKC.split(lengths), v_SKC.split(lengths))
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _has_varlen_kernel(q_SHC: Tensor) -> bool:
    """What flash attention is compiled for: Gemma 4's full layers have 512 channels and are not."""
    channels = q_SHC.shape[-1]
    is_compiled_for = channels % 8 == 0 and channels <= _MOST_FLASH_CHANNELS
    return q_SHC.is_cuda and q_SHC.dtype in (torch.bfloat16, torch.float16) and is_compiled_for


def _varlen_attention(
    q_SHC: Tensor,
    k_SKC: Tensor,
    v_SKC: Tensor,
    documents: Documents,
    scale: float,
    window: int | None,
) -> Tensor:
    """torch's CUDA kernel for packed rows (unrun on CUDA)."""
    from torch.nn.attention.varlen import varlen_attn

    bounds, longest = documents.bounds_tensor(q_SHC.device), max(documents.lengths)
    left = -1 if window is None else window - 1  # the kernel's window excludes the query itself
    return varlen_attn(
        q_SHC,
        k_SKC,
        v_SKC,
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=(left, 0),
        enable_gqa=q_SHC.shape[1] != k_SKC.shape[1],
    )


class _CompiledAttention(torch.autograd.Function):
    """forward(q, k, v, bounds, scale, window): all documents of a row in one call of ops.native."""

    @staticmethod
    def forward(ctx, q_SHC, k_SKC, v_SKC, bounds, scale, window):
        ctx.save_for_backward(q_SHC, k_SKC, v_SKC)
        ctx.options = (bounds, scale, window)
        return native.attention_forward(q_SHC, k_SKC, v_SKC, *ctx.options)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SHC):
        grads = native.attention_backward(grad_SHC, *ctx.saved_tensors, *ctx.options)
        return *grads, None, None, None


def causal_attention(
    q_SHC: Tensor, k_TKC: Tensor, v_TKC: Tensor, *, scale: float, window: int | None = None
) -> Tensor:
    """Attention of the last S of the T tokens of one document, [S, H, C].

    Blocks of queries meet all the keys that they see, so the largest temporary is
    H x block x T and the masked half of the scores is not computed. In 16-bit dtypes scores are
    rounded relative to the largest of their row, so those that matter keep their digits; the
    softmax is computed in float32. A single token without gradient is computed in float32: CPU
    libraries compile and keep a 16-bit kernel for every length that a growing cache has. No second
    derivative.
    """
    inputs = (q_SHC, k_TKC, v_TKC)
    needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
    if q_SHC.shape[0] == 1 and q_SHC.element_size() < 4 and not needs_grad:
        wide = [each.float() for each in inputs]
        return _BlockedAttention.apply(*wide, scale, window).to(q_SHC.dtype)
    return _BlockedAttention.apply(*inputs, scale, window)


@dataclass(frozen=True)
class _Block:
    """Queries [start, end) of S and the keys [first, last) of T that any of them sees."""

    start: int
    end: int
    first: int
    last: int
    window: int | None

    def mask_(self, scores_KRT: Tensor) -> Tensor:
        """Set what a query must not see to -inf, in place; rows are (query heads of a group, S)."""
        per_query = scores_KRT.unflatten(1, (-1, self.end - self.start))
        num_queries, num_keys = per_query.shape[2:]
        if num_queries > 1:
            later = _upper_triangle(num_queries, num_queries, 1, scores_KRT.device)
            per_query[..., num_keys - num_queries :].masked_fill_(later, -torch.inf)
        num_behind = 0 if self.window is None else num_keys - self.window
        if num_behind > 0:  # keys behind the window of the last query; of earlier ones fewer
            diagonal = num_behind - num_queries + 1
            seen = _upper_triangle(num_queries, num_behind, diagonal, scores_KRT.device)
            per_query[..., :num_behind].masked_fill_(~seen, -torch.inf)
        return scores_KRT


def _blocks(num_queries: int, num_keys: int, window: int | None) -> list[_Block]:
    past, blocks = num_keys - num_queries, []
    for start in range(0, num_queries, _QUERY_BLOCK):
        end = min(start + _QUERY_BLOCK, num_queries)
        first = 0 if window is None else max(0, past + start - window + 1)
        blocks.append(_Block(start, end, first, past + end, window))
    return blocks


@lru_cache(maxsize=64)
def _upper_triangle(rows: int, columns: int, diagonal: int, device: torch.device) -> Tensor:
    """True where column - row >= diagonal."""
    return torch.ones(rows, columns, dtype=torch.bool, device=device).triu(diagonal)


class _BlockedAttention(torch.autograd.Function):
    """forward(q [S, H, C], k [T, K, C], v [T, K, C], scale, window) -> [S, H, C]."""

    @staticmethod
    def forward(ctx, q_SHC, k_TKC, v_TKC, scale, window):
        out_SHC = torch.empty_like(q_SHC)
        peaks_SH1 = None
        if q_SHC.element_size() < 4:
            peaks_SH1 = torch.empty_like(q_SHC[..., :1], memory_format=torch.contiguous_format)
        k_KCT, v_KTC = k_TKC.permute(1, 2, 0), v_TKC.transpose(0, 1)
        for block in _blocks(q_SHC.shape[0], k_TKC.shape[0], window):
            rows, keys = slice(block.start, block.end), slice(block.first, block.last)
            q_KRC = _by_group(q_SHC[rows] * scale, k_TKC.shape[1])
            peak_KR1 = None
            if peaks_SH1 is not None:
                peak_KR1 = _row_peaks(q_KRC, k_KCT[..., keys], block)
                peaks_SH1[rows] = _by_row(peak_KR1, block)
            p_KRT = _probabilities(q_KRC, k_KCT[..., keys], peak_KR1, block)
            out_SHC[rows] = _by_row(p_KRT @ v_KTC[:, keys], block)
        ctx.save_for_backward(q_SHC, k_TKC, v_TKC, peaks_SH1)
        ctx.scale, ctx.window = scale, window
        return out_SHC

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SHC):
        q_SHC, k_TKC, v_TKC, peaks_SH1 = ctx.saved_tensors
        num_groups, wide = k_TKC.shape[1], torch.promote_types(q_SHC.dtype, torch.float32)
        k_KTC, v_KTC = k_TKC.transpose(0, 1), v_TKC.transpose(0, 1)
        grad_q_SHC = torch.empty_like(q_SHC)
        grad_k_KTC = torch.zeros_like(k_KTC, dtype=wide)
        grad_v_KTC = torch.zeros_like(v_KTC, dtype=wide)
        for block in _blocks(q_SHC.shape[0], k_TKC.shape[0], ctx.window):
            rows, keys = slice(block.start, block.end), slice(block.first, block.last)
            q_KRC = _by_group(q_SHC[rows] * ctx.scale, num_groups)
            grad_KRC = _by_group(grad_SHC[rows], num_groups)
            peak_KR1 = None if peaks_SH1 is None else _by_group(peaks_SH1[rows], num_groups)
            p_KRT = _probabilities(q_KRC, k_KTC[:, keys].mT, peak_KR1, block)
            grad_v_KTC[:, keys] += p_KRT.mT @ grad_KRC
            grad_p_KRT = grad_KRC @ v_KTC[:, keys].mT
            grad_s_KRT = torch._softmax_backward_data(grad_p_KRT, p_KRT, -1, p_KRT.dtype)
            grad_q_SHC[rows] = _by_row(grad_s_KRT @ k_KTC[:, keys], block)
            grad_k_KTC[:, keys] += grad_s_KRT.mT @ q_KRC
        return (
            grad_q_SHC.mul_(ctx.scale),
            grad_k_KTC.transpose(0, 1).to(k_TKC.dtype),
            grad_v_KTC.transpose(0, 1).to(v_TKC.dtype),
            None,
            None,
        )


def _by_group(x_SHC: Tensor, num_groups: int) -> Tensor:
    """[K, R, C]: the rows R of a key/value head are its query heads times S."""
    x_SKGC = x_SHC.unflatten(1, (num_groups, -1))
    return x_SKGC.permute(1, 2, 0, 3).flatten(1, 2)


def _by_row(x_KRC: Tensor, block: _Block) -> Tensor:
    """Inverse of `_by_group`, [S, H, C]."""
    x_KGSC = x_KRC.unflatten(1, (-1, block.end - block.start))
    return x_KGSC.permute(2, 0, 1, 3).flatten(1, 2)


def _row_peaks(q_KRC: Tensor, k_KCT: Tensor, block: _Block) -> Tensor:
    """The largest score of each row, rounded, [K, R, 1]."""
    return block.mask_(torch.bmm(q_KRC, k_KCT)).amax(-1, keepdim=True)


def _probabilities(q_KRC: Tensor, k_KCT: Tensor, peak_KR1: Tensor | None, block: _Block) -> Tensor:
    """Softmax of the scores of scaled queries; scores less `peak` are what gets rounded."""
    if peak_KR1 is None:
        scores_KRT = torch.bmm(q_KRC, k_KCT)
    else:  # the product is summed with the peak in float32 before it is rounded
        scores_KRT = torch.baddbmm(-peak_KR1, q_KRC, k_KCT)
    return block.mask_(scores_KRT).softmax(-1)
