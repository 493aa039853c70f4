"""The graph of what a real rank still has to do: what is remembered, and for how long."""

from __future__ import annotations

import pytest

from phalanx.action import Alloc, Compute, Free
from phalanx.errors import CheckError
from phalanx.mesh import Mesh
from phalanx.worlds import pending
from phalanx.worlds.pending import Entry, Pending


def decide(queue: Pending, label: str, after: tuple[str, ...] = ()) -> Entry:
    (entry,) = queue.add([Compute(op="x", label=label, after=after)], 0, planned=False)
    return entry


def carry_out(queue: Pending, entry: Entry) -> None:
    queue.ready.remove(entry)
    queue.set_ended(entry)


def test_labels_of_decisions_are_forgotten_some_time_after_their_end(monkeypatch):
    monkeypatch.setattr(pending, "KEEP_LABELS", 5)
    queue = Pending(0, traced_steps=())
    held = decide(queue, "held")
    queue.ready.remove(held)
    queue.set_under_way(held)
    for number in range(100):
        queue.add([Compute(op="x", label=f"{number}", lane="other")], 0, planned=False)
        carry_out(queue, queue.ready[0])
    assert len(queue._labels) == 5 + 1, "the last five that ended, and what is open"
    decide(queue, "newer", after=("95", "99", "held"))
    with pytest.raises(CheckError, match="waits for a label that its rank never had") as caught:
        decide(queue, "older", after=("94",))
    assert (caught.value.code, caught.value.value) == ("check/label", "94")


def test_a_label_that_was_given_again_means_the_newer_one(monkeypatch):
    monkeypatch.setattr(pending, "KEEP_LABELS", 3)
    queue = Pending(0, traced_steps=())
    carry_out(queue, decide(queue, "again"))
    newer = decide(queue, "again")
    carry_out(queue, newer)
    for label in "ab":
        carry_out(queue, decide(queue, label))
    assert queue._labels["again"] is newer, "forgetting the older one leaves the newer one"


def test_labels_of_programs_stay(monkeypatch):
    monkeypatch.setattr(pending, "KEEP_LABELS", 1)
    queue = Pending(0, traced_steps=())
    steps = [Compute(op="x", label=f"step{number}") for number in range(9)]
    for entry in queue.add(steps, 1, planned=True):
        carry_out(queue, entry)
    assert not decide(queue, "then", after=("step0", "step8")).waits


def test_the_nth_free_gives_back_what_the_nth_alloc_took():
    queue = Pending(0)
    actions = [
        Alloc(tensor="x", num_bytes=8.0),
        Alloc(tensor="x", num_bytes=3.0, memory="host"),
        Alloc(tensor="x", num_bytes=5.0, lane="ahead", after=("first",)),
        Free(tensor="x", label="first"),
        Free(tensor="x", memory="host"),
    ]
    entries = queue.add(actions, 1, planned=True) + queue.add([Free(tensor="x")], 2, planned=True)
    rows = [entry.row(Mesh(dp=1), 0.0, 0.0) for entry in entries]
    assert [row["payload_bytes"] for row in rows] == [8.0, 3.0, 5.0, 8.0, 3.0, 5.0]
    assert not queue._taken_bytes, "what was given back is not remembered"
