"""Machine files: any file is a machine that a cost model can use, or one clear line."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import phalanx.hardware
from phalanx.errors import PhalanxError
from phalanx.hardware import Machine, machine_names, read_machine
from tests.fuzz.inputs import near_tables, near_texts, outcome, to_toml

FOLDER = Path(phalanx.hardware.__file__).parent
TEXT = (FOLDER / "h100.toml").read_text()
VALID = tomllib.loads(TEXT)
_numbers = count()  # machines are remembered by path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("machines")


def read(folder: Path, content: str | bytes) -> Any:
    path = folder / f"m{next(_numbers)}.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return outcome(read_machine, str(path))


def require_usable(found: Any) -> None:
    assert isinstance(found, Machine | PhalanxError)
    if isinstance(found, Machine):
        assert found.devices_per_domain >= 1
        for name, figure in found.figures().items():
            assert isfinite(figure.value) and figure.value >= 0, (name, figure.value)


@settings(max_examples=60, deadline=None)
@given(content=st.text() | st.binary())
@example(content=b"\xff")
@example(content="x = " + "[" * 100_000)
def test_any_file_is_refused(folder: Path, content: str | bytes):
    assert isinstance(read(folder, content), PhalanxError)


@settings(max_examples=150, deadline=None)
@given(content=near_texts(TEXT))
def test_slips_of_the_pen_are_refused_or_harmless(folder: Path, content: str):
    require_usable(read(folder, content))


@settings(max_examples=200, deadline=None)
@given(table=near_tables(VALID))
@example(table=VALID | {"devices_per_domain": 0})
@example(table=VALID | {"devices_per_domain": "x"})
@example(table=VALID | {"devices_per_domain": 1.5})
@example(table=VALID | {"memory": VALID["memory"] | {"value": float("nan")}})
@example(table=VALID | {"memory": VALID["memory"] | {"value": -1}})
@example(table=VALID | {"memory": VALID["memory"] | {"value": 10**400}})
def test_wrong_entries_are_refused_or_harmless(folder: Path, table: dict[str, Any]):
    require_usable(read(folder, to_toml(table)))


@pytest.mark.parametrize("name", machine_names())
def test_a_machine_written_again_is_the_same(folder: Path, name: str):
    table = tomllib.loads((FOLDER / f"{name}.toml").read_text())
    again = read(folder, to_toml(table))
    assert replace(again, name=name) == read_machine(name)
