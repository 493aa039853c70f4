"""Numbers as people read them, verdicts, and steps as strips of colour."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx
from phalanx.pages import strips, terminal
from phalanx.pages.charts import memory_alt
from phalanx.pages.content import (
    MemoryStack,
    compared,
    gate_text,
    groups,
    parity_sentence,
    shared_notes,
    stages,
    verdict,
)
from phalanx.pages.prices import beside_published, machines, price_lines
from phalanx.pages.shown import percent, shown, visible
from phalanx.report import Report, Row
from phalanx.trace import TraceBuilder, merge
from tests.pages.run_pages import LONG_NOTE, elsewhere, parity, report, step


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.848284, "s", "848 ms"),
        (5.0897, "s", "5.09 s"),
        (321.2, "s", "5.35 min"),
        (9000.0, "s", "2.50 h"),
        (1.2e-5, "s", "12 µs"),
        (0.0, "s", "0 s"),
        (208127232.0, "bytes", "198 MiB"),
        (3.0e9, "bytes", "2.79 GiB"),
        (2048.0, "1", "2,048"),
        (7.15e-7, "1", "7.2e-07"),
        (-0.25, "1", "−0.250"),
        (0.0025, "bytes", "0.00250 B"),
        (5380.05, "1/s", "5,380 /s"),
        (6.87434, "nats/token", "6.87 nats/token"),
        (38.8, "USD", "$38.80"),
        (None, "s", "unknown"),
        (float("inf"), "s", "inf s"),
    ],
)
def test_numbers_are_shown_in_the_unit_that_suits_them(value, unit, text):
    assert str(shown(value, unit)) == text


@given(st.floats(1e-9, 1e9), st.sampled_from(["s", "bytes", "1", "1/s", "nats/token"]))
def test_what_is_shown_is_near_the_value_and_the_value_stays(value, unit):
    found = shown(value, unit)
    assert float(found.raw.split()[0]) == value
    scales = {
        **{"h": 3600.0, "min": 60.0, "ms": 1e-3, "µs": 1e-6},
        **{"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
    }
    number = float(found.text.replace(",", "").replace("−", "-"))
    assert number * scales.get(found.unit, 1) == pytest.approx(value, rel=0.06)


@given(st.text())
def test_foreign_text_keeps_what_can_be_seen_and_nothing_else(text):
    made = visible(text)
    made.encode("utf-8")
    assert all(char in "\t\n\u200c\u200d" or char.isprintable() or char.isspace() for char in made)
    printable = text.isprintable()
    assert not printable or made == text


def test_one_row_has_one_unit():
    said, seen = 0.9996, 1.2
    assert shown(said, "s", [said, seen]).unit == shown(seen, "s", [said, seen]).unit == "s"


@pytest.mark.parametrize(
    ("gate", "text"),
    [
        ({"target": 0.848284, "tolerance_frac": 0.15}, "±15 % of 848 ms"),
        ({"target": 2.0, "bound": "below"}, "≤ 2 s"),
        ({"target": 2.0, "bound": "above", "tolerance": 0.5}, "≥ 2 s ±500 ms"),
        ({"target": 2.0}, "= 2 s"),
        ({}, ""),
    ],
)
def test_gates_are_told_in_words(gate, text):
    assert gate_text(Row(quantity="q", value=1.0, unit="s", source="measured", **gate)) == text


def test_lines_that_were_predicted_and_measured_come_with_their_error():
    lines = {line.name: line for line in compared(report())}
    step_time = lines["Step time"]
    assert (str(step_time.predicted), str(step_time.measured)) == ("848 ms", "877 ms")
    assert step_time.error == "−3.3 %" and step_time.passed is True
    assert lines["Peak memory, all processes"].passed is False
    assert lines["Time to first token (TTFT), median"].passed is None
    assert "training/held-out loss after" not in lines, "nobody predicted it"


def test_the_verdict_counts_gates():
    assert verdict(report()) == "2 of 3 gates passed, 1 missed"
    assert verdict(Report("none")) == "no gates were set"
    assert parity_sentence(parity()) == "trained = served: all 1 comparisons hold"
    assert parity_sentence(parity(2.0)).startswith("trained ≠ served")
    assert parity_sentence(parity(None)).endswith("vLLM is not installed")


def test_stages_add_up_to_the_whole_run():
    found = stages(report())
    assert [stage.name for stage in found][:2] == ["train", "export"]
    assert sum(stage.share for stage in found) == pytest.approx(1.0)
    assert stages(Report("none")) == []


def test_the_terminal_shows_what_happened_and_what_did_not():
    made = report()
    made.notes |= {
        "samples": [{"prompt": "a\nb", "before": "", "after": "\x1b[31mred"}],
        "parity": "trained = served: all", "commands": [["vLLM", "vllm serve x"]],
        "not run": ["Nothing ran on a GPU."], "serving": "up to 8",
    }  # fmt: skip
    text = "\n".join(terminal(made))
    assert "\x1b" not in text and "before: (nothing)" in text and "prompt: a b" in text
    for part in ("848 ms", "MISS ±15 % of 198 MiB", "vllm serve x", "not run here: Nothing ran"):
        assert part in text
    assert terminal(Report("none"))[-1] == "no gates were set"


# ---- strips --------------------------------------------------------------------------------------


def test_the_step_with_operators_is_the_one_to_look_at():
    spans = [step("measured", 2, operators=False, start_s=at, number=at) for at in range(5)]
    recorded = step("measured", 2, start_s=9.0, number=9)
    found = strips.one_step(merge([*spans, recorded]))
    assert found is not None and strips.has_operators(found)
    assert set(found.columns["step"].tolist()) == {9}
    usual = strips.one_step(merge(spans))
    assert usual is not None and not strips.has_operators(usual)
    assert len(set(usual.columns["step"].tolist())) == 1


def test_ranks_count_from_their_own_start_of_the_step():
    found = strips.one_step(step("measured", 3, start_s=7.0))
    assert found is not None
    starts = found.where(lane="step").columns["start_s"]
    assert starts.tolist() == pytest.approx([0.0] * 3) and found.end_s == pytest.approx(0.7)


def test_a_trace_without_steps_has_no_step():
    trace = step("measured", 1)
    assert strips.one_step(trace.where(lane="compute")) is None


@pytest.mark.parametrize("source", ["simulated", "measured"])
def test_strips_hold_the_seconds_of_the_step(source):
    trace = strips.one_step(step(source, 2))
    assert trace is not None
    seconds = strips.seconds_by_kind(trace, 1)
    assert seconds[strips.COMMUNICATION] == pytest.approx(0.12)
    assert seconds[strips.ATTENTION] == pytest.approx(16 * 0.005)
    assert (strips.OPTIMIZER in seconds) == (source == "measured"), "simulated: an operator row"
    found = strips.strips_of(trace, 1, 700, 0.7, operators=True)
    assert [strip.name for strip in found.strips] == ["passes", "operators", "communication"]
    talk = found.strips[2].runs
    drawn_s = sum(stop_s - start_s for _, start_s, stop_s in talk)
    assert len(talk) == 2 and drawn_s == pytest.approx(0.12, rel=0.02)


def test_a_measured_exchange_counts_where_it_is_received_and_once():
    builder = TraceBuilder("measured", "job")
    about = {"step": 1, "axis": "pp", "lane": "send:pp"}
    builder.add(**about, operator="send", start_s=0.0, dur_s=0.6)  # seen to end with the step
    builder.add(**about, operator="wait", start_s=0.25, dur_s=0.05)
    without = strips.one_step(step("measured", 1))
    assert without is not None
    trace = merge([without, builder.build()])
    assert strips.seconds_by_kind(trace, 0) == strips.seconds_by_kind(without, 0)


def test_runs_follow_each_other():
    trace = strips.one_step(step("measured", 1))
    assert trace is not None
    for strip in strips.strips_of(trace, 0, 350, 0.7, operators=True).strips:
        moments = np.asarray([run[1:] for run in strip.runs]).ravel()
        assert (np.diff(moments) >= -1e-12).all() and moments.max() <= 0.7 + 1e-9


def test_percentages_have_a_sign_where_they_are_distances():
    assert (percent(-0.0331), percent(0.5, signed=False)) == ("−3.3 %", "50 %")


def test_machines_stand_beside_each_other_and_formula_beside_published():
    there = machines(elsewhere())
    assert there.names == ["2xh100", "4xv5p"]
    lines = {name: [str(cell.value) for cell in cells] for name, cells in there.lines}
    assert lines == {"time": ["3.42 h", "2.31 h"], "cost": ["$20.52", ""]}
    assert there.notes == [("2xh100, time", LONG_NOTE)]
    ((group, (line,)),) = beside_published(elsewhere())
    assert (group, line.name, line.error) == ("2xh100 over 4xv5p", "time", "−8.1 %")
    assert (str(line.formula), str(line.published)) == ("1.48", "1.61")
    assert price_lines(elsewhere())[0] == "2xh100: time 3.42 h, cost $20.52 (fits)"


def test_notes_that_rows_share_are_told_once():
    made = Report("r")
    for at in range(3):
        made.add(
            f"parity/form {at}/tokens", 0.0, "1", "measured", note=f"own {at}; fp32, 20 prompts"
        )
    assert shared_notes(made.rows) == ["fp32, 20 prompts"]
    assert [lines[0].note for _, lines in groups(made.rows)] == ["own 0", "own 1", "own 2"]


def own_functions() -> set[str]:
    """Names that a profile gives the autograd functions of training, all that it lists of them."""
    found = set()
    for folder in ("ops", "models", "engines"):
        for file in (ROOT / folder).rglob("*.py"):
            if file.stem != "operator_cases":  # for single operators, not in a step
                text = file.read_text(encoding="utf-8")
                found |= set(re.findall(r"^class (_\w+)\(torch\.autograd\.Function\)", text, re.M))
    return {name.lower() for name in found}


ROOT = Path(phalanx.__file__).parent


def test_every_function_of_a_measured_step_has_a_kind_and_no_pattern_is_stale():
    names = own_functions()
    assert len(names) > 12
    lost = {n for n in names if not any(fnmatchcase(n, p) for p, _ in strips.OWN_FUNCTIONS)}
    assert not lost, "would be drawn as norms, gates, sums"
    stale = {p for p, _ in strips.OWN_FUNCTIONS if not any(fnmatchcase(n, p) for n in names)}
    assert not stale


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("_Exchange", strips.COMMUNICATION),
        ("_ExchangeBackward", strips.COMMUNICATION),
        ("_ToHeads", strips.COMMUNICATION),
        ("_Product", strips.PRODUCTS),
        ("_RmsNorm", strips.ELEMENTWISE),
    ],
)
def test_our_functions_are_drawn_as_what_they_do(operator, kind):
    builder = TraceBuilder("measured", "job")
    about = {"lane": "thread1", "layer": "model.layers.0"}
    builder.add(**about, operator=operator, start_s=0.0, dur_s=0.5)
    assert strips.seconds_by_kind(builder.build(), 0) == {kind: 0.5}


def test_memory_is_told_by_the_terms_that_there_are():
    terms = {"gathered": 0.0, "weights": 2.0**20, "activations": 3 * 2.0**20}
    told = memory_alt(MemoryStack(terms=terms, measured_bytes=2.0**22))
    assert told == (
        "Predicted for one process: 4 MiB = activations 3 MiB, weights 1 MiB. Measured peak: 4 MiB."
    )
