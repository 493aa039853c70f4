"""What lies between the products of a serving step, against float64 of the plain torch code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from phalanx.ops import native
from phalanx.ops.gate import ACTIVATIONS
from phalanx.ops.rope import rope_table, rotate
from tests.ops.levels import HALF_STEP, LEVELS, drawn

pytestmark = pytest.mark.skipif(not LEVELS, reason="no C++ compiler here")
EPS = 1e-6


def normed(x, scale):
    return F.rms_norm(x, x.shape[-1:], scale, EPS)


def require_rounded(found, exact, times=1.0):
    """Within so many roundings to bfloat16 of the exact value."""
    error, allowed = (found.double() - exact).abs(), times * HALF_STEP * exact.abs() + 1e-6
    assert found.dtype == torch.bfloat16 and (error <= allowed).all(), (error / allowed).max()


@pytest.mark.parametrize("shape", [(1, 7), (5, 640), (40, 513)])
def test_a_norm_is_rounded_once(shape):
    torch.manual_seed(1)
    x_SD, scale_D = drawn(*shape, scale=3.0), torch.rand(shape[-1]) + 0.5
    before = x_SD.clone()
    found = native.add_norm_(x_SD, None, None, scale_D, EPS)
    require_rounded(found, normed(x_SD.double(), scale_D.double()), 1.001)
    assert torch.equal(x_SD, before)


@pytest.mark.parametrize("shape", [(1, 7), (5, 640), (40, 513)])
@pytest.mark.parametrize("has_after", [True, False])
def test_a_residual_is_added_in_place_and_normalised(shape, has_after):
    torch.manual_seed(2)
    x_SD, y_SD = drawn(*shape), drawn(*shape, scale=3.0)
    after_D, before_D = torch.rand(2, shape[-1]) + 0.5
    term_SD = normed(y_SD.float(), after_D).bfloat16() if has_after else y_SD
    plain_SD = x_SD + term_SD
    found = native.add_norm_(x_SD, y_SD, after_D if has_after else None, before_D, EPS)
    # float32 sums in another order may round the term to its neighbour
    step_SD = 2.0 * HALF_STEP * torch.maximum(term_SD.abs(), plain_SD.abs()).float()
    assert ((x_SD.float() - plain_SD.float()).abs() <= step_SD).all()
    assert (x_SD == plain_SD).float().mean() > 0.99
    require_rounded(found, normed(x_SD.double(), before_D.double()), 1.001)
    assert native.add_norm_(x_SD, y_SD, None, None, EPS) is None


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 6), (9, 154), (64, 4096)])
def test_gates_of_pairs_are_those_of_two_tensors(activation, shape):
    torch.manual_seed(3)
    gate_up_SF = drawn(*shape, scale=3.0)
    gate_SF, up_SF = gate_up_SF.chunk(2, -1)
    found = native.gate_pairs(gate_up_SF, activation)
    wide = gate_SF.double()
    exact = F.silu(wide) if activation == "silu" else F.gelu(wide, approximate="tanh")
    require_rounded(found, exact * up_SF.double(), 2.01)


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("num_parts", [1, 2, 3])  # queries; and keys that are values; and values
@pytest.mark.parametrize("norms_values", [True, False])
def test_heads_are_turned_and_stored_where_they_belong(has_norm, num_parts, norms_values):
    torch.manual_seed(4)
    rows, heads, kv_heads, channels = 11, 6, 2, 48
    num_made = heads + (num_parts - 1) * kv_heads
    made = drawn(rows, num_made, channels, scale=2.0)
    scale = torch.rand(heads + kv_heads, channels) + 0.5 if has_norm else None
    rope = rope_table(torch.randint(0, 900, (rows,)), channels, 1e4)
    places = torch.randperm(60)[: rows * kv_heads].view(rows, kv_heads)
    pools = torch.zeros(2, 60, channels, dtype=torch.bfloat16)
    found = native.turn_and_store(
        *(made, scale, rope, places, (pools[0], pools[1]), heads),
        eps=EPS,
        norms_values=norms_values,
    )
    wide = made[:, : heads + kv_heads].double()
    if scale is not None:
        wide = normed(wide, None) * scale[: wide.shape[1]].double()
    turned = rotate(wide, *(each.double() for each in rope))
    # rounded once, but float32 products of rotation may cancel
    largest = wide.abs().amax(-1, keepdim=True)
    for own, exact in ((found, turned[:, :heads]), (pools[0][places], turned[:, heads:])):
        if exact.shape[1]:
            at = slice(0, heads) if exact.shape[1] == heads else slice(heads, None)
            allowed = HALF_STEP * exact.abs() + 2.0**-20 * largest[:, at]
            assert ((own.double() - exact).abs() <= allowed).all()
    untouched = torch.ones(60, dtype=torch.bool)
    if num_parts > 1:
        untouched[places.flatten()] = False
        values = made[:, -kv_heads:].double()
        exact = normed(values, None) if norms_values else values
        require_rounded(pools[1][places], exact, 1.001 if norms_values else 0.0)
    assert (pools[:, untouched] == 0).all()


def test_what_is_not_a_number_stays_so():
    x_SD, scale_D = drawn(3, 32), torch.ones(32)
    x_SD[1, 4] = torch.nan
    assert native.add_norm_(x_SD.clone(), None, None, scale_D, EPS).isnan().all(1).tolist() == [
        False, True, False,
    ]  # fmt: skip
    assert native.gate_pairs(x_SD, "silu").isnan().sum() == 1
    rope = rope_table(torch.arange(3), 32, 1e4)
    pools = torch.zeros(2, 3, 32, dtype=torch.bfloat16)
    queries = native.turn_and_store(
        *(x_SD[:, None], None, rope, torch.arange(3)[:, None], (pools[0], pools[1]), 1),
        eps=EPS,
        norms_values=False,
    )
    assert queries.isnan().sum() == 2  # the channel and its partner


@pytest.mark.parametrize("count", [1, 1000, 1 << 17])
def test_reading_everything_reads_every_word(count):
    torch.manual_seed(5)
    words = torch.randint(-(2**62), 2**62, (count,))
    assert native.read_all(words) == int(words.sum())
