"""What families vary: scaled and partial frequencies, rotation alone, plain norms and bare ones."""

from __future__ import annotations

from math import tau

import pytest
import torch

from phalanx.ops.norm import rms_norm, rms_norm_rotate
from phalanx.ops.rope import rope_table, rotate, rotate_rows


def frequencies(head_dim: int, theta: float, factor: float = 1.0, **variant) -> torch.Tensor:
    """Read off the angle of position 1, which stays below half a turn."""
    cos, sin = rope_table(torch.tensor([1]), head_dim, theta, factor, **variant)
    return torch.atan2(sin, cos).flatten()


def test_bands_keep_short_waves_divide_long_ones_and_blend_between():
    """Llama 3.1: factor 8, low 1, high 4 over a context of 8,192."""
    plain = frequencies(128, 500_000.0)
    scaled = frequencies(128, 500_000.0, 8.0, bands=(1.0, 4.0, 8192))
    waves = tau / plain
    short, long = waves < 8192 / 4, waves > 8192
    torch.testing.assert_close(scaled[short], plain[short], rtol=1e-5, atol=0)
    torch.testing.assert_close(scaled[long], plain[long] / 8, rtol=1e-5, atol=1e-8)
    between = ~short & ~long
    share = (8192 / waves[between] - 1) / 3
    expected = share * plain[between] + (1 - share) * plain[between] / 8
    torch.testing.assert_close(scaled[between], expected, rtol=1e-4, atol=1e-8)
    assert min(short.sum(), long.sum(), between.sum()) > 2


@pytest.mark.parametrize(("share", "count"), [(0.25, 4), (0.3, 4), (1.0, 16)])
def test_partial_rotation_turns_the_fastest_and_leaves_the_rest(share, count):
    """Exponents are those of the whole head: the fast ones do not move together."""
    plain, partial = frequencies(32, 1e4), frequencies(32, 1e4, rotated_frac=share)
    assert torch.equal(partial[:count], plain[:count])
    assert torch.equal(partial[count:], torch.zeros(16 - count))


def test_rotation_alone_equals_its_formula_with_gradients():
    torch.manual_seed(1)
    x_SHC = torch.randn(7, 3, 10, dtype=torch.float64, requires_grad=True)
    cos, sin = rope_table(torch.arange(7) * 5, 10, 100.0)
    ours, plain = rotate_rows(x_SHC, cos, sin), rotate(x_SHC, cos, sin)
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    grad = torch.randn_like(ours)
    mine, theirs = (torch.autograd.grad(out, x_SHC, grad)[0] for out in (ours, plain))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("offset", [0.0, 1.0, None])
@pytest.mark.parametrize("rotated", [False, True])
def test_norms_with_plain_and_without_weights_equal_their_formula(offset, rotated):
    """offset None: no weights at all."""
    torch.manual_seed(2)
    x_SHC = torch.randn(7, 3, 10, dtype=torch.float64, requires_grad=True)
    weight = None if offset is None else torch.randn(10, dtype=torch.float64, requires_grad=True)
    cos, sin = (t.double() for t in rope_table(torch.arange(7), 10, 100.0))
    plain = x_SHC * torch.rsqrt(x_SHC.square().mean(-1, keepdim=True) + 1e-3)
    plain = plain if weight is None else plain * (weight + offset)
    if rotated:
        plain = rotate(plain, cos, sin)
        ours = rms_norm_rotate(x_SHC, weight, 1e-3, cos, sin, offset or 0.0)
    else:
        ours = rms_norm(x_SHC, weight, 1e-3, offset or 0.0)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    inputs = [x_SHC] if weight is None else [x_SHC, weight]
    grad = torch.randn_like(ours)
    before = grad.clone()
    grads = [torch.autograd.grad(out, inputs, grad) for out in (ours, plain)]
    for mine, theirs in zip(*grads):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)
    assert torch.equal(grad, before)  # not changed in place
