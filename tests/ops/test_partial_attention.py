"""Attention by parts of the keys, added up, is attention; its gradients are too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phalanx.layout.token_layout import LAYOUTS, KeysSeen, token_layout
from phalanx.ops import native, partial_blocks
from phalanx.ops.attention import Documents, packed_attention
from phalanx.ops.partial_attention import partial_attention, partial_attention_backward
from phalanx.ops.partial_sum import add_partial_
from phalanx.ops.placed import placed

S, H, K, C = 264, 4, 2, 8
COMPILED = 32  # channels, of which compiled attention takes multiples
BOUNDS = (0, 37, 45, 171, S)


def inputs(dtype=torch.float64, channels=C):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(S, heads, channels, dtype=torch.float64, generator=generator).to(dtype)
        for heads in (H, K, K, H)
    ]


def dense(q, k, v, bounds, window):
    """(out, lse) by the definition."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    at = torch.arange(len(q))
    document = torch.bucketize(at, torch.tensor(bounds), right=True)
    behind = at[:, None] - at[None]
    seen = (behind >= 0) & (document[:, None] == document[None])
    if window is not None:
        seen &= behind < window
    scores = torch.einsum("qhc,thc->hqt", q, k).mul(0.3).masked_fill(~seen, -torch.inf)
    out = torch.einsum("hqt,thc->qhc", scores.softmax(-1), v)
    return out, scores.logsumexp(-1).T


def by_rounds(tensors, layout, bounds, window):
    """What the ranks of a ring compute, one after the other: (out, lse, dq, dk, dv)."""
    q, k, v, grad = tensors
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.zeros(q.shape, dtype=wide), torch.zeros(S, H, dtype=wide)
    grads = [torch.zeros(x.shape, dtype=wide) for x in (q, k, v)]
    parts = [torch.from_numpy(tokens) for tokens in layout.tokens_Nc]
    for queries in parts:
        so_far = (
            torch.zeros(q[queries].shape, dtype=wide),
            torch.full((len(queries), H), -torch.inf, dtype=wide),
        )
        masks = [KeysSeen.between(queries.numpy(), t.numpy(), bounds, window) for t in parts]
        for keys, seen in zip(parts, masks):
            part = partial_attention(q[queries], k[keys], v[keys], seen, scale=0.3)
            unseen = torch.from_numpy(seen.first_Q == seen.last_Q)
            assert (part[0][unseen] == 0).all() and (part[1][unseen] == -torch.inf).all()
            add_partial_(*so_far, *part)
        out[queries], lse[queries] = so_far
        for keys, seen in zip(parts, masks):
            more = partial_attention_backward(
                grad[queries], q[queries], k[keys], v[keys], *so_far, seen, scale=0.3
            )
            for total, rows, add in zip(grads, (queries, keys, keys), more):
                total[rows] += add
    return out, lse, *grads


def expected(tensors, bounds, window):
    q, k, v = (x.double().requires_grad_() for x in tensors[:3])
    out, lse = dense(q, k, v, bounds, window)
    grads = torch.autograd.grad(out, (q, k, v), tensors[3].double())
    return out.detach(), lse.detach(), *grads


CASES = [(name, *case) for name in LAYOUTS for case in (((0, S), None), (BOUNDS, 50))]


@pytest.mark.parametrize(("name", "bounds", "window"), [*CASES, ("head_tail", BOUNDS, 1)])
def test_rounds_of_a_ring_add_up_to_attention(name, bounds, window):
    layout = token_layout(name, S, 2, bounds)
    found = by_rounds(inputs(), layout, bounds, window)
    for mine, theirs in zip(found, expected(inputs(), bounds, window)):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_16_bit_parts_are_added_in_float32():
    """The error of 4 rounds is that of rounded inputs in one: none is added at the hops."""
    tensors = inputs(torch.bfloat16)
    layout = token_layout("head_tail", S, 4)
    found = by_rounds(tensors, layout, (0, S), None)
    for mine, theirs in zip(found, expected(tensors, (0, S), None)):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-5, atol=2e-5)


def test_large_scores_do_not_overflow_where_parts_meet():
    one, two = torch.ones(1, 1, 2), torch.full((1, 1, 2), 3.0)
    out, lse = add_partial_(one.clone(), torch.full((1, 1), 900.0), two, torch.full((1, 1), 900.0))
    assert out.tolist() == [[[2.0, 2.0]]]
    assert lse.item() == pytest.approx(900.693, abs=1e-3)
    out, lse = add_partial_(one.clone(), torch.full((1, 1), -900.0), two, torch.full((1, 1), 900.0))
    assert out.tolist() == [[[3.0, 3.0]]]


@pytest.mark.parametrize("most_keys", [4096, 50])
@pytest.mark.parametrize(("bounds", "window"), [((0, S), None), (BOUNDS, 50)])
def test_compiled_parts_are_no_further_from_float64_than_attention_in_one(
    monkeypatch, bounds, window, most_keys
):
    """Longer rows are computed in stretches of keys; here 132 keys of a rank are three."""
    monkeypatch.setattr(native, "MOST_KEYS", most_keys)
    tensors = inputs(torch.bfloat16, COMPILED)
    exact = expected(tensors, bounds, window)
    found = by_rounds(tensors, token_layout("head_tail", S, 2, bounds), bounds, window)
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    out = packed_attention(q, k, v, Documents(bounds), scale=0.3, window=window)
    whole = (out, *torch.autograd.grad(out, (q, k, v), tensors[3]))
    torch.testing.assert_close(found[1].double(), exact[1], rtol=1e-5, atol=1e-5)
    for mine, one, theirs in zip((found[0], *found[2:]), whole, (exact[0], *exact[2:])):
        error = (mine.double() - theirs).norm()
        assert error < 1.05 * (one.double() - theirs).norm()


def test_blocks_without_a_kernel_ask_a_gpu_for_nothing_and_copy_their_bounds_once(monkeypatch):
    """Heads of more channels than flash attention is compiled for; tensors without values."""
    copied = []

    def noted(array, device):
        copied.append(len(array))
        return placed(array, device)

    monkeypatch.setattr(partial_blocks, "placed", noted)
    seen = KeysSeen.between(np.arange(S), np.arange(S), BOUNDS, 40)
    q, k, v, grad = (
        torch.empty(S, heads, 512, dtype=torch.bfloat16, device="meta") for heads in (H, K, K, H)
    )
    out, lse = partial_attention(q, k, v, seen, scale=0.3)
    grads = partial_attention_backward(grad, q, k, v, out, lse, seen, scale=0.3)
    assert [tuple(x.shape) for x in (out, lse, *grads)] == [
        (S, H, 512), (S, H), (S, H, 512), (S, K, 512), (S, K, 512)
    ]  # fmt: skip
    assert copied == [S] * 4, "first and last, forward and backward"
