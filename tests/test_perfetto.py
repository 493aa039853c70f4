"""Exported traces against the trace event format: what the viewer needs of every event."""

from __future__ import annotations

import json
from pathlib import Path

from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.perfetto import write_perfetto
from phalanx.registry import build
from phalanx.trace import Trace, TraceBuilder
from phalanx.workload import toy_work
from phalanx.worlds.sim import SimWorld

REQUIRED = {
    "X": {"name", "cat", "dur", "args"},
    "i": {"name", "cat", "s", "args"},
    "M": {"name", "args"},
    "s": {"name", "cat", "id"},
    "f": {"name", "cat", "id", "bp"},
    "C": {"name", "args"},
}


def simulated() -> Trace:
    mesh = Mesh(pp=2, shard=2)
    program = lower(
        toy_work(4, [3, 5, 2]), mesh, build("pipeline", "1f1b"), [build("data", "fsdp")]
    )
    return drive(SimWorld(mesh, TableCost({}, missing_s=0.5)), program=program)


def read(path: Path) -> list[dict]:
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] == "ms" and "otherData" in document
    for event in document["traceEvents"]:
        assert {"ph", "pid", "tid", "ts"} | REQUIRED[event["ph"]] <= set(event)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ts"] >= 0 and event.get("dur", 1) > 0
    return document["traceEvents"]


def of_kind(events: list[dict], *kinds: str) -> list[dict]:
    return [event for event in events if event["ph"] in kinds]


def test_every_row_is_a_slice_or_an_instant_at_its_time(tmp_path):
    trace = simulated()
    write_perfetto(tmp_path / "t.json", trace)
    shown = of_kind(read(tmp_path / "t.json"), "X", "i")
    assert len(shown) == len(trace)
    for event, row in zip(shown, trace.rows()):
        assert event["name"] == (row["action_id"] or row["operator"])
        assert event["ts"] == row["start_s"] * 1e6 and event.get("dur", 0) == row["dur_s"] * 1e6
        assert event["pid"] == row["rank"]
        assert event["args"]["operator"] == row["operator"]
        assert event["args"].get("item", -1) == row["item"], "item 0 is an item"


def test_ranks_and_lanes_are_named_once(tmp_path):
    trace = simulated()
    write_perfetto(tmp_path / "t.json", trace)
    meta = of_kind(read(tmp_path / "t.json"), "M")
    processes = [event["args"]["name"] for event in meta if event["name"] == "process_name"]
    assert processes == [f"rank {rank} (simulated)" for rank in range(4)]
    threads = {
        (event["pid"], event["args"]["name"]) for event in meta if event["name"] == "thread_name"
    }
    assert threads == set(zip(trace.columns["rank"].tolist(), trace.column("lane").tolist()))


def test_an_arrow_leads_from_every_send_to_its_receive(tmp_path):
    trace = simulated()
    write_perfetto(tmp_path / "t.json", trace)
    events = read(tmp_path / "t.json")
    tails, heads = of_kind(events, "s"), of_kind(events, "f")
    assert len(tails) == len(heads) == len(trace.where(operator="send")) > 0
    sends = {(r["rank"], r["start_s"] * 1e6): r for r in trace.where(operator="send").rows()}
    target = {event["id"]: event["pid"] for event in heads}
    assert len(target) == len(heads), "every arrow has its own name"
    for tail in tails:
        assert target[tail["id"]] == sends[tail["pid"], tail["ts"]]["peer"]


def test_the_memory_counter_follows_time_and_ends_where_it_must(tmp_path):
    trace = simulated()
    write_perfetto(tmp_path / "t.json", trace)
    for rank in range(4):
        counters = [e for e in of_kind(read(tmp_path / "t.json"), "C") if e["pid"] == rank]
        moments = [event["ts"] for event in counters]
        used = [event["args"]["device_bytes"] for event in counters]
        assert moments == sorted(moments)
        assert max(used) == trace.notes["peak_bytes"]["device"][str(rank)]
        assert used[-1] == 0.0 and min(used) >= 0.0


def test_simulated_and_measured_share_an_axis_side_by_side(tmp_path):
    builder = TraceBuilder("measured", "job")
    builder.add(rank=0, lane="compute", operator="mlp.F", start_s=0.25, dur_s=1.5)
    builder.add(rank=1, lane="compute", operator="mlp.F", start_s=0.5, dur_s=1.5)
    write_perfetto(tmp_path / "t.json", [simulated(), builder.build()])
    events = read(tmp_path / "t.json")
    names = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    assert [names[pid] for pid in sorted(names)] == [
        *("rank 0 (simulated)", "rank 0 (measured)", "rank 1 (simulated)", "rank 1 (measured)"),
        *("rank 2 (simulated)", "rank 3 (simulated)"),
    ]
    measured = [e for e in of_kind(events, "X") if "measured" in names[e["pid"]]]
    assert [event["ts"] for event in measured] == [0.25e6, 0.5e6]


def test_an_empty_trace_is_a_valid_file(tmp_path):
    write_perfetto(tmp_path / "t.json", TraceBuilder("measured").build())
    assert read(tmp_path / "t.json") == []
