"""Cross-entropy over a large vocabulary, without ever holding all logits.

Legend: N counted positions, D model, V vocabulary; `n` and `v` a tile of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.ops import native
from phalanx.ops.tensor_exchange import enter
from phalanx.ops.vocabulary import VocabularyPart

# A tile's float32 logits should stay in a core's L2 cache; a chunk's logits bound the memory.
_TILE_ELEMENTS = 1 << 18
_CHUNK_BYTES = 1 << 27
_PIECE_ELEMENTS = 1 << 20
# Other devices wait longer for the start of an operator than for work on so little: in tiles that
# suit a CPU the loss of 4,096 rows over 128k tokens would be 80,000 operators, here it is 1,400.
_DEVICE_ELEMENTS = 1 << 24
# CPU libraries compile and keep a kernel for every shape of a product in 16 bits (0.7 MB with AMX),
# so rows are filled up with zeros: a few shapes instead of one per number of targets.
_ROW_MULTIPLE = 32


def counted_cross_entropy(
    hidden_SD: Tensor,
    head_VD: Tensor,
    counted_N: Tensor,
    targets_N: Tensor,
    *,
    num_counted_global: int | Tensor,
    soft_cap: float | None = None,
    chunk_bytes: int = _CHUNK_BYTES,
    part: VocabularyPart | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
) -> Tensor:
    """Sum of -log p(target) over the counted positions, divided by the global number of them.

    The sum of its values over all ranks and micro-batches is the mean over the global batch, so
    gradients depend neither on the layout nor on accumulation.

    Gradients are computed in the forward pass, chunk by chunk, so that logits are computed once and
    dropped. Differences from `F.cross_entropy` on all logits: none in the result; no second
    derivative.

    Args:
        hidden_SD: output of the decoder, after its last norm.
        head_VD: head weights (the embedding when tied); with `part`, this rank's rows of them.
        counted_N: rows of `hidden_SD` whose prediction counts, int64.
        targets_N: the token that each of them should predict, int64.
        num_counted_global: counted positions of the whole global batch.
        soft_cap: c of c * tanh(logits / c); None: logits as they are.
        chunk_bytes: bound on the logits held at once, in the dtype of `hidden_SD`.
        part: of the vocabulary, whose ranks all pass the same rows. Instead of logits they exchange
            three numbers per row, and once the gradient of the rows, summed.
        label_smoothing: share of the target that all V tokens have in equal parts, as
            `F.cross_entropy` has it; V is the whole vocabulary, also with `part`.
        ignore_index: positions with this target do not count; who counts for the divisor leaves
            them out too. None: there are none.

    Returns:
        A scalar, float32 (float64 for float64 inputs); with `part`, the same on all its ranks.

    Source of the split: Shoeybi et al., arXiv 1909.08053, section 3.
    """
    needs = torch.is_grad_enabled() and (hidden_SD.requires_grad or head_VD.requires_grad)
    if ignore_index is not None:
        is_target_N = targets_N != ignore_index
        counted_N, targets_N = counted_N[is_target_N], targets_N[is_target_N]
    rows_ND = hidden_SD.index_select(0, counted_N)
    if part is not None:
        rows_ND = enter(rows_ND, part.group)
    split = _Split(soft_cap, chunk_bytes, part, label_smoothing)
    total = _CrossEntropySum.apply(rows_ND, head_VD, targets_N, split, needs)
    return total / num_counted_global


def token_losses(
    hidden_SD: Tensor,
    head_VD: Tensor,
    counted_N: Tensor,
    targets_N: Tensor,
    *,
    soft_cap: float | None = None,
    chunk_bytes: int = _CHUNK_BYTES,
) -> Tensor:
    """-log p(target) of each counted position, [N], without gradient. Arguments as above."""
    split = _Split(soft_cap, chunk_bytes, None)
    with torch.no_grad():
        rows_ND = hidden_SD.index_select(0, counted_N)
        parts = [
            _Chunk(rows_nD, head_VD, targets_n, split).losses_n[:count]
            for rows_nD, targets_n, count in split.chunks(rows_ND, head_VD, targets_N)
        ]
        return torch.cat(parts)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _at_once(x: Tensor, on_cpu: int) -> int:
    """Elements that are worked on together on the device of `x`."""
    return on_cpu if x.device.type == "cpu" else _DEVICE_ELEMENTS


class _Split(NamedTuple):
    """How the logits are computed: capped, so many bytes at once, of a part of the vocabulary; and
    which share of a target is spread over it."""

    soft_cap: float | None
    chunk_bytes: int
    part: VocabularyPart | None
    smoothing: float = 0.0

    def chunks(
        self, rows_ND: Tensor, head_VD: Tensor, targets_N: Tensor
    ) -> list[tuple[Tensor, Tensor, int]]:
        """Rows and targets in chunks of equal sizes, as products of few rows are slow; as many on
        every rank, whose parts may differ by a token. Rows of 16 bits are filled up with zeros;
        the number says how many count."""
        longest = head_VD.shape[0] if self.part is None else self.part.sizes[0]
        most = max(1, self.chunk_bytes // (longest * rows_ND.element_size()))
        num_chunks = max(1, -(-rows_ND.shape[0] // most))
        size = max(1, -(-rows_ND.shape[0] // num_chunks))
        pairs = zip(rows_ND.split(size), targets_N.split(size))
        return [(*_filled_up(rows_nD, targets_n), len(targets_n)) for rows_nD, targets_n in pairs]


def _filled_up(rows_nD: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
    missing = -rows_nD.shape[0] % _ROW_MULTIPLE
    if rows_nD.element_size() > 2 or rows_nD.device.type != "cpu" or not missing:
        return rows_nD, targets_n
    return F.pad(rows_nD, (0, 0, 0, missing)), F.pad(targets_n, (0, missing))


def _capped(logits_nv: Tensor, soft_cap: float | None) -> Tensor:
    """Logits in at least float32, always a copy."""
    if soft_cap is None:
        return logits_nv.to(_wide(logits_nv), copy=True)
    return (logits_nv.to(_wide(logits_nv)) / soft_cap).tanh_().mul_(soft_cap)


class _Chunk:
    """Logits of n rows in tiles of the vocabulary, and what follows from them.

    Attributes:
        tiles: (first token, raw logits [n, v]) in the dtype of the rows.
        lse_n1: log-sum-exp of each row's capped logits.
        losses_n: -log p(target) of each row.
    """

    def __init__(self, rows_nD: Tensor, head_VD: Tensor, targets_n: Tensor, split: _Split) -> None:
        self.soft_cap, self.smoothing = split.soft_cap, split.smoothing
        num_tokens = head_VD.shape[0] if split.part is None else split.part.num_tokens
        self.spread = split.smoothing / num_tokens  # of a target on every token
        self.targets_n1 = targets_n[:, None] - (0 if split.part is None else split.part.first)
        size = max(256, _at_once(rows_nD, _TILE_ELEMENTS) // max(1, rows_nD.shape[0]))
        self.tiles: list[tuple[int, Tensor]] = []
        peak_n1 = rows_nD.new_full((rows_nD.shape[0], 1), -torch.inf, dtype=_wide(rows_nD))
        sum_n1, target_n1 = torch.zeros_like(peak_n1), torch.zeros_like(peak_n1)
        for start in range(0, head_VD.shape[0], size):
            raw_nv = F.linear(rows_nD, head_VD[start : start + size])
            self.tiles.append((start, raw_nv))
            self._take(start, raw_nv, peak_n1, sum_n1, target_n1)
        if split.part is not None:
            peak_n1, sum_n1, target_n1 = _over_parts(peak_n1, sum_n1, target_n1, split.part.group)
        self.lse_n1 = peak_n1 + sum_n1.log()
        self.losses_n = (self.lse_n1 - target_n1)[:, 0]

    def _take(
        self, start: int, raw_nv: Tensor, peak_n1: Tensor, sum_n1: Tensor, target_n1: Tensor
    ) -> None:
        """A tile into the running peak, sum of exponentials below it and target's logit: with
        smoothing, the mean logit under the smoothed target."""
        if self._is_native(raw_nv):
            native.loss_tile_(
                raw_nv, self.targets_n1, start, self.soft_cap, peak_n1, sum_n1, target_n1
            )
            return
        logits_nv = _capped(raw_nv, self.soft_cap)
        at_n1, inside_n1 = self._targets_in(start, raw_nv.shape[1])
        target_n1 += (1.0 - self.smoothing) * logits_nv.gather(1, at_n1) * inside_n1
        if self.smoothing:
            target_n1 += self.spread * logits_nv.sum(-1, keepdim=True)
        higher_n1 = torch.maximum(peak_n1, logits_nv.amax(-1, keepdim=True))
        sum_n1 *= (peak_n1 - higher_n1).exp()
        sum_n1 += logits_nv.sub_(higher_n1).exp_().sum(-1, keepdim=True)
        peak_n1.copy_(higher_n1)

    def _is_native(self, raw_nv: Tensor) -> bool:
        return not self.smoothing and native.serves(raw_nv)

    def _targets_in(self, start: int, size: int) -> tuple[Tensor, Tensor]:
        """Where in the tile each row's target is (clamped), and whether it is there at all."""
        at_n1 = self.targets_n1 - start
        return at_n1.clamp(0, size - 1), (at_n1 >= 0) & (at_n1 < size)

    def logit_gradients(self) -> Iterator[tuple[int, Tensor]]:
        """(first token, d losses / d raw logits [n, v]) tile by tile, in the dtype of the rows.

        Once: a compiled form writes over the logits.
        """
        for start, raw_nv in self.tiles:
            if self._is_native(raw_nv):
                yield (
                    start,
                    native.loss_tile_gradient_(
                        raw_nv, self.targets_n1, start, self.soft_cap, self.lse_n1
                    ),
                )
                continue
            logits_nv = _capped(raw_nv, self.soft_cap)
            slope = None if self.soft_cap is None else 1.0 - (logits_nv / self.soft_cap).square()
            grad_nv = logits_nv.sub_(self.lse_n1).exp_()
            at_n1, inside_n1 = self._targets_in(start, raw_nv.shape[1])
            grad_nv.scatter_add_(1, at_n1, (self.smoothing - 1.0) * inside_n1.to(grad_nv.dtype))
            if self.smoothing:
                grad_nv -= self.spread
            if slope is not None:
                grad_nv *= slope
            yield start, grad_nv.to(raw_nv.dtype)


