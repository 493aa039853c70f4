"""Quantities with units: exact where floats are, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import JobError
from phalanx.units import (
    UNITS,
    format_bytes,
    format_count,
    format_flops,
    format_s,
    parse_quantity,
)


@pytest.mark.parametrize(
    "text, dimension, value",
    [
        ("80 GiB", "bytes", 80 * 2**30),
        ("80GB", "bytes", 80e9),
        ("1_000 kB", "bytes", 1e6),
        ("512", "bytes", 512.0),
        ("0.5 MiB", "bytes", 2.0**19),
        ("400 Gbit/s", "bytes_per_s", 50e9),
        ("400 Gb/s", "bytes_per_s", 50e9),
        ("400 GB/s", "bytes_per_s", 400e9),
        ("2 ms", "s", 2e-3),
        ("1.5 h", "s", 5400.0),
        ("3 min", "s", 180.0),
        ("989 TFLOPS", "flops_per_s", 989e12),
        ("989 TFLOP/s", "flops_per_s", 989e12),
        ("1e3 GFLOP", "flops", 1e12),
        ("4M", "tokens", 4e6),
        ("15 T", "tokens", 15e12),
        ("-2 s", "s", -2.0),
        ("2.49 $/h", "usd_per_h", 2.49),
        ("0.7 kW", "w", 700.0),
        (3, "s", 3.0),
    ],
)
def test_a_quantity_is_si(text, dimension: str, value: float):
    assert parse_quantity(text, dimension) == pytest.approx(value, rel=1e-15)


def test_bits_and_bytes_binary_and_decimal_are_told_apart():
    assert parse_quantity("8 Gb/s", "bytes_per_s") == parse_quantity("1 GB/s", "bytes_per_s")
    assert parse_quantity("1 GiB", "bytes") / parse_quantity("1 GB", "bytes") == 2**30 / 10**9


@given(st.sampled_from(sorted(UNITS)), st.data(), st.integers(0, 10**6))
def test_every_unit_of_every_dimension_is_read(dimension: str, data: st.DataObject, number: int):
    unit, scale = data.draw(st.sampled_from(sorted(UNITS[dimension].items())))
    for text in (f"{number} {unit}", f" {number}{unit} "):
        assert parse_quantity(text, dimension) == number * scale


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_si_already(value: float):
    assert parse_quantity(value, "s") == value


@pytest.mark.parametrize("text", ["", "GiB", "ten GiB", "1,5 GiB", "1 2", True, None, "0x10 B"])
def test_what_is_no_quantity_is_refused(text):
    with pytest.raises(JobError) as caught:
        parse_quantity(text, "bytes", "limits.memory")
    assert caught.value.where == "limits.memory"
    assert caught.value.code in ("job/bad-value", "unit/unknown") and caught.value.legal is not None


def test_an_unknown_unit_offers_near_ones_of_its_dimension():
    with pytest.raises(JobError) as caught:
        parse_quantity("80 Gib", "bytes")
    assert caught.value.code == "unit/unknown" and "GiB" in caught.value.legal
    with pytest.raises(JobError):
        parse_quantity("80 GiB", "s")


@pytest.mark.parametrize(
    "text, expected",
    [
        (format_bytes(1.5 * 2**30), "1.5 GiB"),
        (format_bytes(0), "0 B"),
        (format_bytes(1023), "1023 B"),
        (format_bytes(-(2**20)), "-1 MiB"),
        (format_s(7560), "2.1 h"),
        (format_s(90), "1.5 min"),
        (format_s(3.2), "3.2 s"),
        (format_s(0.015), "15 ms"),
        (format_s(8e-6), "8 us"),
        (format_s(0), "0 us"),
        (format_count(30.7e9), "30.7 B"),
        (format_count(12), "12"),
        (format_flops(1.2e12), "1.2 TFLOP"),
    ],
)
def test_numbers_are_printed_in_the_unit_that_a_reader_would_choose(text: str, expected: str):
    assert text == expected


@given(st.floats(1.0, 2.0**45))
def test_printed_bytes_are_read_back_to_four_digits(num_bytes: float):
    assert parse_quantity(format_bytes(num_bytes), "bytes") == pytest.approx(num_bytes, rel=1e-3)
