"""Checks of programs and schedules: each rule broken once, and the real ones pass."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.action import Action, Alloc, Collective, Compute, Free, Program, Recv, Send
from phalanx.check import check_order, check_program, format_grid
from phalanx.errors import CheckError, JobError
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.policy import Step
from phalanx.registry import build
from phalanx.workload import toy_work
from tests.order_strategies import Drawn, orders


def program(mesh: Mesh, *lists: list[Action], axis: str = "pp") -> Program:
    return Program.by_axis(mesh, axis, lists)


def broken(code: str, mesh: Mesh, *lists: list[Action], axis: str = "pp", **options) -> CheckError:
    with pytest.raises(CheckError) as caught:
        check_program(program(mesh, *lists, axis=axis), **options)
    assert caught.value.code == code, caught.value
    return caught.value


def send(peer: int, tensor: str, **rest) -> Send:
    return Send(axis="pp", peer=peer, tensor=tensor, lane=f"send:pp:{peer}", **rest)


def recv(peer: int, tensor: str, **rest) -> Recv:
    return Recv(axis="pp", peer=peer, tensor=tensor, lane=f"recv:pp:{peer}", **rest)


def gather(label: str, kind: str = "all_gather", payload: float = 8.0, **rest) -> Collective:
    return Collective(
        collective=kind, axis="dp", label=label, lane="axis:dp", payload_bytes=payload, **rest
    )


# ---- one list ----------------------------------------------------------------------------------


def test_labels_must_exist_and_be_unique():
    error = broken(
        "check/label", Mesh(pp=1), [Compute(op="a", label="grad"), gather("x", after=("gard",))]
    )
    assert error.value == "'gard'" and error.legal == ("grad",)
    broken("check/label", Mesh(pp=1), [Compute(op="a", label="x"), Compute(op="b", label="x")])


def test_a_cycle_through_after_and_list_order_is_shown():
    error = broken(
        "check/cycle",
        Mesh(pp=1),
        [
            Compute(op="a", label="1", after=("3",)),
            Compute(op="a", label="2"),
            Compute(op="a", label="3", lane="other", after=("2",)),
            Compute(op="a", label="4", lane="third"),
        ],
    )
    assert error.detail == "  1 waits for 3 waits for 2 waits for 1"


def test_memory_is_counted_as_one_thread_would_run_the_list():
    actions = [
        Alloc(tensor="x", num_bytes=6.0, label="take x"),
        Alloc(tensor="y", num_bytes=6.0, label="take y", lane="other", after=("give x",)),
        Compute(op="a"),
        Free(tensor="x", label="give x"),
    ]
    check_program(program(Mesh(pp=1), actions), memory_bytes=6.0)
    error = broken("check/memory", Mesh(pp=1), actions, memory_bytes={"device": 5.0})
    assert error.where == "rank 0: take x" and error.value == "peak 6 B"
    broken("check/handle", Mesh(pp=1), [Free(tensor="x")])


# ---- messages ----------------------------------------------------------------------------------


def test_a_send_without_receive_and_the_reverse():
    error = broken("check/send", Mesh(pp=2), [send(1, "x", label="s")], [])
    assert error.where == "rank 0" and "rank 1 never receives 'x'" in error.rule
    error = broken("check/send", Mesh(pp=2), [], [recv(0, "x", label="r")])
    assert error.where == "rank 1" and "rank 0 never sends 'x'" in error.rule
    broken("check/send", Mesh(pp=2), [send(1, "x")], [recv(0, "y")])
    broken("check/send", Mesh(pp=2), [send(1, "x"), send(1, "x")], [recv(0, "x")])
    broken("check/send", Mesh(pp=2), [send(0, "x"), recv(0, "x")], [])


def test_sizes_are_compared_message_by_message():
    error = broken(
        "check/size",
        Mesh(pp=2),
        [send(1, "x", payload_bytes=4.0), send(1, "x", payload_bytes=8.0, label="second")],
        [recv(0, "x", payload_bytes=4.0), recv(0, "x", payload_bytes=6.0)],
    )
    assert error.where == "rank 0: second" and error.legal == ("6",)


def test_a_wrong_axis_or_peer_is_refused():
    for actions in ([send(2, "x")], [Send(axis="tp", peer=0, tensor="x")]):
        with pytest.raises(JobError):
            check_program(program(Mesh(pp=2), actions, []))


def test_two_sends_that_face_each_other_hang_on_one_rendezvous_channel():
    error = broken(
        "check/deadlock",
        Mesh(pp=2),
        [send(1, "x"), recv(1, "y")],
        [send(0, "y"), recv(0, "x")],
    )
    assert "send x waits for rank 1 to receive x" in error.detail
    check_program(program(Mesh(pp=2), [send(1, "x"), recv(1, "y")], [recv(0, "x"), send(0, "y")]))


def test_a_ring_of_dependencies_over_three_ranks_is_a_deadlock():
    lists = []
    for rank in range(3):
        after, before = (rank + 1) % 3, (rank - 1) % 3
        incoming = recv(before, f"{before}", label="in")
        lists.append([incoming, send(after, f"{rank}", after=("in",))])
    broken("check/deadlock", Mesh(pp=3), *lists)
    lists[0] = [send(1, "0"), recv(2, "2")]
    check_program(program(Mesh(pp=3), *lists))


# ---- collectives -------------------------------------------------------------------------------


def test_members_that_order_collectives_differently_are_named_with_both():
    error = broken(
        "check/collective",
        Mesh(dp=3),
        [gather("1"), gather("2"), gather("3", "all_reduce")],
        [gather("1"), gather("2"), gather("3", "all_reduce")],
        [gather("1"), gather("3", "all_reduce"), gather("2")],
        axis="dp",
    )
    assert error.where == "ranks 0 and 2"
    assert error.value == "all_gather 2 (8 bytes) and all_reduce 3 (8 bytes)"
    assert error.detail.splitlines() == ["  rank 0: 1 [2] 3", "  rank 2: 1 [3] 2"]


def test_members_must_agree_on_sizes_and_counts():
    error = broken(
        "check/collective", Mesh(dp=2), [gather("x")], [gather("x", payload=4.0)], axis="dp"
    )
    assert "8 bytes" in error.value and "4 bytes" in error.value
    error = broken("check/collective", Mesh(dp=2), [gather("x")], [], axis="dp")
    assert error.value == "all_gather x (8 bytes) and nothing"


def test_an_all_to_all_may_be_uneven():
    lists = [[gather("x", "all_to_all", payload=float(n))] for n in (3, 5)]
    check_program(program(Mesh(dp=2), *lists, axis="dp"))


def test_collectives_of_two_axes_in_opposite_order_hang():
    mesh = Mesh(pp=2, dp=2)
    one = Collective(collective="all_reduce", axis="pp", lane="comm")
    two = Collective(collective="all_reduce", axis="dp", lane="comm")
    lists = ((one, two), (two, one))
    with pytest.raises(CheckError) as caught:
        check_program(Program(mesh, lists, (0, 1, 1, 0)))
    assert caught.value.code == "check/deadlock"


def test_listed_members_are_checked_on_every_rank():
    mesh = Mesh(dp=4)
    pair = [Collective(collective="all_reduce", axis="g", members=(0, 2), label="x")]
    check_program(Program(mesh, (pair, []), (0, 1, 0, 1)))
    with pytest.raises(CheckError) as caught:
        check_program(Program(mesh, (pair, []), (0, 1, 1, 1)))
    assert caught.value.code == "check/deadlock" and "x waits for ranks 2" in caught.value.detail


# ---- real programs -----------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["1f1b", "gpipe"]),
    st.permutations(["pp", "shard", "tp"]),
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
)
def test_lowered_steps_pass(name, axes, sizes, item_tokens):
    mesh = Mesh(dict(zip(axes, sizes)))
    specs = [build("tensor", "megatron"), build("data", "fsdp")]
    check_program(lower(toy_work(4, item_tokens), mesh, build("pipeline", name), specs))


def test_four_thousand_ranks_are_checked_in_seconds():
    mesh = Mesh(pp=16, shard=32, tp=8)
    specs = [build("tensor", "megatron"), build("data", "fsdp")]
    step = lower(toy_work(16, [8] * 32), mesh, build("pipeline", "1f1b"), specs)
    began_s = time.process_time()
    check_program(step)
    assert mesh.size == 4096 and time.process_time() - began_s < 5.0


# ---- schedules ---------------------------------------------------------------------------------


def steps(text: str) -> list[Step]:
    return [Step(int(word[0]), word[1], int(word[2:])) for word in text.split()]


def wrong(code: str, *rows: str, num_items: int = 2) -> CheckError:
    lists = [steps(row) for row in rows]
    with pytest.raises(CheckError) as caught:
        check_order(lists, len(rows), num_items, range(len(rows)))
    assert caught.value.code == code
    return caught.value


GOOD = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def test_a_complete_schedule_passes_whole_or_in_halves_or_for_inference():
    for rows in (GOOD, ("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1B1 1W0"), ("0F0 0F1", "1F0 1F1")):
        check_order([steps(row) for row in rows], 2, 2, (0, 1))


def test_a_missing_step_is_shown_at_the_end_of_its_rank():
    error = wrong("order/missing", "0F0 0F1 0B0", GOOD[1])
    assert (error.where, str(error.value)) == ("rank 0, slot 3", "0B1")
    assert error.detail.splitlines() == [
        "  slot   0    1    2    3",
        "rank 0 0F0  0F1  0B0   [?]",
        "rank 1 1F0  1B0  1F1  1B1",
    ]
    assert str(wrong("order/missing", GOOD[0], "1F0 1I0 1F1 1I1 1W1").value) == "1W0"
    assert str(wrong("order/missing", GOOD[0], "1F0 1W0 1F1 1B1").value) == "1I0"
    assert str(wrong("order/missing", "0F0 0B0", "1F0 1B0").value) == "0F1"


def test_a_doubled_step_is_marked_twice():
    error = wrong("order/doubled", "0F0 0F1 0F0 0B0 0B1", GOOD[1])
    assert "[0F0]" in error.detail and error.detail.count("[") == 2
    error = wrong("order/doubled", GOOD[0], "1F0 1B0 1W0 1F1 1B1")
    assert str(error.value) == "1W0"


def test_steps_that_cannot_be_are_refused():
    assert "holds stage 0" in wrong("order/illegal", "0F0 0F1 0B0", GOOD[1] + " 0B1").rule
    assert wrong("order/illegal", GOOD[0] + " 0F2", GOOD[1]).legal == (1,)
    assert wrong("order/illegal", GOOD[0] + " 2F0", GOOD[1]).legal == (1,)
    assert "kind" in wrong("order/illegal", GOOD[0] + " 0X0", GOOD[1]).rule


def test_a_schedule_that_waits_in_a_circle_marks_every_waiting_rank():
    error = wrong("check/deadlock", GOOD[0], "1F0 1B1 1B0 1F1")
    assert "it needs 1B0" in error.rule
    assert "[0B0]" in error.detail and "[1B1]" in error.detail


@settings(max_examples=80, deadline=None)
@given(orders())
def test_every_legal_order_passes(drawn: Drawn):
    lists, rank_of_stage, num_items = drawn
    check_order(lists, len(rank_of_stage), num_items, rank_of_stage)


@settings(max_examples=80, deadline=None)
@given(orders(), st.data())
def test_taking_any_step_out_or_twice_is_found(drawn: Drawn, data: st.DataObject):
    lists, rank_of_stage, num_items = drawn
    rank = data.draw(st.sampled_from([r for r, row in enumerate(lists) if row]))
    slot = data.draw(st.integers(0, len(lists[rank]) - 1))
    row = lists[rank]
    is_only_backward = all(s.kind == "F" or s == row[slot] for row_ in lists for s in row_)
    if not is_only_backward:
        less = [*lists[:rank], row[:slot] + row[slot + 1 :], *lists[rank + 1 :]]
        with pytest.raises(CheckError) as caught:
            check_order(less, len(rank_of_stage), num_items, rank_of_stage)
        assert caught.value.code == "order/missing"
    more = [*lists[:rank], [*row, row[slot]], *lists[rank + 1 :]]
    with pytest.raises(CheckError) as caught:
        check_order(more, len(rank_of_stage), num_items, rank_of_stage)
    assert caught.value.code == "order/doubled"


def test_registered_orders_pass():
    for name in ("1f1b", "gpipe"):
        order = build("pipeline", name)
        for num_ranks, num_items in [(1, 1), (2, 3), (4, 9), (5, 2)]:
            lists = order.order(num_ranks, num_items)
            check_order(
                lists, order.num_stages(num_ranks), num_items, order.rank_of_stage(num_ranks)
            )


def test_a_grid_shows_a_window_around_the_first_mark():
    lists = [[f"{rank}F{slot}" for slot in range(40)] for rank in range(30)]
    grid = format_grid(lists, [(20, 30)], max_slots=4, max_ranks=3)
    assert grid.splitlines() == [
        "   slot    28     29     30     31",
        "rank 19 19F28  19F29  19F30  19F31",
        "rank 20 20F28  20F29 [20F30] 20F31",
        "rank 21 21F28  21F29  21F30  21F31",
        "(27 more ranks and 36 more slots not shown)",
    ]


def test_a_grid_may_have_empty_cells():
    assert format_grid([["0F0", None, "0B0"], [None, "1F0"]]).splitlines() == [
        "  slot   0    1    2",
        "rank 0 0F0       0B0",
        "rank 1      1F0",
    ]
