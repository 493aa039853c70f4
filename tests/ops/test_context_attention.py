"""Ranks that share a row compute what one process computes, whatever they exchange; exact bytes.

Legend: S tokens, H query heads, K key/value heads, C channels.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import PlanError
from phalanx.layout.context_part import ContextPart
from phalanx.layout.token_layout import LAYOUTS
from phalanx.ops.attention import Documents, packed_attention
from phalanx.ops.context_attention import (
    gathered_attention,
    ring_attention,
    ulysses_attention,
    wanted_attention,
)
from phalanx.worlds.comm_log import CommLog
from tests.ranks import run_ranks

S, H, K, C = 512, 4, 2, 32
EXAMPLE = (0, 3, 6, 14)  # of 16 tokens: Llama 3's documents of 3, 3, 8 and 2
PACKED = (0, 5, 100, 101, 350)
EXCHANGES = {
    "ring": ring_attention,
    "gathered": gathered_attention,
    "wanted": wanted_attention,
    "ulysses": ulysses_attention,
}


def inputs(num_tokens, num_heads=H, num_kv_heads=K, dtype=torch.float64):
    """q, k, v and the gradient of the output, the same on every rank."""
    generator = torch.Generator().manual_seed(num_tokens)
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    shapes = [(num_tokens, count, C) for count in heads]
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype) for s in shapes]


def whole(tensors, starts, window):
    """(out, dq, dk, dv) of one process."""
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    documents = Documents.from_starts(starts, len(q))
    out = packed_attention(q, k, v, documents, scale=0.2, window=window)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])


def shared(tensors, part, attend, window):
    """The same of this rank's tokens."""
    mine = [x[torch.from_numpy(part.tokens_c)] for x in tensors]
    q, k, v = (x.requires_grad_() for x in mine[:3])
    out = attend(q, k, v, part, scale=0.2, window=window)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), mine[3])


def largest_error(expected, tensors, part, attend, window):
    mine = shared(tensors, part, attend, window)
    at = torch.from_numpy(part.tokens_c)
    return float(max((x - y[at]).abs().max() for x, y in zip(mine, expected)))


def errors_of_exchanges(rank, world_size):
    """(exchange, layout, case) -> largest error."""
    cases = {"packed": (S, PACKED, 40), "example": (16, EXAMPLE, None)}
    if world_size == 2:
        drawn = torch.randperm(S - 1, generator=torch.Generator().manual_seed(world_size))[:9]
        starts = (0, *sorted((1 + drawn).tolist()))
        cases |= {"causal": (S, (0,), None), "drawn": (S, starts, None)}
    found = {}
    for case, (num_tokens, starts, window) in cases.items():
        tensors = inputs(num_tokens)
        expected = whole(tensors, starts, window)
        for layout in LAYOUTS:
            part = ContextPart.of_row(layout, rank, world_size, starts, num_tokens)
            for name, exchange in EXCHANGES.items():
                attend = partial(exchange, group=dist.group.WORLD)
                error = largest_error(expected, tensors, part, attend, window)
                found[name, layout, case] = error
    return found


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_exchange_of_every_layout_is_the_attention_of_one_process(world_size):
    """With 4 ranks and 2 key/value heads, each of those is on two ranks of the all-to-all."""
    for found in run_ranks(errors_of_exchanges, world_size):
        assert len(found) == (80 if world_size == 2 else 40)
        assert max(found.values()) < 1e-12, {k: e for k, e in found.items() if e >= 1e-12}


UNEVEN = {2: (6, 3), 4: (12, 6)}  # query and key/value heads, of which the ranks get one and a half


def errors_of_uneven_heads(rank, world_size):
    tensors = inputs(16, *UNEVEN[world_size])
    part = ContextPart.of_row("contiguous", rank, world_size, EXAMPLE, 16)
    attend = partial(ulysses_attention, group=dist.group.WORLD)
    return largest_error(whole(tensors, EXAMPLE, None), tensors, part, attend, None)


@pytest.mark.dist
@pytest.mark.parametrize("world_size", UNEVEN)
def test_key_heads_that_ranks_share_unevenly_are_sent_to_all_that_need_them(world_size):
    assert max(run_ranks(errors_of_uneven_heads, world_size)) < 1e-12


