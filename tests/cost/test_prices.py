"""Prices from tables and from rates."""

from __future__ import annotations

import pytest

from phalanx.action import Collective, Compute, Move, Send
from phalanx.cost.collectives import ring_s, tree_s
from phalanx.cost.roofline import RooflineCost
from phalanx.cost.table import TableCost
from phalanx.errors import JobError, PlanError, WorldError

GATHER = Collective(collective="all_gather", axis="tp", label="g", payload_bytes=80.0)
SEND = Send(axis="pp", peer=1, tensor="x", payload_bytes=30.0)
MOVE = Move(tensor="x", source="device", target="host", payload_bytes=20.0)


def test_a_table_is_asked_for_label_then_axis_then_operator():
    cost = TableCost({"g": 1.0, "all_gather@tp": 2.0, "all_gather": 3.0})
    assert cost.collective_s(GATHER, (0, 1)) == 1.0
    cost = TableCost({"all_gather@tp": 2.0, "all_gather": 3.0})
    assert cost.collective_s(GATHER, (0, 1)) == 2.0
    other = Collective(collective="all_gather", axis="dp")
    assert cost.collective_s(other, (0, 1)) == 3.0
    cost = TableCost({"send": 4.0, "move": 5.0, "mlp.F": 6.0}, latency_frac=0.5)
    assert (cost.transfer_s(SEND, 0, 1), cost.transfer_latency_s(SEND, 0, 1)) == (4.0, 2.0)
    assert (cost.move_s(MOVE, 0), cost.compute_s(Compute(op="mlp.F"), 3)) == (5.0, 6.0)


def test_a_table_refuses_unknown_names_and_negative_prices():
    with pytest.raises(WorldError) as caught:
        TableCost({"mlp.F": 1.0, "mlp.B": 2.0}).compute_s(Compute(op="mlp.W", label="0W1"), 0)
    assert caught.value.code == "world/unbound" and "mlp.F" in caught.value.legal
    assert TableCost({}, missing_s=0.5).compute_s(Compute(op="x"), 0) == 0.5
    with pytest.raises(JobError):
        TableCost({"x": -1.0})
    with pytest.raises(JobError):
        TableCost({"x": float("nan")})


RATES = {"flops_per_s": 100.0, "memory_bytes_per_s": 10.0, "link_bytes_per_s": 5.0}


def test_the_longer_of_work_and_bytes_counts():
    cost = RooflineCost(**RATES, overhead_s=0.25)
    assert cost.compute_s(Compute(op="x", flops=400.0, moved_bytes=20.0), 0) == 4.25
    assert cost.compute_s(Compute(op="x", flops=100.0, moved_bytes=20.0), 0) == 2.25
    assert cost.compute_s(Compute(op="x"), 0) == 0.25
    ridge = Compute(op="x", flops=100.0, moved_bytes=10.0)
    assert cost.compute_s(ridge, 0) == 1.25, "balanced at flops_per_s / memory_bytes_per_s"


def test_links_and_latencies_may_differ_by_axis():
    rates = RATES | {"link_bytes_per_s": {"tp": 40.0, "pp": 2.0}}
    cost = RooflineCost(**rates, latency_s={"tp": 0.5, "pp": 1.0}, copy_bytes_per_s=4.0)
    assert cost.collective_s(GATHER, range(5)) == ring_s("all_gather", 80.0, 5, 40.0, 0.5)
    assert cost.transfer_s(SEND, 0, 1) == 16.0 and cost.transfer_latency_s(SEND, 0, 1) == 1.0
    assert cost.move_s(MOVE, 0) == 5.0
    tree = RooflineCost(**RATES, latency_s=2.0, algorithm="tree")
    assert tree.collective_s(GATHER, range(5)) == tree_s("all_gather", 80.0, 5, 5.0, 2.0)


@pytest.mark.parametrize(
    "options",
    [
        RATES | {"flops_per_s": 0.0},
        RATES | {"memory_bytes_per_s": -1.0},
        RATES | {"link_bytes_per_s": {"tp": 0.0}},
        RATES | {"copy_bytes_per_s": 0.0},
        RATES | {"algorithm": "butterfly"},
    ],
)
def test_rates_must_be_positive_and_algorithms_known(options: dict):
    with pytest.raises(PlanError) as caught:
        RooflineCost(**options)
    assert caught.value.code == "plan/illegal" and caught.value.where.startswith("cost.")


def test_what_has_no_rate_has_no_price():
    cost = RooflineCost(**(RATES | {"link_bytes_per_s": {"dp": 1.0}}))
    with pytest.raises(PlanError) as caught:
        cost.collective_s(GATHER, range(2))
    assert caught.value.where == "cost.link_bytes_per_s" and caught.value.legal == ("dp",)
    with pytest.raises(PlanError):
        cost.move_s(MOVE, 0)
