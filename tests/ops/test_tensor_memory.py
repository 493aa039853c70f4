"""What a GPT layer keeps for its backward pass: 34 s b h bytes, divided by the ranks that share it.

Korthikanti et al., arXiv 2205.05198, table 2 ("tensor + sequence parallel + selective"): every
activation of a layer is cut, and what a block gathers is gathered again. Written by hand from our
exchanges, in 16 bits. s tokens, b rows, h width.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phalanx.engines.remade import remaking
from phalanx.ops.tensor_exchange import gather_tokens, gathered, scatter_tokens
from tests.live_bytes import LiveBytes
from tests.ranks import run_ranks

TOKENS, WIDTH, HEADS = 96, 128, 4


def weights(world_size: int) -> dict[str, Tensor]:
    part = WIDTH // world_size
    shapes = {"qkv": (3 * part, WIDTH), "out": (WIDTH, part)}
    shapes |= {"up": (4 * part, WIDTH), "down": (WIDTH, 4 * part)}
    draw = torch.Generator().manual_seed(0)
    return {
        name: (0.1 * torch.randn(shape, generator=draw)).bfloat16().requires_grad_()
        for name, shape in shapes.items()
    }


def core(qkv_S3: Tensor, num_heads: int) -> Tensor:
    """Attention itself, whose scores the paper computes again."""
    q, k, v = (each.unflatten(-1, (num_heads, -1)).transpose(0, 1) for each in qkv_S3.chunk(3, -1))
    scores = (q @ k.transpose(1, 2)).softmax(-1)
    return (scores @ v).transpose(0, 1).flatten(-2)


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,))


def block(x_TD: Tensor, products, *, again: bool) -> Tensor:
    """Tokens are gathered before the products and scattered behind them."""
    group = dist.group.WORLD
    with remaking() as remade:
        whole_SD = gather_tokens(x_TD, group)
        if again:
            remade.note(whole_SD, gathered, x_TD, group)
        return scatter_tokens(products(whole_SD), group)


def layer(x_TD: Tensor, of: dict[str, Tensor], num_heads: int, *, again: bool) -> Tensor:
    def attention(x_SD: Tensor) -> Tensor:
        qkv_S3 = F.linear(x_SD, of["qkv"])
        return F.linear(checkpoint(core, qkv_S3, num_heads, use_reentrant=False), of["out"])

    def feed_forward(x_SD: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x_SD, of["up"])), of["down"])

    for products in (attention, feed_forward):
        out_TD = block(norm(x_TD), products, again=again)
        x_TD = x_TD + torch.native_dropout(out_TD, 0.1, True)[0]
    return x_TD


def kept(rank: int, world_size: int) -> dict[bool, float]:
    """Bytes kept by a layer, over 34 s b h, with inputs of blocks gathered again and not."""
    found = {}
    for again in (True, False):
        of = weights(world_size)
        with LiveBytes() as live:
            x_TD = torch.randn(TOKENS // world_size, WIDTH).bfloat16().requires_grad_()
            out_TD = layer(x_TD, of, HEADS // world_size, again=again)
            num_bytes = live.settled(besides=[out_TD, *of.values()])
        out_TD.sum().backward()
        assert all(each.grad.abs().sum() > 0 for each in of.values())
        found[again] = num_bytes / (34 * TOKENS * WIDTH)
    return found


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_layer_keeps_34_sbh_over_the_ranks(world_size):
    for found in run_ranks(kept, world_size):
        assert found[True] * world_size == pytest.approx(1.0, rel=0.02)
        # kept inputs of both blocks are whole: 2 x 2 s b h instead of their parts
        more = 4 * (world_size - 1) / 34
        assert found[False] * world_size == pytest.approx(1.0 + more, rel=0.02)
