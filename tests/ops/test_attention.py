"""Blocked attention equals dense attention, forward and backward, on awkward sizes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from phalanx.errors import JobError
from phalanx.ops.attention import Documents, causal_attention, packed_attention
from tests.ops.largest_tensor import LargestTensor

CHANNELS = 8
SIZES = [(1, 1), (1, 7), (5, 9), (128, 128), (129, 129), (130, 300), (300, 300), (3, 500)]


def dense_attention(q_SHC, k_TKC, v_TKC, scale, window):
    """The definition, with a dense mask."""
    num_queries, num_keys = q_SHC.shape[0], k_TKC.shape[0]
    group = q_SHC.shape[1] // k_TKC.shape[1]
    k_THC, v_THC = (x.repeat_interleave(group, 1) for x in (k_TKC, v_TKC))
    query = torch.arange(num_keys - num_queries, num_keys)[:, None]
    key = torch.arange(num_keys)[None]
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    scores = torch.einsum("shc,thc->hst", q_SHC, k_THC) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hst,thc->shc", weights, v_THC)


def random_inputs(num_queries, num_keys, num_heads, num_kv_heads, dtype=torch.float64):
    generator = torch.Generator().manual_seed(num_queries * 1000 + num_keys)
    return [
        torch.randn(rows, heads, CHANNELS, dtype=dtype, generator=generator).requires_grad_()
        for rows, heads in (
            (num_queries, num_heads),
            (num_keys, num_kv_heads),
            (num_keys, num_kv_heads),
        )
    ]


@pytest.mark.parametrize("window", [None, 1, 2, 5, 127, 128, 129, 200, 1000])
@pytest.mark.parametrize("heads", [(4, 1), (6, 2), (3, 3)])
@pytest.mark.parametrize("sizes", SIZES)
def test_blocked_equals_dense_attention(sizes, heads, window):
    inputs = random_inputs(*sizes, *heads)
    ours = causal_attention(*inputs, scale=0.3, window=window)
    dense = dense_attention(*inputs, 0.3, window)
    torch.testing.assert_close(ours, dense, rtol=1e-12, atol=1e-12)
    grad = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(1))
    for mine, theirs in zip(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(dense, inputs, grad)
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("window", [None, 3, 140])
def test_packed_documents_equal_separate_calls(window):
    q, k, v = random_inputs(301, 301, 4, 2)
    documents = Documents.from_starts([0, 1, 8, 150], 301)
    packed = packed_attention(q, k, v, documents, scale=0.2, window=window)
    for start, end in pairwise(documents.bounds):
        rows = slice(start, end)
        alone = causal_attention(q[rows], k[rows], v[rows], scale=0.2, window=window)
        assert torch.equal(packed[rows], alone)


def test_bfloat16_attention_stays_within_its_rounding():
    """Scores are rounded to bfloat16 (8 bits): outputs of size 1 may move by a few 2**-8."""
    inputs = random_inputs(257, 257, 4, 1)
    exact = dense_attention(*inputs, CHANNELS**-0.5, 100)
    rounded = causal_attention(
        *(x.detach().bfloat16() for x in inputs), scale=CHANNELS**-0.5, window=100
    )
    assert (rounded.double() - exact).abs().max() < 8 * 2**-8


def test_bfloat16_attention_keeps_the_digits_of_large_scores():
    """Scores around 300, where bfloat16 counts in steps of 2: rounding them would cost factors of e
    in the weights."""
    q, k, v = (x.detach() for x in random_inputs(200, 200, 2, 1))
    q[..., 0], k[..., 0] = 16.0, 18.0  # adds 288 to every score, exactly
    q, k, v = (x.bfloat16() for x in (q, k, v))
    exact = dense_attention(q.double(), k.double(), v.double(), 1.0, None)
    ours = causal_attention(q, k, v, scale=1.0)
    assert (ours.double() - exact).abs().max() < 8 * 2**-8
    rounded = causal_attention(q.double(), k.double(), v.double(), scale=1.0)
    torch.testing.assert_close(rounded, exact, rtol=1e-9, atol=1e-9)


def test_blocked_attention_needs_no_square_temporary():
    """4,096 tokens: the largest tensor made is heads x block x keys, not keys x keys."""
    inputs = random_inputs(4096, 4096, 2, 1, torch.float32)
    with LargestTensor() as largest:
        causal_attention(*inputs, scale=1.0).sum().backward()
    assert largest.num_bytes <= 2 * 128 * 4096 * 4


def test_positions_restart_at_each_document():
    documents = Documents.from_starts([0, 3, 4], 7)
    assert documents.lengths == [3, 1, 3]
    assert documents.positions().tolist() == [0, 1, 2, 0, 0, 1, 2]
    assert documents.bounds_tensor(torch.device("cpu")).tolist() == [0, 3, 4, 7]


@pytest.mark.parametrize("starts", [(), (1, 4), (0, 5, 5), (0, 7), (0, 9)])
def test_document_starts_that_do_not_tile_the_row_are_refused(starts):
    with pytest.raises(JobError, match="document_starts") as caught:
        Documents.from_starts(starts, 7)
    assert caught.value.code == "job/bad-value"
