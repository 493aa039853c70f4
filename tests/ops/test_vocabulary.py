"""A vocabulary in uneven parts: embedding, logits and loss equal the whole ones.

Legend: S tokens, N rows, D model, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phalanx.ops import loss as loss_module
from phalanx.ops.loss import counted_cross_entropy
from phalanx.ops.vocabulary import VocabularyPart
from tests.ranks import run_ranks

ROWS, MODEL, VOCAB, DIVISOR = 29, 12, 1031, 41
LOGIT_SCALES, SOFT_CAPS, CHUNK_BYTES = (1.0, 1e3), (None, 5.0), (1, 5 * 344 * 8, 1 << 30)


def tensors(scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(8)
    hidden_SD = scale * torch.randn(ROWS, MODEL, dtype=torch.float64, generator=draw)
    head_VD = torch.randn(VOCAB, MODEL, dtype=torch.float64, generator=draw)
    counted_N = torch.randperm(ROWS, generator=draw)[:17]
    targets_N = torch.randint(VOCAB, (17,), generator=draw)
    targets_N[:4] = torch.tensor([0, VOCAB - 1, 343, 344])  # ends and a border of the parts
    return hidden_SD.requires_grad_(), head_VD.requires_grad_(), counted_N, targets_N


def part_of(part: VocabularyPart, rank: int, whole_VD: Tensor) -> Tensor:
    return whole_VD.split(part.sizes)[rank].detach().clone().requires_grad_()


def losses_of(rank: int, world_size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(loss, gradient of the hidden states, of this rank's part of the head) of every case."""
    loss_module._TILE_ELEMENTS = 2048  # several tiles, the last one short
    part = VocabularyPart(dist.group.WORLD, VOCAB)
    found = []
    for scale in LOGIT_SCALES:
        for soft_cap in SOFT_CAPS:
            for chunk_bytes in CHUNK_BYTES:
                hidden_SD, whole_VD, counted_N, targets_N = tensors(scale)
                head_vD = part_of(part, rank, whole_VD)
                loss = counted_cross_entropy(
                    hidden_SD, head_vD, counted_N, targets_N, num_counted_global=DIVISOR,
                    soft_cap=soft_cap, chunk_bytes=chunk_bytes, part=part,
                )  # fmt: skip
                found.append((loss.detach(), *torch.autograd.grad(loss, (hidden_SD, head_vD))))
    return found


def whole_losses() -> list[tuple[Tensor, Tensor, Tensor]]:
    found = []
    for scale in LOGIT_SCALES:
        for soft_cap in SOFT_CAPS:
            hidden_SD, head_VD, counted_N, targets_N = tensors(scale)
            logits_NV = hidden_SD[counted_N] @ head_VD.t()
            if soft_cap is not None:
                logits_NV = soft_cap * torch.tanh(logits_NV / soft_cap)
            loss = F.cross_entropy(logits_NV, targets_N, reduction="sum") / DIVISOR
            grads = torch.autograd.grad(loss, (hidden_SD, head_VD))
            found += [(loss.detach(), *grads)] * len(CHUNK_BYTES)
    return found


