"""Messages that share a link: processor sharing, exact where fractions are."""

from __future__ import annotations

import pytest

from phalanx.action import Compute, Program, Recv, Send
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.mesh import Mesh
from phalanx.trace import Trace
from phalanx.worlds.sim import Links, SimWorld


def play(starts: list[float], seconds: list[float], width: float = 1.0, **cost) -> Trace:
    """Message i goes from rank i to rank n + i after `starts[i]` over one shared link."""
    count = len(starts)
    mesh = Mesh(side=2, pair=count)
    prices = {f"work{i}": start for i, start in enumerate(starts)}
    prices |= {f"send{i}": each for i, each in enumerate(seconds)}
    lists = [
        *(
            (
                Compute(op="work", label=f"work{i}"),
                Send(axis="side", peer=1, tensor="x", label=f"send{i}"),
            )
            for i in range(count)
        ),
        *((Recv(axis="side", peer=0, tensor="x", label=f"recv{i}"),) for i in range(count)),
    ]
    links = Links(link_of=lambda source, target: "link", width={"link": width})
    world = SimWorld(mesh, TableCost(prices, **cost), links=links)
    return drive(world, program=Program(mesh, tuple(lists), tuple(range(mesh.size))))


def ends(trace: Trace) -> list[float]:
    sends = trace.where(operator="send")
    assert sends.columns["dur_s"].tolist() == trace.where(operator="recv").columns["dur_s"].tolist()
    return (sends.columns["start_s"] + sends.columns["dur_s"]).tolist()


def test_a_message_alone_takes_its_own_time():
    assert ends(play([1.0], [4.0])) == [5.0]


def test_two_messages_halve_the_link():
    assert ends(play([0.0, 0.0], [4.0, 4.0])) == [8.0, 8.0]


def test_a_short_message_leaves_the_rest_of_the_link_to_the_long_one():
    # both at half speed until the short one is through at 4; then 4 of 6 are left, alone
    assert ends(play([0.0, 0.0], [2.0, 6.0])) == [4.0, 8.0]


def test_a_late_message_slows_the_early_one_from_then_on():
    # alone until 2 (2 of 4 done), half speed until 6; the other has done 2 of 3 by then
    assert ends(play([0.0, 2.0], [4.0, 3.0])) == [6.0, 7.0]


def test_a_link_of_width_two_carries_two_at_full_speed_and_shares_among_three():
    assert ends(play([0.0, 0.0], [4.0, 4.0], width=2.0)) == [4.0, 4.0]
    assert ends(play([0.0, 0.0, 0.0], [4.0, 4.0, 4.0], width=2.0)) == pytest.approx([6.0] * 3)


def test_latency_is_not_shared():
    # 1 s of latency, then 3 s of bandwidth shared by two
    assert ends(play([0.0, 0.0], [4.0, 4.0], latency_frac=0.25)) == [7.0, 7.0]


def test_equal_messages_end_at_one_moment_whatever_their_number():
    trace = play([0.0] * 7, [1.0] * 7)
    assert len(set(ends(trace))) == 1 and trace.end_s == pytest.approx(7.0)


def test_work_is_conserved():
    """A busy link of width 1 is through with everything when the sum of the messages is."""
    trace = play([0.0, 1.0, 2.0, 2.5], [5.0, 3.0, 1.0, 7.0])
    assert trace.end_s == pytest.approx(16.0)


def test_links_that_are_not_shared_cost_what_the_cost_model_says():
    mesh = Mesh(side=2, pair=2)
    lists = (
        (Send(axis="side", peer=1, tensor="x"),),
        (Recv(axis="side", peer=0, tensor="x"),),
    )
    links = Links(link_of=lambda source, target: "shared" if source == 0 else None)
    world = SimWorld(mesh, TableCost({"send": 3.0}), links=links)
    trace = drive(world, program=Program.by_axis(mesh, "side", lists))
    assert trace.columns["dur_s"].tolist() == [3.0] * 4
