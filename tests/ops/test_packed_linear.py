"""Products of few rows at every level of processor features, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.ops import native
from phalanx.ops.packed_linear import packed_linear, registered
from tests.ops.levels import LEVELS, at_each_level, drawn, require_rounded_once


def require_product(x_SD, weight_FD):
    y_SF, exact_SF = packed_linear(x_SD, weight_FD), x_SD.double() @ weight_FD.double().T
    sizes_SF = x_SD.double().abs() @ weight_FD.double().abs().T
    require_rounded_once(y_SF, exact_SF, sizes_SF, x_SD.shape[1])


@at_each_level
@pytest.mark.parametrize(
    ("rows", "outputs", "columns"),
    [(1, 33, 640), (3, 17, 31), (16, 100, 2048), (17, 64, 96), (40, 1000, 65), (64, 31, 33)],
)
def test_products_of_awkward_sizes_are_rounded_once(level, rows, outputs, columns):
    torch.manual_seed(rows)
    with native.level(level):
        require_product(drawn(rows, columns), drawn(outputs, columns))


@pytest.mark.skipif(not LEVELS, reason="no C++ compiler here")
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(LEVELS or ["none"]),
    st.integers(1, 64),
    st.integers(1, 90),
    st.integers(1, 140),
    st.integers(0, 9),
)
def test_products_of_any_size_are_rounded_once(level, rows, outputs, columns, seed):
    torch.manual_seed(seed)
    with native.level(level):
        require_product(drawn(rows, columns), drawn(outputs, columns))


@at_each_level
def test_a_row_depends_neither_on_companions_nor_on_threads(level):
    torch.manual_seed(1)
    x_SD, weight_FD = drawn(64, 257), drawn(301, 257)
    threads = torch.get_num_threads()
    with native.level(level):
        all_SF = packed_linear(x_SD, weight_FD)
        for rows in ([5], [63, 0, 5], list(range(7, 40))):
            assert torch.equal(packed_linear(x_SD[rows], weight_FD), all_SF[rows])
        try:
            torch.set_num_threads(1 if threads > 1 else 2)
            assert torch.equal(packed_linear(x_SD, weight_FD), all_SF)
        finally:
            torch.set_num_threads(threads)


@at_each_level
def test_weights_changed_in_place_count_at_once(level):
    torch.manual_seed(2)
    x_SD, weight_FD = drawn(3, 64), drawn(20, 64)
    with native.level(level):
        before = packed_linear(x_SD, weight_FD)
        weight_FD.neg_()
        assert torch.equal(packed_linear(x_SD, weight_FD), -before)


@at_each_level
def test_what_is_not_a_number_reaches_its_rows_and_columns_only(level):
    torch.manual_seed(3)
    x_SD, weight_FD = drawn(18, 70), drawn(35, 70)
    x_SD[16, 69], weight_FD[33, 0] = torch.nan, torch.nan
    with native.level(level):
        is_nan_SF = packed_linear(x_SD, weight_FD).isnan()
    expected = torch.zeros_like(is_nan_SF)
    expected[16], expected[:, 33] = True, True
    assert torch.equal(is_nan_SF, expected)


@at_each_level
def test_nothing_is_written_beyond_the_result(level):
    """The product of a view inside a larger buffer leaves what lies around it alone."""
    torch.manual_seed(4)
    x_SD, weight_FD = drawn(5, 33), drawn(70, 33)
    with native.level(level):
        whole = packed_linear(x_SD, weight_FD)
        part = packed_linear(x_SD[1:4], weight_FD[3:50])
    assert torch.equal(part, whole[1:4, 3:50])


def test_other_dtypes_and_many_rows_are_torchs_own():
    torch.manual_seed(5)
    for x_SD in (torch.randn(3, 8), torch.randn(3, 8, dtype=torch.float64), drawn(65, 8)):
        weight_FD = torch.randn(5, 8).to(x_SD.dtype)
        assert torch.equal(packed_linear(x_SD, weight_FD), F.linear(x_SD, weight_FD))
    assert packed_linear(drawn(0, 8), drawn(5, 8)).shape == (0, 5)


def test_the_operator_of_torch_passes_its_checks():
    torch.manual_seed(6)
    for x_SD, weight_FD in ((drawn(3, 40), drawn(70, 40)), (torch.randn(2, 5), torch.randn(3, 5))):
        torch.library.opcheck(registered, (x_SD, weight_FD))


def test_a_compiled_function_gives_the_same_bits():
    torch.manual_seed(7)
    x_SD, weight_FD = drawn(3, 40), drawn(70, 40)
    compiled = torch.compile(
        lambda x, w: packed_linear(x, w).neg(), backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(x_SD, weight_FD), -packed_linear(x_SD, weight_FD))