def errors_of_pairs(rank, world_size):
    """(exchange outside, layout) -> largest error, with an all-to-all of two ranks inside."""
    inner = [dist.new_group([first, first + 1]) for first in (0, 2)][rank // 2]
    outer = [dist.new_group([first, first + 2]) for first in (0, 1)][rank % 2]
    found, tensors = {}, inputs(S)
    expected = whole(tensors, PACKED, None)
    for layout in ("striped", "head_tail", "balanced"):
        part = ContextPart.of_row(layout, rank, world_size, PACKED, S, inner=2)
        for name in ("ring", "gathered", "wanted"):
            outside = partial(EXCHANGES[name], group=outer)
            attend = partial(ulysses_attention, group=inner, attend=outside)
            found[name, layout] = largest_error(expected, tensors, part, attend, None)
    return found


@pytest.mark.dist
def test_heads_inside_a_ring_are_the_attention_of_one_process():
    for found in run_ranks(errors_of_pairs, 4):
        assert len(found) == 9 and max(found.values()) < 1e-12, found


def logged_bytes(rank, world_size, dtype):
    """exchange -> [(kind, payload bytes)] of a forward and a backward pass."""
    log, found = CommLog(rank), {}
    tensors = inputs(S, dtype=dtype)
    for name, exchange in EXCHANGES.items():
        part = ContextPart.of_row("contiguous", rank, world_size, (0,), S)
        before = len(log.rows)
        with log.step(0):
            window = 40 if name == "wanted" else None
            shared(tensors, part, partial(exchange, group=dist.group.WORLD), window)
        found[name] = [(kind, num_bytes) for _, kind, num_bytes in log.seen()[before:]]
    return found


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_bytes_are_those_of_the_formulas(dtype):
    n, c, e = 2, S // 2, dtype.itemsize
    w = max(4, e)
    for rank, found in enumerate(run_ranks(logged_bytes, n, dtype, backend="logged_gloo")):
        hop, home = 2 * c * K * C * e, 2 * c * K * C * w
        kinds = ["send", "recv"]
        assert found["ring"] == [
            (kind, num_bytes) for num_bytes in (hop, hop, home) for kind in kinds
        ]
        gathered, scattered = 2 * S * K * C * e, 2 * S * K * C * w
        assert found["gathered"] == [("all_gather", gathered), ("reduce_scatter", scattered)]
        there, back = c * (H + 2 * K) * C * e, c * H * C * e
        assert found["ulysses"] == [("all_to_all", x) for x in (there, back, back, there)]
        halo = 39  # a query sees itself and 39 tokens before it
        sent, came = (halo, 0) if rank == 0 else (0, halo)
        assert found["wanted"] == [
            ("all_to_all", 2 * sent * K * C * e),
            ("all_to_all", 2 * came * K * C * w),
        ]


def gradients_summed_in(rank, world_size, dtype):
    """Largest error of gathered attention's gradients, and of those without a dtype."""
    tensors = inputs(64, dtype=torch.float32)
    part = ContextPart.of_row("head_tail", rank, world_size, (0,), 64)
    expected = whole([x.double() for x in tensors], (0,), None)
    errors = []
    for sum_dtype in (dtype, None):
        attend = partial(gathered_attention, group=dist.group.WORLD, sum_dtype=sum_dtype)
        errors.append(largest_error(expected, tensors, part, attend, None))
    return errors


@pytest.mark.dist
def test_gathered_gradients_are_summed_in_the_dtype_that_is_asked_for():
    for rough, fine in run_ranks(gradients_summed_in, 2, torch.bfloat16):
        assert fine < 1e-5 and 100 * fine < rough < 0.1


def test_heads_that_ranks_cannot_share_are_refused():
    class Three:
        def size(self):
            return 3

    part = ContextPart.of_row("contiguous", 0, 3, (0,), 6)
    q, k, v, _ = (x[:2] for x in inputs(6))
    with pytest.raises(PlanError, match="cannot share 4 query and 2 key/value heads"):
        ulysses_attention(q, k, v, part, Three(), scale=1.0)
