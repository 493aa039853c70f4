"""The best of a vocabulary at every level of processor features and in plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.ops import native
from phalanx.ops.vocabulary_head import best, greedy, logits, registered
from tests.ops.levels import LEVELS, at_each_level, drawn

FORMS = [*LEVELS, "reference"]
at_each_form = pytest.mark.parametrize("form", FORMS)


def form_of(name):
    return native.plain() if name == "reference" else native.level(name)


def integers(*shape, dtype=torch.bfloat16):
    """Small whole numbers: products are exact in every dtype, and most of them are tied."""
    return torch.randint(-3, 4, shape).to(dtype)


def ranked(hidden_RD, head_VD, count):
    """Falling, equal logits in the order of their tokens, by a stable sort of everything."""
    logits_RV = hidden_RD.double() @ head_VD.double().T
    found = logits_RV.sort(dim=-1, descending=True, stable=True)
    return found.values[:, :count], found.indices[:, :count]


@at_each_form
@pytest.mark.parametrize("rows", [1, 5, 16, 64, 70])
@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_equal_logits_give_the_lowest_tokens(form, rows, count):
    torch.manual_seed(rows)
    hidden_RD, head_VD = integers(rows, 35), integers(9001, 35)  # more than one part of tokens
    with form_of(form):
        logits_RN, tokens_RN = best(hidden_RD, head_VD, count)
    expected = ranked(hidden_RD, head_VD, count)
    assert torch.equal(logits_RN.double(), expected[0]) and torch.equal(tokens_RN, expected[1])
    assert logits_RN.dtype == torch.float32


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(FORMS),
    st.integers(1, 20),
    st.integers(1, 100),
    st.integers(1, 70),
    st.integers(1, 64),
)
def test_any_sizes_give_what_a_stable_sort_gives(form, rows, tokens, columns, count):
    torch.manual_seed(rows + tokens)
    hidden_RD, head_VD = integers(rows, columns), integers(tokens, columns)
    with form_of(form):
        logits_RN, tokens_RN = best(hidden_RD, head_VD, count)
        token_R, logit_R = greedy(hidden_RD, head_VD)
    expected = ranked(hidden_RD, head_VD, min(count, tokens))
    assert torch.equal(logits_RN.double(), expected[0]) and torch.equal(tokens_RN, expected[1])
    assert torch.equal(token_R, tokens_RN[:, 0]) and torch.equal(logit_R, logits_RN[:, 0])


@at_each_level
def test_logits_are_sums_in_float32(level):
    torch.manual_seed(1)
    hidden_RD, head_VD = drawn(6, 640), drawn(3000, 640)
    with native.level(level):
        logits_RN, tokens_RN = best(hidden_RD, head_VD, 40)
    exact_RV = hidden_RD.double() @ head_VD.double().T
    sizes_RV = hidden_RD.double().abs() @ head_VD.double().abs().T
    error_RN = (logits_RN.double() - exact_RV.gather(1, tokens_RN)).abs()
    assert (error_RN <= 640 * 2.0**-23 * sizes_RV.gather(1, tokens_RN)).all()
    # no logit that was left out is larger by more than what sums may err
    least_R1 = exact_RV.topk(40).values[:, -1:]
    assert (logits_RN.double() >= least_R1 - 640 * 2.0**-23 * sizes_RV.max()).all()


@at_each_form
def test_the_soft_cap_keeps_the_order_and_bounds_the_logits(form):
    torch.manual_seed(2)
    hidden_RD, head_VD = integers(3, 50), integers(500, 50)
    with form_of(form):
        raw, tokens = best(hidden_RD, head_VD, 9)
        capped, same_tokens = best(hidden_RD, head_VD, 9, 20.0)
    assert torch.equal(tokens, same_tokens)
    torch.testing.assert_close(capped, 20.0 * torch.tanh(raw / 20.0), rtol=1e-6, atol=1e-5)


@at_each_form
def test_a_row_with_nan_says_so_and_the_others_do_not(form):
    torch.manual_seed(3)
    hidden_RD, head_VD = integers(4, 40), integers(300, 40)
    hidden_RD[2, 5] = torch.nan
    with form_of(form):
        token_R, logit_R = greedy(hidden_RD, head_VD)
        logits_RN, _ = best(hidden_RD, head_VD, 5)
    assert logit_R.isnan().tolist() == [False, False, True, False]
    assert logits_RN[2].isnan().all() and token_R[2] == 0
    head_VD[[7, 200], 0] = torch.nan  # in every row, those tokens come first
    with form_of(form):
        logits_RN, tokens_RN = best(hidden_RD[:2], head_VD, 3)
    assert tokens_RN[:, :2].tolist() == [[7, 200]] * 2
    assert logits_RN.isnan().tolist() == [[True, True, False]] * 2


@at_each_form
def test_rows_of_minus_infinity_are_still_chosen_from(form):
    hidden_RD, head_VD = torch.ones(2, 3), torch.full((40, 3), -torch.inf)
    with form_of(form):
        for count in (1, 4):
            logits_RN, tokens_RN = best(hidden_RD.bfloat16(), head_VD.bfloat16(), count)
            assert tokens_RN.tolist() == [list(range(count))] * 2
            assert (logits_RN == -torch.inf).all()


@at_each_level
def test_a_row_depends_on_no_other(level):
    torch.manual_seed(4)
    hidden_RD, head_VD = drawn(33, 100), drawn(9000, 100)
    with native.level(level):
        logits_RN, tokens_RN = best(hidden_RD, head_VD, 8)
        for rows in ([0], [32, 4], list(range(5, 25))):
            some_logits, some_tokens = best(hidden_RD[rows], head_VD, 8)
            assert torch.equal(some_logits, logits_RN[rows])
            assert torch.equal(some_tokens, tokens_RN[rows])


@at_each_level
@pytest.mark.parametrize("rows", [1, 17, 70])
def test_all_logits_are_those_that_the_best_were_chosen_from(level, rows):
    torch.manual_seed(8)
    hidden_RD, head_VD = drawn(rows, 100), drawn(9001, 100)
    with native.level(level):
        all_RV = logits(hidden_RD, head_VD)
        logits_RN, tokens_RN = best(hidden_RD, head_VD, 9)
        assert torch.equal(all_RV.gather(1, tokens_RN), logits_RN)
        assert torch.equal(logits(hidden_RD[-1:], head_VD), all_RV[-1:])
    assert all_RV.dtype == torch.float32 and torch.equal(all_RV.topk(9).values, logits_RN)


def test_logits_without_kernels_are_the_products():
    torch.manual_seed(9)
    hidden_RD, head_VD = torch.randn(3, 20), torch.randn(50, 20)
    raw_RV = hidden_RD @ head_VD.T
    torch.testing.assert_close(logits(hidden_RD, head_VD), raw_RV)
    torch.testing.assert_close(logits(hidden_RD, head_VD, 2.0), 2.0 * torch.tanh(raw_RV / 2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_dtypes_keep_their_digits(dtype):
    torch.manual_seed(5)
    hidden_RD, head_VD = torch.randn(3, 20, dtype=dtype), torch.randn(20_000, 20, dtype=dtype)
    logits_RN, tokens_RN = best(hidden_RD, head_VD, 100)
    expected = (hidden_RD @ head_VD.T).topk(100)
    assert torch.equal(tokens_RN, expected.indices) and logits_RN.dtype == dtype
    torch.testing.assert_close(logits_RN, expected.values)


def test_the_operator_of_torch_passes_its_checks():
    torch.manual_seed(6)
    hidden_RD, head_VD = drawn(3, 40), drawn(70, 40)
    torch.library.opcheck(registered, (hidden_RD, head_VD, 4, 2.0))
    torch.library.opcheck(registered, (hidden_RD.float(), head_VD.float(), 1))


def test_a_compiled_function_gives_the_same_bits():
    torch.manual_seed(7)
    hidden_RD, head_VD = drawn(3, 40), drawn(70, 40)
    compiled = torch.compile(
        lambda h, w: best(h, w, 5, 3.0)[0].neg(), backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(hidden_RD, head_VD), -best(hidden_RD, head_VD, 5, 3.0)[0])
