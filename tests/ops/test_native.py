"""The compiled bfloat16 forms against float64 of the plain ones: never further off than those."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from phalanx.ops import native
from phalanx.ops.attention import Documents, packed_attention
from phalanx.ops.gate import ACTIVATIONS, gated_product
from phalanx.ops.norm import rms_norm, rms_norm_rotate
from phalanx.ops.rope import rope_table

pytestmark = pytest.mark.skipif(
    not native.serves(torch.zeros(1, dtype=torch.bfloat16)), reason="no C++ compiler here"
)
HALF_STEP = 2.0**-8  # of rounding to bfloat16, relative


def drawn(*shape, scale=1.0):
    return (torch.randn(shape) * scale).to(torch.bfloat16)


def with_gradients(function, inputs, grad):
    inputs = [each.detach().clone().requires_grad_() for each in inputs]
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad.to(output.dtype))]


def require_no_further_off(function, inputs, grad):
    """Compiled and plain bfloat16 forms, each against float64."""
    exact = with_gradients(function, [each.double() for each in inputs], grad)
    compiled = with_gradients(function, inputs, grad)
    with native.plain():
        plain = with_gradients(function, inputs, grad)
    for own, other, true in zip(compiled, plain, exact):
        assert own.dtype == other.dtype == torch.bfloat16
        error = (own.double() - true).abs()
        allowed = (other.double() - true).abs().max() + HALF_STEP * true.abs()
        assert (error <= allowed + 1e-6).all(), error.max()
        assert error.mean() <= 1.05 * (other.double() - true).abs().mean() + 1e-9


@pytest.mark.parametrize("shape", [(1, 8), (37, 101), (300, 640)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_is_no_further_from_float64(shape, offset):
    torch.manual_seed(1)
    inputs = [drawn(*shape, scale=3.0), drawn(shape[-1], scale=0.3)]
    require_no_further_off(lambda x, w: rms_norm(x, w, 1e-6, offset), inputs, drawn(*shape))


@pytest.mark.parametrize("shape", [(1, 1, 8), (19, 3, 14), (130, 4, 256)])
def test_rotated_norm_is_no_further_from_float64(shape):
    torch.manual_seed(2)
    cos, sin = rope_table(torch.arange(shape[0]), shape[-1], 1e4, 1.0)

    def function(x, w):
        return rms_norm_rotate(x, w, 1e-6, cos.to(torch.promote_types(x.dtype, cos.dtype)), sin)

    require_no_further_off(function, [drawn(*shape), drawn(shape[-1], scale=0.3)], drawn(*shape))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (23, 77), (200, 256)])
def test_gate_is_no_further_from_float64(activation, shape):
    torch.manual_seed(3)
    inputs = [drawn(*shape, scale=4.0), drawn(*shape)]
    require_no_further_off(lambda a, b: gated_product(a, b, activation), inputs, drawn(*shape))


@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_tiles_of_logits_give_loss_and_gradient(soft_cap):
    torch.manual_seed(4)
    raw_nV, targets_n = drawn(9, 301, scale=6.0), torch.randint(301, (9,))
    exact = raw_nV.double().requires_grad_()
    capped = exact if soft_cap is None else soft_cap * torch.tanh(exact / soft_cap)
    losses_n = F.cross_entropy(capped, targets_n, reduction="none")
    losses_n.sum().backward()
    peak, total, target = torch.full((9, 1), -torch.inf), torch.zeros(9, 1), torch.zeros(9, 1)
    tiles = [(start, raw_nV[:, start : start + 128].contiguous()) for start in (0, 128, 256)]
    for start, tile in tiles:
        native.loss_tile_(tile, targets_n, start, soft_cap, peak, total, target)
    lse = peak + total.log()
    assert torch.allclose((lse - target)[:, 0].double(), losses_n, atol=1e-5)
    for start, tile in tiles:
        found = native.loss_tile_gradient_(tile, targets_n, start, soft_cap, lse)
        true = exact.grad[:, start : start + 128]
        assert torch.allclose(found.double(), true, rtol=2 * HALF_STEP, atol=2e-5)


def test_what_is_not_finite_stays_so():
    x_SD = drawn(5, 64)
    x_SD[2, 3] = torch.nan
    scale_D, up_SD = torch.ones(64), torch.ones_like(x_SD)
    assert native.norm_forward(x_SD, scale_D, 1e-6, None, None)[0][2].isnan().all()
    assert native.gate_forward(x_SD, up_SD, "silu").isnan().sum() == 1
    state = [torch.zeros(5, 1) for _ in range(3)]
    native.loss_tile_(x_SD, torch.zeros(5, dtype=torch.int64), 0, None, *state)
    assert state[1].isnan().squeeze().tolist() == [False, False, True, False, False]


def test_other_tensors_take_the_plain_form():
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert not native.serves(torch.zeros(3))
    with FakeTensorMode():
        assert not native.serves(torch.zeros(3, dtype=torch.bfloat16))
        assert rms_norm(torch.zeros(3, 4, dtype=torch.bfloat16), None, 1e-6).shape == (3, 4)
    assert not native.serves(torch.zeros(3, dtype=torch.bfloat16, device="meta"))


def test_equal_calls_give_equal_bits():
    torch.manual_seed(5)
    x_SD, grad_SD, scale_D = drawn(900, 64), drawn(900, 64), torch.randn(64)
    _, inverse = native.norm_forward(x_SD, scale_D, 1e-6, None, None)
    runs = [
        native.norm_backward(grad_SD, x_SD, scale_D, inverse, None, None, True) for _ in range(5)
    ]
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0]))


@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize(
    ("starts", "tokens", "heads", "kv_heads", "channels"),
    [
        ((0,), 1, 1, 1, 32),
        ((0, 1, 4, 37), 101, 4, 1, 64),
        ((0, 70, 71), 200, 6, 2, 96),
        ((0,), 133, 2, 2, 32),
        ((0, 40), 300, 4, 1, 256),
    ],
)
def test_attention_is_no_further_from_float64(starts, tokens, heads, kv_heads, channels, window):
    torch.manual_seed(6)
    shapes = [(tokens, count, channels) for count in (heads, kv_heads, kv_heads)]
    inputs = [drawn(*shape) for shape in shapes]
    documents = Documents.from_starts(starts, tokens)
    if not native.serves_attention(*inputs, max(documents.lengths)):
        pytest.skip("no bfloat16 dot products on this processor")

    def function(q, k, v):
        return packed_attention(q, k, v, documents, scale=channels**-0.5, window=window)

    require_no_further_off(function, inputs, drawn(*shapes[0]))


def test_attention_tells_what_is_not_finite():
    inputs = [drawn(40, 1, 32) for _ in range(3)]
    inputs[1][20] = torch.nan
    documents = Documents.from_starts((0, 10), 40)
    if native.serves_attention(*inputs, 40):
        out = packed_attention(*inputs, documents, scale=1.0)
        assert out[:20].isfinite().all() and out[20:].isnan().all()
