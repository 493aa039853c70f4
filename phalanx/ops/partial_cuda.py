"""Partial attention by torch's flash kernels for CUDA (not run on CUDA yet: its calls are held to
torch's own description of the kernels, what they compute to a stand-in on CPUs).

Runs of one kind are one call: their queries one behind the other, and the keys of each. The kernel
aligns causal masks at the last query and the last key, which is what a run is. Its outputs have 16
bits; they are added in float32.

Legend: Q query rows, T key rows, H query heads, K key/value heads, C channels per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from phalanx.layout.token_layout import KeysSeen
from phalanx.ops.partial_flash import MOST_REMEMBERED, Run, runs_of
from phalanx.ops.placed import placed

_MOST_CHANNELS = 256
_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


def serves_cuda(q_QHC: Tensor, k_TKC: Tensor, v_TKC: Tensor) -> bool:
    """Whether the kernels are compiled for these."""
    channels = q_QHC.shape[-1]
    is_16_bit = q_QHC.dtype in (torch.bfloat16, torch.float16)
    return q_QHC.is_cuda and is_16_bit and channels % 8 == 0 and channels <= _MOST_CHANNELS


def cuda_forward(
    q_QHC: Tensor, k_TKC: Tensor, v_TKC: Tensor, seen: KeysSeen, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse), as `partial_attention` gives them; `runs_of(seen)` must be some."""
    out_QHC = torch.zeros_like(q_QHC, dtype=torch.float32)
    lse_QH = out_QHC.new_full(q_QHC.shape[:2], -torch.inf)
    for call in _calls(seen, q_QHC.device):
        inputs = _taken((q_QHC, k_TKC, v_TKC), (call.rows, call.keys, call.keys))
        out, lse_HQ, *_ = _forward(*inputs, *call.sizes, False, scale=scale, **call.window)
        at = call.rows
        if isinstance(at, range):
            at = torch.arange(at.start, at.stop, device=q_QHC.device)
        out_QHC.index_copy_(0, at, out.float())
        lse_QH.index_copy_(0, at, lse_HQ.T)
    return out_QHC, lse_QH


def cuda_backward(
    grad_QHC: Tensor,
    q_QHC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    out_QHC: Tensor,
    lse_QH: Tensor,
    seen: KeysSeen,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, as `partial_attention_backward` gives them."""
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q_QHC, k_TKC, v_TKC)]
    grad_QHC, out_QHC = grad_QHC.to(q_QHC.dtype), out_QHC.to(q_QHC.dtype)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_QHC.device)
    for call in _calls(seen, q_QHC.device):
        rows, keys = call.rows, call.keys
        inputs = (grad_QHC, q_QHC, k_TKC, v_TKC, out_QHC, lse_QH)
        *inputs, lse = _taken(inputs, (rows, rows, keys, keys, rows, rows))
        lse_HQ = lse.T.clone(memory_format=torch.contiguous_format)
        state = (no_dropout, no_dropout.new_empty(0))
        options = {"scale": scale, **call.window}
        parts = _backward(*inputs, lse_HQ, *call.sizes, *state, **options)
        for total, at, part in zip(grads, (rows, keys, keys), parts):
            if isinstance(at, range):
                _rows(total, at).add_(part)
            else:  # a key may be in several runs
                total.index_add_(0, at, part.float())
    return grads[0], grads[1], grads[2]


def _taken(tensors: Sequence[Tensor], rows: Sequence[Tensor | range]) -> list[Tensor]:
    """These rows, channels side by side in memory."""
    taken = [_rows(x, at) for x, at in zip(tensors, rows)]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in taken]


def _rows(x: Tensor, at: Tensor | range) -> Tensor:
    """A view where rows are neighbours, else a copy."""
    return x.narrow(0, at.start, len(at)) if isinstance(at, range) else x.index_select(0, at)


class _Call(NamedTuple):
    """Runs of one kind.

    Attributes:
        rows, keys: indices, each run's behind the one's before; a range where runs are neighbours.
        sizes: where runs begin and end in both, the longest of both, no dropout, whether causal.
    """

    rows: Tensor | range
    keys: Tensor | range
    sizes: tuple[Tensor, Tensor, int, int, float, bool]
    window: dict[str, Any]


@lru_cache(MOST_REMEMBERED)  # every layer asks for the same, and a copy to the device takes longer
def _calls(seen: KeysSeen, device: torch.device) -> tuple[_Call, ...]:
    def kind(run: Run) -> tuple[bool, int]:
        return run.is_causal, run.window or 0

    runs, calls = runs_of(seen), []
    assert runs is not None, "ask `runs_of` first"
    for (is_causal, window), group in groupby(sorted(runs, key=kind), key=kind):
        of_kind = list(group)
        rows, row_bounds, longest_rows = _packed([run.rows for run in of_kind], device)
        keys, key_bounds, longest_keys = _packed([run.keys for run in of_kind], device)
        sizes = (row_bounds, key_bounds, longest_rows, longest_keys, 0.0, is_causal)
        # the kernel's window leaves the query itself out
        sides = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
        calls.append(_Call(rows, keys, sizes, sides))
    return tuple(calls)


def _packed(slices: list[slice], device: torch.device) -> tuple[Tensor | range, Tensor, int]:
    lengths = [each.stop - each.start for each in slices]
    bounds = np.array([0, *accumulate(lengths)], dtype=np.int32)
    at: Tensor | range = range(slices[0].start, slices[-1].stop)
    if any(one.stop != other.start for one, other in pairwise(slices)):
        rows = [np.arange(each.start, each.stop) for each in slices]
        at = placed(np.concatenate(rows), device)
    return at, placed(bounds, device), max(lengths)
