"""Attention through block tables at every level of processor features, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.ops import native
from phalanx.ops.paged_attention import gathered, paged_decode, registered, serves_paged
from tests.ops.levels import HALF_STEP, LEVELS, at_each_level, drawn

needs_compiler = pytest.mark.skipif(not LEVELS, reason="no C++ compiler here")


def paged_case(requests, heads, kv_heads, channels, num_blocks, lengths=None, window=None):
    """Pools with twice the blocks, random tables; lengths are drawn where not given."""
    pool_blocks = 2 * num_blocks * requests
    q_RHC = drawn(requests, heads, channels)
    pools = [drawn(pool_blocks, kv_heads, 16, channels) for _ in range(2)]
    blocks_RN = torch.randperm(pool_blocks)[: requests * num_blocks].view(requests, num_blocks)
    if lengths is None:
        lengths = torch.randint(1, 16 * num_blocks + 1, (requests,))
    lows = torch.zeros_like(lengths) if window is None else (lengths - window).clamp(min=0)
    return q_RHC, *pools, blocks_RN, torch.stack([lows, lengths], 1)


def require_close(case, scale, cap=None):
    """Weights err by what float32 scores err, which is far below one rounding of the result."""
    exact = gathered(*(each.double() if each.is_floating_point() else each for each in case),
                     scale, cap)  # fmt: skip
    found = paged_decode(*case, scale, cap)
    assert found.dtype == torch.bfloat16
    largest_value = case[2].abs().max().double()
    allowed = HALF_STEP * exact.abs() + 2.0**-16 * largest_value
    assert ((found.double() - exact).abs() <= allowed).all()


@at_each_level
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize(
    ("requests", "heads", "kv_heads", "channels", "num_blocks", "window"),
    [
        (1, 4, 1, 256, 40, None),
        (3, 8, 2, 64, 7, 37),
        (2, 6, 6, 96, 20, 512),
        (5, 5, 1, 16, 3, 1),
        (2, 32, 2, 512, 2, None),
        (1, 64, 1, 48, 33, 300),
        (2, 21, 3, 80, 17, 257),
    ],
)
def test_paged_equals_gathered(level, requests, heads, kv_heads, channels, num_blocks, window, cap):
    torch.manual_seed(num_blocks)
    case = paged_case(requests, heads, kv_heads, channels, num_blocks, window=window)
    with native.level(level):
        assert serves_paged(*case[:3])
        require_close(case, channels**-0.5, cap)


@needs_compiler
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(LEVELS or ["none"]),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (4, 1), (6, 2), (9, 3)]),
    st.sampled_from([16, 64, 112]),
    st.lists(st.integers(1, 40 * 16), min_size=3, max_size=3),
    st.none() | st.integers(1, 700),
)
def test_any_lengths_and_windows_equal_gathered(level, requests, heads, channels, lengths, window):
    torch.manual_seed(channels)
    lengths = torch.tensor(lengths[:requests])
    case = paged_case(requests, *heads, channels, 40, lengths, window)
    with native.level(level):
        require_close(case, channels**-0.5)


@at_each_level
def test_a_request_depends_neither_on_companions_nor_on_threads(level):
    torch.manual_seed(2)
    q, keys, values, blocks, seen = paged_case(4, 4, 1, 64, 50)
    threads = torch.get_num_threads()
    with native.level(level):
        together = paged_decode(q, keys, values, blocks, seen, 0.1)
        for r in range(4):
            used = -(-int(seen[r, 1]) // 16)  # and the padding of its table neither
            one = slice(r, r + 1)
            alone = paged_decode(q[one], keys, values, blocks[one, :used], seen[one], 0.1)
            assert torch.equal(alone, together[one])
        try:
            torch.set_num_threads(1 if threads > 1 else 2)
            assert torch.equal(paged_decode(q, keys, values, blocks, seen, 0.1), together)
        finally:
            torch.set_num_threads(threads)


@at_each_level
def test_what_is_not_seen_is_not_read_and_nan_stays_nan(level):
    torch.manual_seed(3)
    q, keys, values, blocks, seen = paged_case(2, 4, 2, 32, 20, torch.tensor([300, 20]), window=290)
    with native.level(level):
        clean = paged_decode(q, keys, values, blocks, seen, 0.2)
        for pool in (keys, values):
            pool[blocks[0, 0], :, :10] = torch.nan  # before the window
            pool[blocks[0, -1], :, 300 % 16 :] = torch.nan  # behind the last token
            pool[blocks[1, 1], :, 4:] = torch.nan
        assert torch.equal(paged_decode(q, keys, values, blocks, seen, 0.2), clean)
        keys[blocks[0, 5], 1, 3, 0] = torch.nan
        found = paged_decode(q, keys, values, blocks, seen, 0.2)
    assert found[0, 2:].isnan().all()
    assert torch.equal(found[0, :2], clean[0, :2]) and torch.equal(found[1], clean[1])


def test_other_dtypes_take_the_reference():
    torch.manual_seed(4)
    case = [
        each.double() if each.is_floating_point() else each for each in paged_case(2, 4, 2, 8, 3)
    ]
    assert torch.equal(paged_decode(*case, 0.3, 2.0), gathered(*case, 0.3, 2.0))


def test_the_operator_of_torch_passes_its_checks():
    torch.manual_seed(5)
    case = paged_case(2, 4, 2, 32, 3)
    torch.library.opcheck(registered, (*case, 0.3))
    torch.library.opcheck(registered, (*case, 0.3, 4.0))


def test_a_compiled_function_gives_the_same_bits():
    torch.manual_seed(6)
    case = paged_case(2, 4, 2, 32, 3)
    compiled = torch.compile(
        lambda *args: paged_decode(*args, 0.3).neg(), backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(*case), -paged_decode(*case, 0.3))
