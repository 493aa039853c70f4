"""The first reproduction: its gates hold, and they can fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx import systems
from phalanx.errors import GateError
from phalanx.policies.data.fsdp import Fsdp
from phalanx.report import SOURCES, compare


@pytest.fixture(scope="module")
def report():
    return systems.reproduce("fsdp")


def test_every_gate_holds(report):
    report.require_gates()
    assert sum(row.passed is True for row in report.rows) >= 16


def test_formula_simulation_paper_and_real_runs_meet_in_one_table(report):
    sources = {row.source for row in report.rows}
    assert sources == set(SOURCES)
    joined = {each.quantity: each.by_source for each in compare([report])}
    for quantity in (
        "traffic, full sharding / replication",
        "traffic between hosts, hybrid / replication, 64 hosts of 8",
    ):
        assert joined[quantity].keys() == {"formula", "simulated", "published"}
    for each in joined.values():
        if {"formula", "simulated"} <= each.keys():
            assert each["simulated"].value == pytest.approx(each["formula"].value, rel=1e-12)


def test_every_published_value_is_one_of_the_file(report):
    numbers = {row.number for row in systems.published("fsdp")}
    for row in report.rows:
        if row.source == "published":
            assert row.value in numbers or round(row.value * 100, 9) in numbers, row


def test_what_does_not_reproduce_is_said_and_not_gated(report):
    row = next(r for r in report.rows if "T5-11B" in r.quantity and r.source == "simulated")
    assert row.passed is None and "not reproduced" in row.note


@pytest.mark.parametrize(
    ("change", "quantity"),
    [
        ({"reshard": True}, "root kept gathered"),  # the root would be gathered twice
        ({"reshard": False}, "traffic, full sharding"),  # nothing would be gathered twice
        ({"prefetch": 2}, "gathered parameters at their peak, root kept, prefetch 1"),
        ({"prefetch": 0}, "start after the reduction"),
    ],
)
def test_a_wrong_policy_misses_a_gate(monkeypatch, change, quantity):
    right = Fsdp.rules
    monkeypatch.setattr(
        Fsdp, "rules", lambda self: tuple(replace(rule, **change) for rule in right(self))
    )
    report = systems.reproduce("fsdp")
    assert any(quantity in row.quantity for row in report.missed)
    with pytest.raises(GateError):
        report.require_gates()
