"""Tables of published numbers: any file is rows, the same as written, or one clear line."""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx import systems
from phalanx.errors import PhalanxError
from phalanx.systems import _published
from phalanx.systems._published import COLUMNS, Published, published, published_report
from tests.fuzz.inputs import near_bytes, outcome

cells = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=8)
rows = st.lists(st.lists(cells, min_size=len(COLUMNS), max_size=len(COLUMNS)), max_size=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Published tables are read from a folder of the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        made = tmp_path_factory.mktemp("published")
        patch.setattr(_published, "FOLDER", made)
        yield made


def write(folder: Path, lines: list[list[str]], header: tuple[str, ...] = COLUMNS) -> None:
    with open(folder / "made-up.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([header, *lines])


def report() -> Any:
    return outcome(published_report, "made-up", "Made up")


@settings(max_examples=100, deadline=None)
@given(lines=rows)
def test_rows_are_read_as_they_were_written(folder, lines: list[list[str]]):
    write(folder, lines)
    read = published("made-up")
    assert [list(asdict(row).values()) for row in read] == lines
    made = published_report("made-up", "Made up")
    assert len(made.rows) == len(lines)
    assert len({row.quantity for row in made.rows}) == len(lines), "no two rows share a name"


@settings(max_examples=100, deadline=None)
@given(data=st.data())
@example(data=None)
def test_broken_tables_are_refused(folder, data: st.DataObject | None):
    write(folder, [["x"] * len(COLUMNS)])
    path = folder / "made-up.csv"
    path.write_bytes(b"\xff" if data is None else data.draw(near_bytes(path.read_bytes())))
    assert isinstance(report(), systems.Report | PhalanxError)


@pytest.mark.parametrize("num_cells", [1, len(COLUMNS) - 1, len(COLUMNS) + 1])
def test_rows_of_another_length_are_refused(folder, num_cells: int):
    write(folder, [["x"] * num_cells])
    assert isinstance(report(), PhalanxError)


def test_a_number_is_a_number_and_a_word_a_reason():
    row = dict.fromkeys(COLUMNS, "x")
    assert Published(**row | {"value": "1.5"}).number == 1.5
    assert Published(**row | {"value": "OOM"}).number is None