def _over_parts(
    peak_n1: Tensor, sum_n1: Tensor, target_n1: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Highest logit, sum of exponentials below it and target's logit, over all parts."""
    highest_n1 = peak_n1.clone()
    dist.all_reduce(highest_n1, dist.ReduceOp.MAX, group=group)
    both_n2 = torch.cat([sum_n1 * (peak_n1 - highest_n1).exp(), target_n1], dim=1)
    dist.all_reduce(both_n2, group=group)
    return highest_n1, both_n2[:, :1], both_n2[:, 1:]


def _chunk_loss(
    rows_nD: Tensor,
    head_VD: Tensor,
    targets_n: Tensor,
    count: int,
    split: _Split,
    needs_grad: bool,
    head_grad_VD: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Sum of the losses of the first `count` rows, and their gradient; adds to the head's.

    A function of its own, so that its logits are gone before those of the next chunk are made.
    """
    chunk = _Chunk(rows_nD, head_VD, targets_n, split)
    loss = chunk.losses_n[:count].sum()
    if not needs_grad:
        return loss, None
    row_grad_nD = torch.zeros_like(rows_nD, dtype=_wide(rows_nD))
    add = None if head_grad_VD is None else _TileSum(head_grad_VD)
    for start, grad_nv in chunk.logit_gradients():
        row_grad_nD += grad_nv @ head_VD[start : start + grad_nv.shape[1]]
        if add is not None:
            add(start, grad_nv.t() @ rows_nD)
    return loss, row_grad_nD[:count].to(rows_nD.dtype)


class _TileSum:
    """Adds tiles to the gradient of a head, which may be wider than they are.

    On CPUs torch widens a tile into memory of its own before it adds: megabytes that the system
    maps and takes back for every tile, a seventh of the time. Here all share one.
    """

    def __init__(self, total_VD: Tensor) -> None:
        self._total_VD = total_VD
        self._wide_vD: Tensor | None = None  # of the first tile, the longest

    def __call__(self, start: int, part_vD: Tensor) -> None:
        total_vD = self._total_VD[start : start + len(part_vD)]
        if part_vD.dtype != total_vD.dtype and part_vD.device.type == "cpu":
            if self._wide_vD is None:
                self._wide_vD = torch.empty_like(part_vD, dtype=total_vD.dtype)
            part_vD = self._wide_vD[: len(part_vD)].copy_(part_vD)
        total_vD += part_vD


def _scaled(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`grad` times a scalar in another dtype, rounded once; piece by piece, since a head's wide
    product would take as much memory as all that is kept for it."""
    if grad.dtype is dtype:
        return (grad * factor).to(dtype)
    scaled = torch.empty(grad.shape, dtype=dtype, device=grad.device)
    size = _at_once(grad, _PIECE_ELEMENTS)
    pieces = grad.reshape(-1).split(size)
    buffer = torch.empty_like(pieces[0], dtype=torch.promote_types(grad.dtype, factor.dtype))
    for piece, target in zip(pieces, scaled.view(-1).split(size)):
        product = torch.mul(piece, factor, out=buffer[: piece.numel()])
        target.copy_(product)
    return scaled


class _CrossEntropySum(torch.autograd.Function):
    """Sum over rows of -log p(target), with gradients that are ready before the backward pass."""

    @staticmethod
    def forward(ctx, rows_ND, head_VD, targets_N, split, needs_grad):
        wide = _wide(rows_ND)
        total = rows_ND.new_zeros((), dtype=wide)
        row_grads: list[Tensor] = []
        chunks = split.chunks(rows_ND, head_VD, targets_N)
        head_grad_VD = None
        if needs_grad and ctx.needs_input_grad[1]:
            # several chunks are summed in float32, one needs no sum
            dtype = wide if len(chunks) > 1 else head_VD.dtype
            head_grad_VD = torch.zeros_like(head_VD, dtype=dtype)
        for rows_nD, targets_n, count in chunks:
            loss, row_grad_nD = _chunk_loss(
                rows_nD, head_VD, targets_n, count, split, needs_grad, head_grad_VD
            )
            total += loss
            if row_grad_nD is not None:
                row_grads.append(row_grad_nD)
        row_grad_ND = torch.cat(row_grads) if row_grads else None
        ctx.save_for_backward(row_grad_ND, head_grad_VD)
        ctx.head_dtype = head_VD.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total):
        row_grad_ND, head_grad_VD = ctx.saved_tensors
        if row_grad_ND is not None:
            row_grad_ND = _scaled(row_grad_ND, grad_total, row_grad_ND.dtype)
        if head_grad_VD is not None:
            head_grad_VD = _scaled(head_grad_VD, grad_total, ctx.head_dtype)
        return row_grad_ND, head_grad_VD, None, None, None
