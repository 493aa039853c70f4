"""Norm and rotation equal their plain formulas, gradients included."""

from __future__ import annotations

import pytest
import torch

from phalanx.ops.norm import rms_norm, rms_norm_rotate
from phalanx.ops.rope import rope_table, rotate


def plain_norm(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight)


def plain_rotation(x_SHC, cos, sin):
    first, second = x_SHC.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@pytest.fixture
def inputs():
    torch.manual_seed(3)
    x_SHC = torch.randn(7, 3, 10, dtype=torch.float64, requires_grad=True)
    weight_C = torch.randn(10, dtype=torch.float64, requires_grad=True)
    return x_SHC, weight_C


def test_norm_equals_its_formula_with_gradients(inputs):
    ours, plain = rms_norm(*inputs, 1e-3), plain_norm(*inputs, 1e-3)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(ours)
    for mine, theirs in zip(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(plain, inputs, grad)
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_norm_with_rotation_equals_norm_then_rotation(inputs):
    cos, sin = (t.double() for t in rope_table(torch.arange(7) * 5, 10, 100.0))
    ours = rms_norm_rotate(*inputs, 1e-3, cos, sin)
    plain = plain_rotation(plain_norm(*inputs, 1e-3), cos, sin)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(ours)
    for mine, theirs in zip(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(plain, inputs, grad)
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_norm_of_bfloat16_is_rounded_once():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.full((64,), 0.25).bfloat16()
    exact = plain_norm(x, weight.float(), 1e-6)
    assert torch.equal(rms_norm(x, weight, 1e-6), exact.bfloat16())


def test_frozen_norm_weight_gets_no_gradient(inputs):
    x, weight = inputs[0], inputs[1].detach()
    rms_norm(x, weight, 1e-6).sum().backward()
    assert x.grad is not None and weight.grad is None


def test_rotation_preserves_length_and_depends_on_distance_only():
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    products = []
    for at in (0, 11):
        tables = [
            [t.double() for t in rope_table(torch.tensor([p]), 16, 1e4)] for p in (at + 4, at)
        ]
        turned = [rotate(x, *table) for x, table in zip((q, k), tables)]
        torch.testing.assert_close(turned[0].norm(), q.norm())
        products.append((turned[0] * turned[1]).sum())
    torch.testing.assert_close(*products, rtol=1e-6, atol=1e-6)  # angles are float32


def test_linear_scaling_divides_positions():
    scaled = rope_table(torch.tensor([24]), 8, 1e4, 8.0)
    torch.testing.assert_close(scaled, rope_table(torch.tensor([3]), 8, 1e4))
