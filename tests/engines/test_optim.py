"""The sharded optimizer against torch's own on whole tensors."""

from __future__ import annotations

from itertools import pairwise
from math import cos, pi

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from phalanx.engines.optim import ShardedAdamW, global_norm, learning_rate
from tests.ranks import run_ranks

SIZES = ((5, 3), (1, 4), (7,))  # uneven and empty shards on 2 and 3 ranks


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(size).double()) for size in SIZES]
        )

    def forward(self, x):
        return sum((weight * x).sin().sum() for weight in self.weights)


def sharded(rank, world_size, clip):
    model = Weights()
    fully_shard(model)
    optimizer = ShardedAdamW(model.parameters(), weight_decay=0.1, clip_norm=clip)
    norms = []
    for step in range(3):
        model(torch.tensor(1.5 + step)).backward()
        norms.append(optimizer.step(1e-2).item())
    return norms, [p.full_tensor().detach() for p in model.parameters()], optimizer.state_bytes()


@pytest.mark.dist
@pytest.mark.parametrize(("world_size", "clip"), [(1, 0.5), (2, 0.0), (3, 0.5)])
def test_sharded_adamw_equals_adamw_on_whole_tensors(world_size, clip):
    results = run_ranks(sharded, world_size, clip)
    model = Weights()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    expected = []
    for step in range(3):
        model(torch.tensor(1.5 + step)).backward()
        limit = clip or float("inf")
        expected.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        adamw.step()
        adamw.zero_grad()
    for norms, whole, _ in results:
        assert norms == pytest.approx(expected, rel=1e-12)
        for found, parameter in zip(whole, model.parameters()):
            torch.testing.assert_close(found, parameter.detach(), rtol=1e-12, atol=1e-14)
    moments = sum(state_bytes for *_, state_bytes in results)
    assert moments >= 2 * 8 * sum(p.numel() for p in model.parameters())


def norm_of_mixture(rank, world_size):
    """Sharded and plain parameters together."""
    model = Weights()
    fully_shard(model)
    model(torch.tensor(2.0)).backward()
    plain = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    plain.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    return global_norm([*model.parameters(), plain]).item()


@pytest.mark.dist
def test_norm_counts_every_gradient_once():
    model = Weights()
    model(torch.tensor(2.0)).backward()
    squares = sum(p.grad.square().sum().item() for p in model.parameters())
    assert run_ranks(norm_of_mixture, 2) == pytest.approx([(squares + 25.0) ** 0.5] * 2)


def test_learning_rate_rises_then_falls_to_its_floor():
    rates = [learning_rate(s, peak=2.0, warmup_steps=3, num_steps=13) for s in range(13)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[8] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5 * (1 + cos(pi * 0.5))))
    assert all(a > b for a, b in pairwise(rates[3:])) and rates[-1] > 0.2
    assert learning_rate(0, peak=1.0, warmup_steps=0, num_steps=1) == 1.0


def clipped_to_zero(rank, world_size):
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([float("nan"), 1.0])
    norm = ShardedAdamW([weight], clip_norm=1.0).step(0.1)
    return bool(torch.isnan(norm)), dist.get_world_size()


@pytest.mark.dist
def test_nan_gradients_show_in_the_norm():
    assert run_ranks(clipped_to_zero, 1) == [(True, 1)]
