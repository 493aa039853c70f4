"""Quantities and cluster shorthand: any text is a number, a cluster, or one clear line."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.errors import PhalanxError
from phalanx.hardware import Cluster, machine_names, parse_cluster
from phalanx.units import UNITS, parse_quantity
from tests.fuzz.inputs import near_texts, outcome, values

dimensions = st.sampled_from(sorted(UNITS))
near_quantities = st.sampled_from(["80 GiB", "400 Gbit/s", "1.5e3 ms", "1_000 TFLOP/s", "3 $/h"])


@settings(max_examples=300, deadline=None)
@given(
    text=st.text() | near_quantities.flatmap(near_texts) | values | st.none() | st.binary(),
    dimension=dimensions,
)
@example(text=10**400, dimension="bytes")
def test_any_value_is_a_quantity_or_refused(text, dimension: str):
    assert isinstance(outcome(parse_quantity, text, dimension), float | PhalanxError)


@settings(max_examples=200, deadline=None)
@given(number=st.floats(allow_nan=False, allow_infinity=False), data=st.data())
def test_a_number_with_its_unit_is_scaled(number: float, data: st.DataObject):
    dimension = data.draw(dimensions)
    unit, scale = data.draw(st.sampled_from(sorted(UNITS[dimension].items())))
    space = data.draw(st.sampled_from(["", " ", "  "]))
    assert parse_quantity(f"{number!r}{space}{unit}", dimension) == number * scale


@settings(max_examples=300, deadline=None)
@given(text=st.text() | near_texts("8xh100") | near_texts("16xa100-80g"))
@example(text="1" * 5000 + "xh100")
@example(text="8x" + "a" * 5000)
@example(text="8x" + "a" * 5000 + ".toml")
def test_any_text_is_a_cluster_or_refused(text: str):
    found = outcome(parse_cluster, text)
    assert isinstance(found, PhalanxError) or (
        found.num_devices >= 1 and found.machine.name in machine_names()
    )


@settings(max_examples=50, deadline=None)
@given(num=st.integers(1, 10**6), name=st.sampled_from(machine_names()), upper=st.booleans())
def test_a_cluster_prints_as_it_is_read(num: int, name: str, upper: bool):
    cluster = parse_cluster(f"{num}x{name.upper() if upper else name}")
    assert (cluster.num_devices, cluster.machine.name) == (num, name)
    assert parse_cluster(str(cluster)) == cluster


@pytest.mark.parametrize("text", ["", "0xh100", "00xh100", "-1xh100", "8x", "xh100", "8 h100"])
def test_what_is_no_cluster_shows_one(text: str):
    refusal = outcome(parse_cluster, text)
    assert not isinstance(refusal, Cluster) and refusal.legal