@pytest.mark.dist
@pytest.mark.parametrize("degree", [1, 3])
def test_loss_of_parts_equals_plain_cross_entropy(degree):
    ranks = run_ranks(losses_of, degree, backend="logged_gloo")
    for at, (loss, hidden_grad_SD, head_grad_VD) in enumerate(whole_losses()):
        for of_rank in ranks:
            torch.testing.assert_close(of_rank[at][0], loss, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(of_rank[at][1], hidden_grad_SD, rtol=1e-11, atol=1e-12)
        joined = torch.cat([of_rank[at][2] for of_rank in ranks])
        torch.testing.assert_close(joined, head_grad_VD, rtol=1e-11, atol=1e-12)


SMOOTHED, IGNORED = 0.1, -100


def with_ignored(targets_N: Tensor) -> Tensor:
    targets_N = targets_N.clone()
    targets_N[5:8] = IGNORED
    return targets_N


def smoothed_losses(rank: int, world_size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """As `losses_of`, with smoothed targets, some of which do not count."""
    loss_module._TILE_ELEMENTS = 2048
    part = VocabularyPart(dist.group.WORLD, VOCAB)
    found = []
    for scale in LOGIT_SCALES:
        for soft_cap in SOFT_CAPS:
            hidden_SD, whole_VD, counted_N, targets_N = tensors(scale)
            head_vD = part_of(part, rank, whole_VD)
            loss = counted_cross_entropy(
                hidden_SD, head_vD, counted_N, with_ignored(targets_N),
                num_counted_global=DIVISOR, soft_cap=soft_cap, chunk_bytes=CHUNK_BYTES[1],
                part=part if world_size > 1 else None, label_smoothing=SMOOTHED,
                ignore_index=IGNORED,
            )  # fmt: skip
            found.append((loss.detach(), *torch.autograd.grad(loss, (hidden_SD, head_vD))))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_smoothed_targets_of_parts_are_those_of_the_whole_vocabulary(degree):
    ranks = run_ranks(smoothed_losses, degree, backend="logged_gloo")
    cases = [(scale, soft_cap) for scale in LOGIT_SCALES for soft_cap in SOFT_CAPS]
    for at, (scale, soft_cap) in enumerate(cases):
        hidden_SD, head_VD, counted_N, targets_N = tensors(scale)
        logits_NV = hidden_SD[counted_N] @ head_VD.t()
        if soft_cap is not None:
            logits_NV = soft_cap * torch.tanh(logits_NV / soft_cap)
        options = {"reduction": "sum", "label_smoothing": SMOOTHED, "ignore_index": IGNORED}
        loss = F.cross_entropy(logits_NV, with_ignored(targets_N), **options) / DIVISOR
        hidden_grad_SD, head_grad_VD = torch.autograd.grad(loss, (hidden_SD, head_VD))
        for of_rank in ranks:
            torch.testing.assert_close(of_rank[at][0], loss.detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(of_rank[at][1], hidden_grad_SD, rtol=1e-11, atol=1e-12)
        joined = torch.cat([of_rank[at][2] for of_rank in ranks])
        torch.testing.assert_close(joined, head_grad_VD, rtol=1e-11, atol=1e-12)


def narrow_losses(rank: int, world_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    part = VocabularyPart(dist.group.WORLD, VOCAB)
    hidden_SD, whole_VD, counted_N, targets_N = tensors(1.0)
    hidden_SD = hidden_SD.detach().to(dtype).requires_grad_()
    head_vD = part_of(part, rank, whole_VD.to(dtype))
    loss = counted_cross_entropy(
        hidden_SD, head_vD, counted_N, targets_N, num_counted_global=DIVISOR, soft_cap=5.0,
        chunk_bytes=5 * 344 * 4, part=part if world_size > 1 else None,
    )  # fmt: skip
    return loss.detach(), *torch.autograd.grad(loss, (hidden_SD, head_vD))


@pytest.mark.dist
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2**-24), (torch.bfloat16, 2**-9)])
def test_narrow_parts_agree_with_the_whole_in_the_same_dtype(dtype, rounding):
    """A row's gradient is rounded in each of three parts, in two sums and in the whole: six
    roundings of what a part can hold, which is a row of the head; float32's products round too."""
    ((loss, hidden_grad_SD, head_grad_VD),) = run_ranks(
        narrow_losses, 1, dtype, backend="logged_gloo"
    )
    ranks = run_ranks(narrow_losses, 3, dtype, backend="logged_gloo")
    bound = 6 * rounding * float(tensors(1.0)[1].detach().abs().max()) / DIVISOR
    bound = max(bound, 1e-6)
    for of_rank in ranks:
        torch.testing.assert_close(of_rank[0], loss, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(of_rank[1], hidden_grad_SD, rtol=0.0, atol=bound)
    joined = torch.cat([of_rank[2] for of_rank in ranks])
    torch.testing.assert_close(joined, head_grad_VD, rtol=0.0, atol=bound)


def embedded_and_scored(rank: int, world_size: int) -> tuple[Tensor, ...]:
    part = VocabularyPart(dist.group.WORLD, VOCAB)
    hidden_SD, whole_VD, _, _ = tensors(1.0)
    table_vD = part_of(part, rank, whole_VD)
    rows_SD = part.embed(torch.tensor([0, 343, 344, VOCAB - 1]), table_vD)
    logits_SV = part.logits(hidden_SD, table_vD)
    weights_SV = torch.arange(ROWS * VOCAB, dtype=torch.float64).view(ROWS, VOCAB).cos()
    grads = torch.autograd.grad((logits_SV * weights_SV).sum(), (hidden_SD, table_vD))
    dist.all_reduce(rows_SD.detach())
    return rows_SD.detach(), logits_SV.detach(), *grads


@pytest.mark.dist
def test_embedding_and_logits_of_parts_are_the_whole_ones():
    ranks = run_ranks(embedded_and_scored, 3, backend="logged_gloo")
    hidden_SD, whole_VD, _, _ = tensors(1.0)
    logits_SV = hidden_SD @ whole_VD.t()
    weights_SV = torch.arange(ROWS * VOCAB, dtype=torch.float64).view(ROWS, VOCAB).cos()
    grads = torch.autograd.grad((logits_SV * weights_SV).sum(), (hidden_SD, whole_VD))
    for rows_SD, found_SV, hidden_grad_SD, _ in ranks:
        assert torch.equal(rows_SD, whole_VD[[0, 343, 344, VOCAB - 1]].detach())
        torch.testing.assert_close(found_SV, logits_SV.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(hidden_grad_SD, grads[0], rtol=1e-11, atol=1e-11)
    joined = torch.cat([of_rank[3] for of_rank in ranks])
    torch.testing.assert_close(joined, grads[1], rtol=1e-11, atol=1e-11)
