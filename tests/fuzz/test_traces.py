"""Trace files: bit rot, other archives and other heads are refused in one clear line."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.errors import PhalanxError
from phalanx.trace import COLUMNS, FORMAT_VERSION, Trace, TraceBuilder
from tests.fuzz.inputs import json_values, near_bytes, near_tables, outcome

HEAD = {
    "format_version": FORMAT_VERSION,
    "source": "simulated",
    "job": "x",
    "vocabulary": {},
    "notes": {"a": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


def small_trace() -> Trace:
    builder = TraceBuilder("simulated", "x")
    builder.add(rank=1, operator="mlp.F", action_id="0F0", start_s=1.0, dur_s=2.0)
    builder.add(rank=0, operator="send", lane="send:pp:1", axis="pp", peer=1)
    return builder.build()


@pytest.fixture(scope="module")
def saved(folder) -> bytes:
    small_trace().save(folder / "whole.npz")
    return (folder / "whole.npz").read_bytes()


def read(path) -> Any:
    """Load, and look at all of it."""
    return outcome(lambda: list(Trace.load(path).rows()))


def test_the_valid_one_is_read(folder, saved: bytes):
    assert read(folder / "whole.npz") == list(small_trace().rows())


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=200))
def test_any_file_is_refused(folder, content: bytes):
    path = folder / "any.npz"
    path.write_bytes(content)
    assert isinstance(read(path), PhalanxError)


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_bit_rot_is_refused_or_harmless(folder, saved: bytes, data: st.DataObject):
    path = folder / "rotten.npz"
    path.write_bytes(data.draw(near_bytes(saved)))
    assert isinstance(read(path), list | PhalanxError)


@settings(max_examples=120, deadline=None)
@given(head=near_tables(HEAD, json_values) | json_values)
@example(head=[])
@example(head={"format_version": FORMAT_VERSION})
def test_other_heads_are_refused_or_harmless(folder, head: Any):
    path = folder / "head.npz"
    columns = small_trace().columns
    np.savez(path, head=np.asarray(json.dumps(head)), **columns)
    assert isinstance(read(path), list | PhalanxError)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_other_columns_are_refused(folder, data: st.DataObject):
    path, trace = folder / "columns.npz", small_trace()
    head = HEAD | {"vocabulary": {k: list(v) for k, v in trace.vocabulary.items()}}
    name = data.draw(st.sampled_from(COLUMNS))
    other = data.draw(
        st.sampled_from([None, np.zeros(3), np.zeros((2, 2)), np.asarray("x"), np.asarray([7, 8])])
    )
    columns = {k: v for k, v in trace.columns.items() if k != name}
    if other is not None:
        columns[name] = other
    np.savez(path, head=np.asarray(json.dumps(head)), **columns)
    found = read(path)
    legal = isinstance(found, list) and other is not None and other.shape == (2,)
    assert legal or isinstance(found, PhalanxError), name


@pytest.mark.parametrize("path", ["/", "", "a\0b", "x" * 5000, "/no/such/file.npz"])
def test_paths_that_are_no_files_are_refused(path: str):
    assert isinstance(outcome(Trace.load, path), PhalanxError)


def test_a_pickle_is_refused(folder):
    """Loading one would run what it says."""
    path = folder / "pickle.npz"
    np.savez(path, head=np.asarray({"a": 1}, dtype=object))
    assert isinstance(read(path), PhalanxError)
