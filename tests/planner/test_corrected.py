"""Answers corrected by measured runs: scaled where a run is alike, untouched and said where not."""

import pytest

from phalanx.models.config import to_huggingface
from phalanx.plan import locked_versions
from phalanx.planner.corrected import corrected, measured_runs
from phalanx.planner.feedback import MeasuredRun, remember
from phalanx.planner.search import answer
from tests.planner.plan_cases import CONFIG, asked, training

PLAN = {"data": 2, "shard": 2, "zero": 3, "row_tokens": 512, "num_micro": 2}


def run(factor=1.5, **changes):
    versions = {name: text for name, text in locked_versions().items() if name != "python"}
    given = {
        "name": "mine", "key": f"k{factor}", "device": "NVIDIA H100 80GB HBM3",
        "software": versions, "method": "lora", "dtype": "bfloat16", "lora_rank": 4,
        "config": to_huggingface(CONFIG), "plan": PLAN, "step_s": 1.0, "num_steps": 9,
    }  # fmt: skip
    made = MeasuredRun(**given | changes)
    fields = {name: getattr(made, name) for name in given}
    priced = made.priced_s(asked().cluster.machine)
    return MeasuredRun(**fields | {"step_s": factor * priced})


def test_every_plan_of_the_answer_takes_so_much_longer_and_the_source_says_why():
    plain = answer(training(), asked())
    found, note = corrected(plain, [run(1.5)])
    for name in ("best", "fastest"):
        before, after = getattr(plain, name), getattr(found, name)
        assert after.total_s == pytest.approx(1.5 * before.total_s)
        assert after.low_s < after.total_s < after.high_s
        assert after.sized == before.sized
    assert (found.best is found.runnable) == (plain.best is plain.runnable)
    assert found.hours[0] == pytest.approx(1.5 * plain.hours[0])
    assert note == f"2xh100: {note.split(': ', 1)[1]}" and "measured 1 run: x1.50" in note
    assert found.source.startswith(plain.source) and "x1.50" in found.source


@pytest.mark.parametrize(
    "changes", [{"device": "NVIDIA H200"}, {"method": "full"}, {"dtype": "float32"}]
)
def test_runs_of_something_else_change_nothing_and_that_is_said(changes):
    plain = answer(training(), asked())
    found, note = corrected(plain, [run(**changes)])
    assert found is plain and "not corrected" in note


def test_runs_come_from_files_folders_or_all_that_was_kept(tmp_path, monkeypatch):
    one, two = run(1.2), run(1.3)
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    remember(one, first)
    remember(two, second)
    assert list(measured_runs(f"{first}, {second}")) == [one, two]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    remember(two)
    assert list(measured_runs("all")) == [two]
