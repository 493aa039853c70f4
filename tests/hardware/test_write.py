"""A machine that was written is the machine that is read."""

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.hardware import Figure, machine_names, read_machine
from phalanx.hardware.write import machine_toml

_numbers = count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("written")


def again(folder, machine):
    path = folder / f"w{next(_numbers)}.toml"
    path.write_text(machine_toml(machine), encoding="utf-8")
    return replace(read_machine(str(path)), name=machine.name)


@pytest.mark.parametrize("name", machine_names())
def test_every_shipped_machine_survives_its_file(folder, name):
    assert again(folder, read_machine(name)) == read_machine(name)


figures = st.builds(
    Figure,
    value=st.floats(1e-9, 1e18) | st.integers(1, 10**15).map(float),
    kind=st.sampled_from(["measured", "published", "assumption"]),
    source=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    date=st.just("2026-11-30"),
)


@settings(max_examples=40, deadline=None)
@given(rate=figures, memory=figures, latency=figures)
def test_any_number_and_any_source_survive_to_the_last_digit(folder, rate, memory, latency):
    machine = replace(
        read_machine("h20"), matmul=rate, memory=memory, link_latency=latency, price=rate,
        bf16_peak=None, fp8_peak=None, fp8_matmul=None,
    )  # fmt: skip
    assert again(folder, machine) == machine


def test_numbers_are_written_with_the_unit_that_people_use():
    text = machine_toml(read_machine("h100"))
    for line in ('"794.5 TFLOP/s"', '"79.65 GiB"', '"3350 GB/s"', '"5 us"', '"700 W"', "= 0.92"):
        assert f"value {line}" in text or f"value = {line}" in text
