"""The gate's product equals torch's chain of operators, and keeps less."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from phalanx.errors import JobError
from phalanx.ops import native
from phalanx.ops.gate import ACTIVATIONS, gated_product

PLAIN = {"gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu}


def pair(dtype):
    generator = torch.Generator().manual_seed(3)
    shapes = [torch.randn(7, 13, generator=generator) * 3 for _ in range(3)]
    gate, up, grad = (each.to(dtype) for each in shapes)
    return gate.requires_grad_(), up.requires_grad_(), grad


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equals_the_chain_of_operators_bit_for_bit(activation, dtype):
    gate, up, grad = pair(dtype)
    expected = PLAIN[activation](gate) * up
    grads = torch.autograd.grad(expected, (gate, up), grad)
    with native.plain():  # the compiled form rounds less often
        found = gated_product(gate, up, activation)
        own_grads = torch.autograd.grad(found, (gate, up), grad)
    assert torch.equal(found, expected)
    for own, other in zip(own_grads, grads):
        assert torch.equal(own, other)


def test_gradients_where_only_one_side_needs_them():
    gate, up, grad = pair(torch.float64)
    both = torch.autograd.grad(gated_product(gate, up, "silu"), (gate, up), grad)
    for at, needed in enumerate([(gate, up.detach()), (gate.detach(), up)]):
        (only,) = torch.autograd.grad(gated_product(*needed, "silu"), needed[at], grad)
        assert torch.equal(only, both[at])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_keeps_its_two_inputs_only(activation):
    gate, up, _ = pair(torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        gated_product(gate, up, activation)
    assert {each.data_ptr() for each in kept} == {gate.data_ptr(), up.data_ptr()}


def test_unknown_activation_is_refused_with_the_nearest():
    with pytest.raises(JobError, match=r"gelu_tan.*gelu_tanh"):
        gated_product(torch.ones(1), torch.ones(1), "gelu_tan")
