"""Traces: columns in, the same rows out, by every way there is."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import JobError, PlanError
from phalanx.trace import (
    COLUMNS,
    FLOAT_COLUMNS,
    INT_COLUMNS,
    TEXT_COLUMNS,
    Trace,
    TraceBuilder,
    merge,
)

FIELDS = {name: st.text(max_size=4) for name in TEXT_COLUMNS}
FIELDS |= {name: st.integers(-(2**40), 2**40) for name in INT_COLUMNS}
FIELDS |= {name: st.floats(allow_nan=False, allow_infinity=False) for name in FLOAT_COLUMNS}
rows = st.lists(st.fixed_dictionaries({}, optional=FIELDS), max_size=6)


def trace_of(*rows: dict, **notes) -> Trace:
    builder = TraceBuilder("simulated", "job")
    builder.extend(rows)
    builder.notes.update(notes)
    return builder.build()


TRACE = trace_of(
    {"rank": 1, "action_id": "b", "operator": "mlp.F", "start_s": 2.0, "dur_s": 1.0},
    {"rank": 0, "operator": "send", "lane": "send:pp:1", "start_s": 2.0, "dur_s": 4.0, "item": 3},
    {"rank": 0, "action_id": "a", "operator": "mlp.F", "start_s": 0.0, "dur_s": 2.0},
)


@given(rows)
def test_rows_come_back_with_empty_values_filled_in(written: list[dict]):
    empty = dict.fromkeys(TEXT_COLUMNS, "") | dict.fromkeys(FLOAT_COLUMNS, 0.0)
    empty |= {"rank": 0, "step": 0, "item": -1, "peer": -1}
    assert list(trace_of(*written).rows()) == [empty | row for row in written]


@given(written=rows)
def test_a_saved_trace_is_the_same_trace(written: list[dict], tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "t.npz"
    trace = trace_of(*written, machine="here", counts={"x": [1, 2]})
    trace.save(path)
    loaded = Trace.load(path)
    assert list(loaded.rows()) == list(trace.rows())
    assert (loaded.source, loaded.job, loaded.notes) == (trace.source, trace.job, trace.notes)


def test_another_format_version_is_refused(tmp_path):
    path = tmp_path / "t.npz"
    head = {"format_version": 99, "source": "simulated", "job": "", "vocabulary": {}, "notes": {}}
    np.savez(path, head=np.asarray(json.dumps(head)))
    with pytest.raises(PlanError) as caught:
        Trace.load(path)
    assert caught.value.code == "plan/format" and caught.value.value == 99


def saved_with(path, head: dict | None = None, **columns: np.ndarray) -> None:
    """The trace of this file, with another head or other columns."""
    written = {"format_version": 1, "source": "simulated", "job": "", "notes": {}}
    written |= {"vocabulary": {name: list(words) for name, words in TRACE.vocabulary.items()}}
    written |= head or {}
    np.savez(path, head=np.asarray(json.dumps(written)), **{**TRACE.columns, **columns})


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"lane": np.full(len(TRACE), -1, np.int32)}, "lane"),
        ({"lane": np.full(len(TRACE), 9, np.int32)}, "lane"),
        ({"lane": np.zeros(len(TRACE))}, "lane"),
        ({"step": np.zeros(len(TRACE) + 1, np.int64)}, "step"),
        ({"flops": np.zeros((len(TRACE), 1))}, "flops"),
        ({"head": {"vocabulary": {}}}, "vocabulary.role"),
        ({"head": {"source": "guessed"}}, "source"),
        ({"head": {"job": None}}, "job"),
    ],
)
def test_a_file_with_other_columns_or_another_head_is_refused(tmp_path, changed: dict, where: str):
    path = tmp_path / "t.npz"
    saved_with(path)
    assert list(Trace.load(path).rows()) == list(TRACE.rows())
    saved_with(path, **changed)
    with pytest.raises(PlanError) as caught:
        Trace.load(path)
    assert (caught.value.code, caught.value.where) == ("trace/file", f"{path}: {where}")


def test_a_damaged_file_and_a_missing_one_are_told_apart(tmp_path):
    path = tmp_path / "t.npz"
    with pytest.raises(JobError) as missing:
        Trace.load(path)
    assert missing.value.code == "job/not-found"
    TRACE.save(path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(PlanError) as damaged:
        Trace.load(path)
    assert damaged.value.code == "trace/file"


def test_the_end_is_the_latest_end_not_the_last_row():
    assert TRACE.end_s == 6.0
    assert trace_of().end_s == 0.0 and len(trace_of()) == 0


def test_where_selects_by_text_and_number_and_an_unknown_word_selects_nothing():
    assert [row["action_id"] for row in TRACE.where(operator="mlp.F").rows()] == ["b", "a"]
    assert len(TRACE.where(rank=0, operator="mlp.F")) == 1
    assert len(TRACE.where(operator="mlp")) == 0 == len(TRACE.where(rank=7))


def test_log_and_history_have_issue_order_and_time_order():
    assert TRACE.log(0) == [("send", ""), ("mlp.F", "a")]
    assert TRACE.log(0, ["mlp.F"]) == [("mlp.F", "a")]
    assert TRACE.history() == [(0.0, 0, "a"), (2.0, 0, "send"), (2.0, 1, "b")]
    assert TRACE.history(rank=1) == [(2.0, 1, "b")]


def test_merging_keeps_rows_in_order_and_all_notes():
    one, other = trace_of({"rank": 1, "layer": "x"}, a=1), trace_of({"rank": 0, "layer": "y"}, b=2)
    merged = merge([one, other])
    assert [(row["rank"], row["layer"]) for row in merged.rows()] == [(1, "x"), (0, "y")]
    assert merged.notes == {"a": 1, "b": 2}


def test_a_frame_has_all_columns_of_the_format():
    pytest.importorskip("pandas")
    frame = TRACE.to_pandas()
    assert list(frame.columns) == ["format_version", "source", "job", *COLUMNS]
    assert frame["operator"].tolist() == ["mlp.F", "send", "mlp.F"]
