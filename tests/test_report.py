"""Reports: gates that can fail, and the join of sources."""

import json

import pytest

from phalanx.errors import GateError
from phalanx.report import Report, Row, compare, to_table


def row(value, **rest):
    return Row(quantity="q", value=value, unit="s", source="measured", **rest)


@pytest.mark.parametrize(
    ("value", "rest", "passed"),
    [
        (1.0, {}, None),
        (1.0, {"target": 1.0}, True),
        (1.1, {"target": 1.0}, False),
        (1.1, {"target": 1.0, "tolerance_frac": 0.11}, True),
        (1.1, {"target": 1.0, "tolerance": 0.05}, False),
        (5.0, {"target": 1.0, "bound": "above"}, True),
        (0.5, {"target": 1.0, "bound": "above"}, False),
        (0.5, {"target": 1.0, "bound": "below"}, True),
        (None, {"target": 1.0}, False),
    ],
)
def test_a_gate_holds_exactly_within_its_tolerance(value, rest, passed):
    assert row(value, **rest).passed is passed


def test_compare_joins_sources_of_one_quantity_and_states_the_error():
    predicted, measured = Report("plan"), Report("run")
    predicted.add("step", 1.2, "s", "simulated")
    measured.add("step", 1.0, "s", "measured")
    measured.add("step", 1.0, "GiB", "measured")
    joined = compare([predicted, measured])
    assert [(each.quantity, each.unit) for each in joined] == [("step", "s"), ("step", "GiB")]
    assert joined[0].error_frac == pytest.approx(0.2)
    header, lines = to_table(joined)
    assert header[2:4] == ["simulated", "measured"] and "+20.0%" in lines[0]


def test_missed_gates_raise_with_exit_code_one(tmp_path):
    report = Report("r")
    report.add("step", 2.0, "s", "measured", target=1.0)
    with pytest.raises(GateError) as caught:
        report.require_gates()
    assert caught.value.exit_code == 1 and "step" in str(caught.value)
    report.save(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["rows"][0]["passed"] is False


def test_markdown_holds_every_row():
    report = Report("title")
    report.add("a|b", 1.0, "1", "formula", note="why")
    assert "a\\|b" in report.to_markdown() and "why" in report.to_markdown()
