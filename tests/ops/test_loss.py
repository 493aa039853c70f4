"""The chunked loss equals cross-entropy on all logits, in value and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.ops import loss as loss_module
from phalanx.ops.loss import counted_cross_entropy, token_losses
from tests.live_bytes import most_live_bytes
from tests.ops.largest_tensor import LargestTensor

ROWS, MODEL, VOCAB = 29, 12, 1031  # no size divides another


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles of the vocabulary even at these sizes, the last one short."""
    monkeypatch.setattr(loss_module, "_TILE_ELEMENTS", 2048)


def random_case(dtype=torch.float64):
    generator = torch.Generator().manual_seed(8)
    hidden = torch.randn(ROWS, MODEL, dtype=torch.float64, generator=generator)
    head = torch.randn(VOCAB, MODEL, dtype=torch.float64, generator=generator)
    counted = torch.randperm(ROWS, generator=generator)[:17]
    targets = torch.randint(VOCAB, (17,), generator=generator)
    targets[:3] = torch.tensor([0, VOCAB - 1, 255])
    return (
        hidden.to(dtype).requires_grad_(),
        head.to(dtype).requires_grad_(),
        counted,
        targets,
    )


def plain_loss(hidden, head, counted, targets, divisor, soft_cap):
    logits = hidden[counted] @ head.t()
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    return F.cross_entropy(logits, targets, reduction="sum") / divisor


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("chunk_bytes", [1, 5 * VOCAB * 8, 1 << 30])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_chunked_equals_plain_cross_entropy(dtype, tolerance, chunk_bytes, soft_cap):
    hidden, head, counted, targets = random_case(dtype)
    ours = counted_cross_entropy(
        hidden, head, counted, targets,
        num_counted_global=41, soft_cap=soft_cap, chunk_bytes=chunk_bytes,
    )  # fmt: skip
    plain = plain_loss(hidden, head, counted, targets, 41, soft_cap)
    torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(
        torch.autograd.grad(ours * 3.0, (hidden, head)),
        torch.autograd.grad(plain * 3.0, (hidden, head)),
    ):
        torch.testing.assert_close(mine, theirs, rtol=10 * tolerance, atol=tolerance)


def test_split_batches_sum_to_the_whole():
    """Normalised by the global count, gradients do not depend on how the batch is cut."""
    hidden, head, counted, targets = random_case()
    whole = counted_cross_entropy(hidden, head, counted, targets, num_counted_global=17)
    parts = [
        counted_cross_entropy(hidden, head, c, t, num_counted_global=17)
        for c, t in zip(counted.split(5), targets.split(5))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(sum(parts), (hidden, head)), torch.autograd.grad(whole, (hidden, head))
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_no_counted_position_gives_zero_loss_and_zero_gradient():
    hidden, head, _, _ = random_case()
    none = torch.empty(0, dtype=torch.int64)
    loss = counted_cross_entropy(hidden, head, none, none, num_counted_global=3)
    loss.backward()
    assert loss.item() == 0.0
    assert not hidden.grad.any() and not head.grad.any()


def test_frozen_head_gets_no_gradient():
    hidden, head, counted, targets = random_case()
    head = head.detach()
    loss = counted_cross_entropy(hidden, head, counted, targets, num_counted_global=17)
    loss.backward()
    assert head.grad is None
    plain = plain_loss(hidden, head, counted, targets, 17, None)
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(plain, hidden)[0])


def test_token_losses_are_the_terms_of_the_sum():
    hidden, head, counted, targets = random_case()
    terms = token_losses(hidden, head, counted, targets, chunk_bytes=1)
    expected = F.cross_entropy(hidden[counted] @ head.t(), targets, reduction="none")
    torch.testing.assert_close(terms, expected.detach(), rtol=1e-12, atol=1e-12)
    assert not terms.requires_grad


def test_bfloat16_gradient_is_as_near_as_the_plain_loops():
    """Against float64: our bfloat16 gradient errs no more than cross-entropy on upcast logits."""
    exact_case = random_case()
    exact = torch.autograd.grad(plain_loss(*exact_case, 17, None), exact_case[0])[0]
    hidden, head, counted, targets = (
        x.detach().bfloat16() if x.is_floating_point() else x for x in exact_case
    )
    hidden.requires_grad_()
    ours = counted_cross_entropy(hidden, head, counted, targets, num_counted_global=17)
    plain = F.cross_entropy((hidden[counted] @ head.t()).float(), targets, reduction="sum") / 17
    errors = [
        (torch.autograd.grad(loss, hidden)[0].double() - exact).norm().item()
        for loss in (ours, plain)
    ]
    assert errors[0] <= 1.1 * errors[1]


