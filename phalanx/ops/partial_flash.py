"""Partial attention by torch's flash kernel for CPUs, where queries fall into few runs.

Legend: Q query rows, T key rows, H query heads, K key/value heads, C channels per head.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from phalanx.layout.token_layout import KeysSeen
from phalanx.ops.partial_sum import add_partial_

_FEWEST_QUERIES = 32  # of a run on average: below, the calls cost more than they save
_FEWEST_RUNS = 4  # are taken, however short they are
MOST_REMEMBERED = 256  # of a layer: one for each rank of a ring, with and without a window
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Run(NamedTuple):
    """Neighbouring queries that a kernel takes in one call.

    Attributes:
        rows, keys: the queries, and the keys that any of them sees.
        is_causal: the last query sees all `keys`, each one before it one fewer at their end;
            else all see all.
        window: keys that each of them sees, where that is the same for all but not all; or None.
    """

    rows: slice
    keys: slice
    is_causal: bool
    window: int | None


@lru_cache(MOST_REMEMBERED)  # every layer asks for the same
def runs_of(seen: KeysSeen) -> tuple[Run, ...] | None:
    """The queries that see anything, in few runs; None where those would be short."""
    first_Q, last_Q = seen.first_Q, seen.last_Q
    sees_Q = last_Q > first_Q
    oldest, newest = np.diff(first_Q), np.diff(last_Q)
    joins = sees_Q[1:] & sees_Q[:-1] & (oldest <= newest) & (newest <= 1)
    kinds = np.where(joins, oldest + newest, -1)  # 0: all see all, 1: causal, 2: within a window
    changes = [*(np.flatnonzero(np.diff(kinds)) + 1), len(kinds)]
    runs, row, most = [], 0, max(_FEWEST_RUNS, len(first_Q) // _FEWEST_QUERIES)
    while row < len(first_Q) and len(runs) <= most:
        kind = int(kinds[row]) if row < len(kinds) else -1
        end = row + 1 if kind < 0 else changes[bisect_right(changes, row)] + 1
        if sees_Q[row]:
            keys = slice(int(first_Q[row]), int(last_Q[end - 1]))
            window = int(last_Q[row] - first_Q[row]) if kind == 2 else None
            runs.append(Run(slice(row, int(end)), keys, kind > 0, window))
        row = int(end)
    return tuple(runs) if len(runs) <= most else None


def serves_flash(q_QHC: Tensor, runs: Sequence[Run]) -> bool:
    """Whether the functions below take these; the kernel knows no windows."""
    plain = type(q_QHC) in (Tensor, torch.nn.Parameter) and q_QHC.device.type == "cpu"
    return plain and all(run.window is None for run in runs)


def flash_forward(
    q_QHC: Tensor, k_TKC: Tensor, v_TKC: Tensor, runs: Sequence[Run], scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse), as `partial_attention` gives them."""
    q_QHC, k_TKC, v_TKC = _wide(q_QHC, k_TKC, v_TKC)
    out_QHC = torch.zeros_like(q_QHC)
    lse_QH = q_QHC.new_full(q_QHC.shape[:2], -torch.inf)
    for rows, keys, is_square in _calls(runs):
        inputs = (_by_head(x) for x in (q_QHC[rows], k_TKC[keys], v_TKC[keys]))
        out, lse = _forward(*inputs, 0.0, is_square, scale=scale)
        add_partial_(out_QHC[rows], lse_QH[rows], out[0].transpose(0, 1), lse[0].T)
    return out_QHC, lse_QH


def flash_backward(
    grad_QHC: Tensor,
    q_QHC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    out_QHC: Tensor,
    lse_QH: Tensor,
    runs: Sequence[Run],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, as `partial_attention_backward` gives them."""
    grad_QHC, q_QHC, k_TKC, v_TKC = _wide(grad_QHC, q_QHC, k_TKC, v_TKC)
    out_QHC, lse_QH = out_QHC.to(q_QHC.dtype), lse_QH.to(q_QHC.dtype)
    grads = torch.zeros_like(q_QHC), torch.zeros_like(k_TKC), torch.zeros_like(v_TKC)
    for rows, keys, is_square in _calls(runs):
        inputs = (grad_QHC[rows], q_QHC[rows], k_TKC[keys], v_TKC[keys], out_QHC[rows])
        whole = (*(_by_head(x) for x in inputs), lse_QH[rows].T.unsqueeze(0).contiguous())
        parts = _backward(*whole, 0.0, is_square, scale=scale)
        for total, at, part in zip(grads, (rows, keys, keys), parts):
            total[at] += part[0].transpose(0, 1)
    return grads


def _calls(runs: Sequence[Run]) -> Iterator[tuple[slice, slice, bool]]:
    """(queries, keys, whether causal): the kernel's mask is that of a square at the first key, so
    a causal run is a full oblong and the square behind it."""
    for run in runs:
        if not run.is_causal:
            yield run.rows, run.keys, False
            continue
        square = run.keys.stop - (run.rows.stop - run.rows.start)
        if square > run.keys.start:
            yield run.rows, slice(run.keys.start, square), False
        yield run.rows, slice(square, run.keys.stop), True


def _wide(*tensors: Tensor) -> list[Tensor]:
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _by_head(x_QHC: Tensor) -> Tensor:
    """[1, H, Q, C]."""
    return x_QHC.transpose(0, 1).unsqueeze(0)
