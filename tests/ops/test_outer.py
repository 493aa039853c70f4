"""Outer steps against torch's own optimizer and the formulas, bit for bit."""

from __future__ import annotations

import pytest
import torch

from phalanx.ops.outer import blend_, nesterov_step_, outer_delta_


@pytest.mark.parametrize(("lr", "momentum"), [(0.4, 0.9), (0.7, 0.9), (1.0, 0.0)])
def test_outer_step_equals_torch_sgd_nesterov_bit_for_bit(lr, momentum):
    torch.manual_seed(3)
    outer, buffer = torch.randn(37), torch.zeros(37)
    theirs = torch.nn.Parameter(outer.clone())
    sgd = torch.optim.SGD([theirs], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for _ in range(5):
        delta = torch.randn(37)
        theirs.grad = delta.clone()
        sgd.step()
        nesterov_step_(outer, buffer, delta, lr, momentum)
        assert torch.equal(outer, theirs.detach())


def test_plain_outer_sgd_with_rate_one_averages_the_replicas():
    torch.manual_seed(4)
    outer = torch.randn(11, dtype=torch.float64)
    replicas = [outer + 0.1 * torch.randn_like(outer) for _ in range(3)]
    deltas = [outer_delta_(torch.empty_like(outer), outer, local) for local in replicas]
    mean = torch.stack(replicas).mean(0)
    nesterov_step_(outer, torch.zeros_like(outer), sum(deltas) / 3, lr=1.0, momentum=0.0)
    assert torch.allclose(outer, mean, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blend_is_exact_at_both_ends(dtype):
    torch.manual_seed(5)
    local, outer = torch.randn(23).to(dtype), torch.randn(23)
    assert torch.equal(blend_(local.clone(), outer, 0.0), outer.to(dtype))
    assert torch.equal(blend_(local.clone(), outer, 1.0), local)
    half = (0.5 * local.float() + 0.5 * outer).to(dtype)
    torch.testing.assert_close(blend_(local.clone(), outer, 0.5), half)


def test_delta_keeps_the_precision_of_the_outer_parameters():
    outer, local = torch.tensor([1.0 + 2**-20]), torch.tensor([1.0], dtype=torch.bfloat16)
    assert outer_delta_(torch.empty(1), outer, local).item() == 2**-20
