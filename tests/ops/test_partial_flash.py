"""Flash kernels are given runs of queries that hold every pair once; all ways compute the same."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.layout.token_layout import LAYOUTS, KeysSeen, token_layout
from phalanx.ops import partial_cuda, partial_flash
from phalanx.ops.partial_blocks import blocked_backward, blocked_forward
from phalanx.ops.partial_flash import flash_backward, flash_forward, runs_of, serves_flash

H, K, C = 4, 2, 8


@st.composite
def masks(draw):
    """What the queries of one rank see of the keys of another."""
    num_ranks = draw(st.integers(1, 3))
    num_tokens = 2 * num_ranks * draw(st.integers(1, 12))
    inner = draw(st.sets(st.integers(1, num_tokens - 1), max_size=4))
    bounds = (0, *sorted(inner), num_tokens)
    layout = token_layout(draw(st.sampled_from(list(LAYOUTS))), num_tokens, num_ranks, bounds)
    queries, keys = (layout.tokens_Nc[draw(st.integers(0, num_ranks - 1))] for _ in range(2))
    if draw(st.booleans()):
        keys = np.arange(num_tokens)
    window = draw(st.none() | st.integers(1, num_tokens))
    return KeysSeen.between(queries, keys, bounds, window)


def pairs_of(run, num_keys):
    """The pairs of a run as kernels count them, [rows, keys]."""
    num_rows, length = run.rows.stop - run.rows.start, run.keys.stop - run.keys.start
    behind = torch.arange(num_rows)[:, None] + length - num_rows - torch.arange(length)
    seen = behind >= 0 if run.is_causal else torch.ones(num_rows, length, dtype=torch.bool)
    if run.window is not None:
        seen &= behind < run.window
    found = torch.zeros(num_rows, num_keys, dtype=torch.bool)
    found[:, run.keys] = seen
    return found


@pytest.fixture
def many_runs(monkeypatch):
    monkeypatch.setattr(partial_flash, "_FEWEST_RUNS", 1000)


@given(masks())
@settings(max_examples=200)
def test_runs_hold_every_pair_once(seen):
    before, partial_flash._FEWEST_RUNS = partial_flash._FEWEST_RUNS, 1000
    try:
        runs = runs_of(seen)
    finally:
        partial_flash._FEWEST_RUNS = before
    key_T = np.arange(seen.num_keys)
    left = torch.from_numpy((key_T >= seen.first_Q[:, None]) & (key_T < seen.last_Q[:, None]))
    rows_before = 0
    for run in runs:
        assert run.rows.start >= rows_before
        rows_before = run.rows.stop
        assert torch.equal(left[run.rows], pairs_of(run, seen.num_keys))
        left[run.rows] = False
    assert not left.any()


def test_a_rank_of_head_tail_is_two_runs_and_a_striped_one_takes_blocks():
    layout = token_layout("head_tail", 512, 2)
    runs = runs_of(KeysSeen.between(layout.tokens_Nc[0], np.arange(512), (0, 512)))
    assert [run.keys for run in runs] == [slice(0, 128), slice(0, 512)]
    assert all(run.is_causal and run.window is None for run in runs)
    striped = token_layout("striped", 512, 2).tokens_Nc
    assert runs_of(KeysSeen.between(striped[0], np.arange(512), (0, 512))) is None
    assert len(runs_of(KeysSeen.between(striped[0], striped[1], (0, 512)))) == 1


CASES = {
    "gathered": ("head_tail", None, None),
    "packed": ("per_document", None, None),
    "strict": ("striped", 1, None),
    "window": ("head_tail", None, 20),
}


def case(name):
    """(seen, [grad, q, k, v]) of rank 0 of two."""
    layout_name, origin, window = CASES[name]
    bounds = (0, 7, 100, 160)
    layout = token_layout(layout_name, 160, 2, bounds)
    keys = np.arange(160) if origin is None else layout.tokens_Nc[origin]
    seen = KeysSeen.between(layout.tokens_Nc[0], keys, bounds, window)
    generator = torch.Generator().manual_seed(0)
    shapes = [(80, H, C), (80, H, C), (len(keys), K, C), (len(keys), K, C)]
    return seen, [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]


def results(forward, backward, tensors, mask):
    out, lse = forward(*tensors[1:], mask, 0.4)
    return out, lse, *backward(*tensors, out, lse, mask, 0.4)


def blocked(seen, tensors):
    def backward(grad, q, k, v, out, lse, mask, scale):
        return blocked_backward(grad, q, k, v, lse, (grad * out).sum(-1), mask, scale)

    return results(blocked_forward, backward, tensors, seen)


@pytest.mark.parametrize("name", ["gathered", "packed", "strict"])
def test_the_kernel_for_cpus_computes_what_blocks_do(name, many_runs):
    seen, tensors = case(name)
    runs = runs_of(seen)
    assert serves_flash(tensors[0], runs)
    for mine, theirs in zip(
        results(flash_forward, flash_backward, tensors, runs), blocked(seen, tensors)
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


class StandIn:
    """The CUDA kernels as torch describes them: packed runs, masks aligned at their ends."""

    def parts(self, cum_q, cum_k, is_causal, window_size_left):
        for (q0, q1), (k0, k1) in zip(pairwise(cum_q.tolist()), pairwise(cum_k.tolist())):
            window = None if window_size_left is None else window_size_left + 1
            run = partial_flash.Run(slice(0, q1 - q0), slice(0, k1 - k0), is_causal, window)
            seen = pairs_of(run, k1 - k0).to(torch.int64)
            first, last = seen.argmax(1), seen.shape[1] - seen.flip(1).argmax(1)
            yield slice(q0, q1), slice(k0, k1), KeysSeen(first.numpy(), last.numpy(), k1 - k0)

    def forward(self, q, k, v, cum_q, cum_k, max_q, max_k, dropout, is_causal, debug, **options):
        assert (max_q, max_k) == (cum_q.diff().max(), cum_k.diff().max())
        assert dropout == 0.0 and not debug and all(x.stride(-1) == 1 for x in (q, k, v))
        scale, left = options["scale"], options.get("window_size_left")
        found = [
            blocked_forward(q[rows], k[keys], v[keys], seen, scale)
            for rows, keys, seen in self.parts(cum_q, cum_k, is_causal, left)
        ]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found]).T, None

    def backward(self, grad, q, k, v, out, lse, cum_q, cum_k, *rest, **options):
        is_causal, scale = rest[3], options["scale"]
        parts = self.parts(cum_q, cum_k, is_causal, options.get("window_size_left"))
        slope, found = (grad * out).sum(-1), []
        for rows, keys, seen in parts:
            whole = (lse.T[rows], slope[rows])
            found.append(
                blocked_backward(grad[rows], q[rows], k[keys], v[keys], *whole, seen, scale)
            )
        return tuple(map(torch.cat, zip(*found)))


@pytest.mark.parametrize("name", CASES)
def test_calls_of_the_kernels_for_cuda_hold_what_blocks_compute(name, many_runs, monkeypatch):
    monkeypatch.setattr(partial_cuda, "_forward", StandIn().forward)
    monkeypatch.setattr(partial_cuda, "_backward", StandIn().backward)
    seen, tensors = case(name)
    tensors = [x.float().mT.contiguous().mT for x in tensors]  # channels far from one another
    found = results(partial_cuda.cuda_forward, partial_cuda.cuda_backward, tensors, seen)
    for mine, theirs in zip(found, blocked(seen, tensors)):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_calls_of_the_kernels_for_cuda_fit_torchs_description(many_runs, name):
    seen, tensors = case(name)
    with FakeTensorMode():
        fake = [torch.empty(x.shape, dtype=torch.bfloat16, device="cuda") for x in tensors]
        assert partial_cuda.serves_cuda(*fake[1:])
        found = results(partial_cuda.cuda_forward, partial_cuda.cuda_backward, fake, seen)
        shapes = [tuple(x.shape) for x in found]
        assert all(x.dtype == torch.float32 and x.is_cuda for x in found)
    keys = tuple(tensors[2].shape)
    assert shapes == [(80, H, C), (80, H), (80, H, C), keys, keys]
