"""Laws of blocks and of the paged cache."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.engines.serve.blocks import BLOCK_TOKENS, BlockTables, num_blocks_of
from phalanx.engines.serve.kv import PagedKv
from phalanx.engines.serve.kv_room import KvLimits, num_sliding_blocks, sliding_bytes, token_bytes
from phalanx.errors import JobError, PlanError
from phalanx.models.cache import KvCache
from tests.engines.serve_cases import CONFIG

LIMITS = KvLimits(max_tokens=96, max_running=3, max_step_tokens=40)
WINDOW = 21


def paged(num_tokens: int = 288, dtype: torch.dtype = torch.float32) -> PagedKv:
    return PagedKv(CONFIG, num_tokens, LIMITS, dtype=dtype)


def held(tables: BlockTables) -> list[int]:
    return [
        int(block)
        for row in range(len(tables.table))
        for block in tables.table[row, tables._first[row] : tables._end[row]]
    ]


OPERATIONS = st.lists(
    st.tuples(
        st.integers(0, 2),  # request
        st.sampled_from(["extend", "extend", "extend", "truncate", "release"]),
        st.integers(1, 40),
    ),
    max_size=40,
)


@given(OPERATIONS)
@settings(max_examples=200, deadline=None)
def test_no_block_is_lost_or_held_twice(operations):
    kv = paged()
    lengths = dict.fromkeys(range(3), 0)
    for request, what, number in operations:
        if what == "extend" and lengths[request] + number <= LIMITS.max_tokens:
            kv.extend([request], [number])
            lengths[request] += number
        elif what == "truncate" and lengths[request]:
            # refused when a sliding layer gave the window back, and then nothing has changed
            with contextlib.suppress(JobError):
                kv.truncate(request, max(0, lengths[request] - number))
            lengths[request] = kv.length(request)
        elif what == "release":
            kv.release(request)
            lengths[request] = 0
        for pool in kv.pools.values():
            blocks = held(pool.tables)
            assert len(set(blocks)) == len(blocks)
            assert len(blocks) + pool.tables.num_free == pool.tables.num_blocks
        assert {r: kv.length(r) for r in range(3)} == lengths
        full = kv.pools["full"].tables
        assert full.num_blocks - full.num_free == sum(map(num_blocks_of, lengths.values()))
    for request in range(3):
        kv.release(request)
    assert all(p.tables.num_free == p.tables.num_blocks for p in kv.pools.values())


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), max_size=30))
@settings(max_examples=200, deadline=None)
def test_the_sliding_pool_never_runs_out_first(steps):
    kv = paged()
    sliding, full = kv.pools["sliding"].tables, kv.pools["full"].tables
    assert sliding.num_blocks < full.num_blocks
    for request, number in steps:
        if kv.length(request) + number > LIMITS.max_tokens:
            kv.release(request)
        else:
            kv.extend([request], [number])  # raises when a pool has too few


def test_a_sliding_layer_keeps_its_window_and_gives_back_the_rest():
    kv = paged()
    kv.extend([5], [40])
    tables = kv.pools["sliding"].tables
    assert tables.num_held(kv._row[5]) == 3
    for _ in range(41):
        kv.extend([5], [1])
        length = kv.length(5)
        oldest = max(0, length - 1 - WINDOW + 1)
        assert tables.first_token(kv._row[5]) <= oldest
        assert tables.num_held(kv._row[5]) <= num_blocks_of(WINDOW - 1) + 2
    assert kv.pools["full"].tables.num_held(kv._row[5]) == num_blocks_of(81)


def test_truncate_refuses_what_it_cannot_do():
    kv = paged()
    kv.extend([1], [40])
    kv.extend([1], [30])
    with pytest.raises(JobError, match=r"truncate = 71: must lie in 0..70"):
        kv.truncate(1, 71)
    with pytest.raises(JobError, match="given back already"):
        kv.truncate(1, 30)
    kv.truncate(1, 40)
    assert kv.length(1) == 40
    assert kv.num_free == kv.num_blocks - 3


def test_a_pool_that_is_too_small_is_refused():
    with pytest.raises(JobError, match=r"kv_tokens = 95: .* legal values: 96"):
        paged(95)
    kv = paged(96)
    kv.extend([0], [90])
    with pytest.raises(PlanError, match="needs more blocks than are free"):
        kv.extend([1], [1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paged_reads_give_what_was_written(dtype):
    """Keys and values of interleaved requests, read by blocks, against plain caches."""
    torch.manual_seed(0)
    kv = paged(dtype=dtype)
    plain = {r: KvCache(CONFIG, dtype=dtype) for r in range(3)}
    kind = CONFIG.kind("full")
    for counts in ([7, 16, 30], [1, 1, 9], [1, 33, 1]):
        order = sorted(range(3), key=lambda r: counts[r] > 1)
        kv.extend(order, [counts[r] for r in order])
        steps = kv.step(order, [counts[r] for r in order])
        k, v = torch.randn(2, sum(counts), kind.num_kv_heads, kind.head_dim)
        pool, step = kv.pools["full"], steps["full"]
        pool.write(1, step, k, v)
        at = 0
        for i, r in enumerate(order):
            rows = slice(at, at + counts[r])
            at = rows.stop
            want = plain[r].append(1, k[rows], v[rows])
            plain[r].commit(counts[r])
            if i < len(step.blocks_RN):
                seen = slice(*step.seen_R2[i].tolist())
                got = [part[:, seen] for part in pool.read(1, step.blocks_RN[i])]
            else:
                blocks = step.segments[i - len(step.blocks_RN)].blocks
                got = [part[:, : kv.length(r)] for part in pool.read(1, blocks)]
            for have, expected in zip(got, want):
                assert have.dtype == dtype
                torch.testing.assert_close(have.transpose(0, 1), expected.to(dtype))


def test_shapes_and_bytes_are_those_of_the_contract():
    kv = paged()
    layers = {name: CONFIG.layer_kinds.count(name) for name in kv.pools}
    for name, pool in kv.pools.items():
        kind = CONFIG.kind(name)
        one_layer = (pool.tables.num_blocks, kind.num_kv_heads, BLOCK_TOKENS, kind.head_dim)
        assert pool.keys[0].shape == pool.values[0].shape == one_layer
        assert len(pool.keys) == layers[name]
    kind = CONFIG.kind("full")
    per_token = 2 * layers["full"] * kind.num_kv_heads * kind.head_dim * 4
    assert token_bytes(CONFIG, "float32") == per_token
    full, sliding = kv.pools["full"], kv.pools["sliding"]
    assert full.keys.nbytes + full.values.nbytes == 288 * per_token
    assert sliding.keys.nbytes + sliding.values.nbytes == sliding_bytes(
        CONFIG, 288, LIMITS, "float32"
    )


def test_sliding_blocks_by_hand():
    # 20 tokens before the new ones touch at most 3 blocks, plus one at the other end
    assert num_sliding_blocks(WINDOW, 100, LIMITS) == 3 * 4 + 3
    assert num_sliding_blocks(WINDOW, 10, LIMITS) == 10


def test_a_row_of_a_decode_step_sees_its_window_exactly():
    kv = paged()
    kv.extend([0, 1], [40, 3])
    kv.extend([0, 1], [1, 1])
    step = kv.step([0, 1], [1, 1])["sliding"]
    assert step.seen_R2.diff().flatten().tolist() == [WINDOW, 4]
    assert step.blocks_RN.shape == (2, 2)
    first = max(0, 41 - WINDOW) // BLOCK_TOKENS * BLOCK_TOKENS
    assert (step.seen_R2[0] + first).tolist() == [41 - WINDOW, 41]
