"""Exchanges over a model axis: each is the conjugate of its gradient, over real ranks.

S tokens, D model.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.ops.tensor_exchange import CONJUGATES, exchange, leave
from tests.ranks import run_ranks

S, D = 6, 3
# whose input, or whose output's gradient, is the same on all ranks
EQUAL_IN, EQUAL_OUT = ("enter",), ("leave", "join_tokens")


def drawn(num_rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, D, generator=generator, dtype=torch.float64)


def inner_products(rank: int, world_size: int) -> dict[str, tuple[float, float]]:
    """Of each pair <A x, y> and <x, A* y>, over all ranks; equal copies count once."""
    group, found = dist.group.WORLD, {}
    for name, pair in CONJUGATES.items():
        num_in = S // world_size if name in ("gather_tokens", "join_tokens") else S
        num_out = S // world_size if name == "scatter_tokens" else S
        x_ND = drawn(num_in, 0 if name in EQUAL_IN else 1 + rank).requires_grad_()
        y_ND = drawn(num_out, 90 if name in EQUAL_OUT else 10 + rank)
        out_ND = exchange(x_ND, name, group)
        out_ND.backward(y_ND)
        share = world_size if name in EQUAL_OUT else 1
        ahead = (out_ND.detach() * y_ND).sum() / share
        # an input that is equal on all ranks has one gradient, the same on all
        back = (x_ND.detach() * x_ND.grad).sum() / (world_size if name in EQUAL_IN else 1)
        both = torch.stack([ahead, back])
        dist.all_reduce(both)
        found[name] = tuple(both.tolist())
        assert torch.equal(x_ND.grad, pair.backward(y_ND, group))
    return found


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_gradient_of_an_exchange_is_its_adjoint(world_size):
    for of_rank in run_ranks(inner_products, world_size):
        for name, (ahead, back) in of_rank.items():
            assert ahead == pytest.approx(back, rel=1e-12), name


def derivatives(rank: int, world_size: int) -> list[Tensor]:
    """First and second derivative of sum (A x)^3 / 6 along x, in place and not."""
    found = []
    for apply in (
        lambda x: leave(x * 1.0, dist.group.WORLD),
        lambda x: exchange(x, "leave", dist.group.WORLD),
    ):
        x = torch.tensor([2.0 + rank], dtype=torch.float64, requires_grad=True)
        value = apply(x).pow(3).sum() / 6
        (first,) = torch.autograd.grad(value, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        found += [first.detach(), second]
    return found


@pytest.mark.dist
def test_exchanges_have_second_derivatives():
    for first, second, *others in run_ranks(derivatives, 2):
        total = 2.0 + 3.0
        assert first.item() == total**2 / 2
        assert second.item() == 2 * total  # the gradient of a sum's gradient is summed over ranks
        assert [each.item() for each in others] == [first.item(), second.item()]


def test_turning_a_pair_twice_gives_it_back():
    for pair in CONJUGATES.values():
        assert pair.turned.turned == pair
    assert CONJUGATES["enter"] == CONJUGATES["leave"].turned
    assert CONJUGATES["gather_tokens"] == CONJUGATES["scatter_tokens"].turned