def test_logits_are_never_held_whole():
    hidden, head, counted, targets = random_case()
    with LargestTensor() as largest:
        counted_cross_entropy(
            hidden, head.detach(), counted, targets,
            num_counted_global=17, chunk_bytes=4 * VOCAB * 8,
        ).backward()  # fmt: skip
    assert largest.num_bytes < 17 * VOCAB * 8
    assert largest.num_bytes <= VOCAB * MODEL * 8  # the head itself, in a view


@pytest.mark.parametrize("is_trained", [False, True])
def test_logits_of_one_chunk_are_gone_before_the_next_one_is_made(is_trained):
    """Five chunks of four tiles each: one chunk and a tile's own gradients, never two chunks."""
    rows, vocab, model = 16, 1 << 16, 2
    chunk_bytes = rows * vocab * 4
    hidden = torch.randn(5 * rows, model, requires_grad=True)
    head = torch.randn(vocab, model, requires_grad=is_trained)
    counted, targets = torch.arange(5 * rows), torch.randint(vocab, (5 * rows,))

    def run():
        counted_cross_entropy(
            hidden, head, counted, targets, num_counted_global=5 * rows, chunk_bytes=chunk_bytes
        )

    run()  # what libraries keep of a first call
    assert chunk_bytes < most_live_bytes(run) < 1.9 * chunk_bytes


def test_the_gradient_of_a_head_is_never_twice_there_in_float32():
    """4 + K bytes an element: chunks are added up in float32, and scaled piece by piece."""
    vocab, model, rows = 1 << 15, 256, 32
    hidden = torch.randn(2 * rows, model).bfloat16().requires_grad_()
    head = (0.1 * torch.randn(vocab, model)).bfloat16().requires_grad_()
    counted, targets = torch.arange(2 * rows), torch.randint(vocab, (2 * rows,))

    def run():
        head.grad = None
        counted_cross_entropy(
            hidden, head, counted, targets, num_counted_global=64, chunk_bytes=rows * vocab * 2
        ).backward()

    run()
    assert 6 * head.numel() < most_live_bytes(run) < 7.5 * head.numel()
    whole = counted_cross_entropy(hidden, head, counted, targets, num_counted_global=64)
    (gradient,) = torch.autograd.grad(whole, head)
    assert (gradient - head.grad).norm() < 0.01 * gradient.norm()


class Sums(TorchDispatchMode):
    """Notes what is added in place: elements, dtypes of both."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.add_.Tensor:
            self.found.append((args[0].numel(), args[0].dtype, args[1].dtype))
        return operator(*args, **(kwargs or {}))


def test_tiles_of_a_heads_gradient_are_widened_into_one_buffer():
    """torch would widen each into memory of its own, which the system maps and takes back."""
    hidden, head, counted, targets = random_case(torch.bfloat16)
    with Sums() as sums:
        loss = counted_cross_entropy(
            hidden, head, counted, targets, num_counted_global=17, chunk_bytes=6 * VOCAB * 2
        )
    tiles = [each for each in sums.found if each[0] == 256 * MODEL]
    assert len(tiles) > 4 and set(tiles) == {(256 * MODEL, torch.float32, torch.float32)}
    plain = [x.detach().float().requires_grad_() for x in (hidden, head)]
    plain_loss(*plain, counted, targets, 17, None).backward()
    (gradient,) = torch.autograd.grad(loss, head)
    assert (gradient - plain[1].grad).norm() < 0.01 * plain[1].grad.norm()


class Counted(TorchDispatchMode):
    """Counts operators."""

    num_operators = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.num_operators += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_loss_on_a_gpu_reads_nothing_back_and_starts_few_operators(is_trained, monkeypatch):
    """4,096 rows over 128k tokens: each start takes microseconds of the host, which work in tiles
    of a CPU's cache would never make up for. Tensors without values: who asks for one fails."""
    monkeypatch.undo()
    options = {"device": "meta", "dtype": torch.bfloat16}
    hidden = torch.empty(4096, 64, **options).requires_grad_()
    head = torch.empty(128_256, 64, **options).requires_grad_(is_trained)
    rows = torch.empty(4096, dtype=torch.int64, device="meta")
    with Counted() as counted:
        loss = counted_cross_entropy(
            hidden, head, rows, rows, num_counted_global=4096, soft_cap=30.0, label_smoothing=0.1
        )
        loss.backward()
    assert hidden.grad.dtype is torch.bfloat16 and (head.grad is not None) == is_trained
    assert counted.num_operators < 3_000
