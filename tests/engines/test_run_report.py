"""The report of a run, made of records that a run leaves: no process starts here, no torch."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from phalanx.cost.training import Prediction
from phalanx.engines.result import TrainResult
from phalanx.engines.whole.summary import Summary, write_report
from phalanx.engines.whole.train_job import Trained
from phalanx.job import load_job
from phalanx.plan import Plan, Pool, RoleProgram
from phalanx.planner import here
from phalanx.planner.timeline import StepForecast
from phalanx.report import Report
from tests.pages.run_pages import Elements, parity, step

EVERY_FILE = {
    *("report.json", "report.html", "report.md", "trace.perfetto.json", "environment.json"),
    *("loss.png", "speed.png", "memory.png", "timeline.png"),
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """These runs were on a processor."""
    monkeypatch.setattr(here, "gpus_here", lambda: ())


@pytest.fixture
def without_pictures(monkeypatch):
    """For tests that do not look at them."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def trained(folder: Path, *, num_ranks: int = 2, **result: object) -> Trained:
    folder.mkdir(parents=True, exist_ok=True)
    role = RoleProgram(pool="here", mesh={"shard": num_ranks}, dtypes={"compute": "float32"})
    said = {"quantity": "training/step time", "value": 0.7, "unit": "s", "source": "formula"}
    plan = Plan(
        job="job", job_key="key", hardware={"machine": "a processor", "cores": 2},
        pools={"here": Pool(machine="a processor", devices=tuple(range(num_ranks)))},
        programs={"train": role}, predictions=[said],
    )  # fmt: skip
    lines = [{"kind": "evaluate", "step": 0, "loss": 7.5}]
    lines += [
        {"kind": "step", "step": at, "loss": 7.5 - at / 10, "tokens": 700, "tokens_per_s": 900.0}
        for at in (1, 2, 3)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    step("measured", num_ranks, start_s=4.0).save(folder / "trace.npz")
    found: dict = {
        "steps": 3, "num_ranks": num_ranks, "loss_before": 7.5, "loss_after": 7.1,
        "evaluations": [[0, 7.5], [3, 7.1]], "num_tokens": 2100, "num_counted": 900,
        "step_s": 0.72, "tokens_per_s": 1000.0, "peak_bytes": 2e8, "export": "export",
        "metrics": "metrics.jsonl", "trace": "trace.npz",
        "samples": [{"prompt": "<b>a</b>?", "before": "x", "after": "</pre>y"}],
    }  # fmt: skip
    made = TrainResult(**found | result)
    report = Report("job on this machine")
    report.add(**said)
    report.add("training/step time", made.step_s, "s", "measured", target=0.7, tolerance_frac=0.15)
    report.add("training/all steps", 2.1, "s", "formula")
    report.add("time/train", 2.1, "s", "measured")
    job = load_job(None, {"model.name": "tiny", "train.method": "pretrain"})
    return Trained(folder=folder, job=job, plan=plan, result=made, report=report)


def forecast(num_ranks: int = 2) -> StepForecast:
    trace = step("simulated", num_ranks)
    notes = {"overlaps": False, "micro_batches": 1, "mean_micro_batches": 1.0}
    trace = type(trace)(trace.source, trace.job, trace.columns, trace.vocabulary, notes)
    said = Prediction(0.7, 2.4e8, {"linear": 0.7}, {"weights": 2e7, "runtime": 1e8})
    return StepForecast(trace, said, num_ranks)


def load() -> Report:
    made = Report("Load test")
    made.add("load/TTFT median", 0.028, "s", "measured")
    return made


def summary(folder: Path, **parts: object) -> Summary:
    usual: dict = {"trained": trained(folder), "parity": parity(), "load": load()}
    usual |= {"serving": "up to 8 requests", "total_s": 9.5, "forecast": forecast()}
    return Summary(**usual | parts)


def text_of(folder: Path) -> str:
    return Elements((folder / "report.html").read_text(encoding="utf-8")).all


def test_every_file_is_written_and_tells_the_same_numbers(tmp_path):
    folder = tmp_path / "run of mine"
    report = write_report(summary(folder))
    assert EVERY_FILE <= {each.name for each in folder.iterdir()}
    kept = json.loads((folder / "report.json").read_text())
    assert kept["rows"] == report.to_dict()["rows"]
    text, markdown = text_of(folder), (folder / "report.md").read_text(encoding="utf-8")
    for row in kept["rows"]:
        assert row["quantity"] in text and row["quantity"] in markdown
        assert str(row["value"]) in text and str(row["value"]) in markdown
    for name in ("parity", "serving", "samples", "commands", "not run", "date"):
        assert kept["notes"][name]


def test_commands_name_the_folder_whatever_it_is_called(tmp_path, without_pictures):
    folder = tmp_path / "run of mine"
    made = write_report(summary(folder)).notes["commands"]
    commands = {name: command for name, command in made}
    assert shlex.split(commands["Phalanx"]) == ["phalanx", "serve", str(folder / "export")]
    assert shlex.split(commands["vLLM"]) == ["vllm", "serve", str(folder / "export")]
    convert, serve = commands["llama.cpp"].splitlines()
    assert shlex.split(convert)[1:3] == ["convert_hf_to_gguf.py", str(folder / "export")]
    assert shlex.split(convert)[-1] == shlex.split(serve)[-1] == str(folder / "model.gguf")
    assert shlex.split(serve)[:2] == ["llama-server", "-m"]
    ready = summary(folder, trained=trained(folder, gguf="model-q8.gguf"))
    commands = dict(write_report(ready).notes["commands"])
    assert commands["llama.cpp"] == f"llama-server -m {shlex.quote(str(folder / 'model-q8.gguf'))}"


def test_a_run_that_was_stopped_offers_nothing_to_serve(tmp_path, without_pictures):
    stopped = trained(tmp_path, export="", stopped="a callback", samples=())
    report = write_report(summary(tmp_path, trained=stopped, load=None, serving=""))
    assert report.notes["commands"] == []
    (total,) = [
        row for row in report.rows
        if (row.quantity, row.source) == ("training/all steps", "measured")
    ]  # fmt: skip
    assert total.target is None, "it did not take all of its steps"
    assert "No server was started" in text_of(tmp_path)


def test_gates_of_all_parts_count(tmp_path, without_pictures):
    ready = trained(tmp_path)
    ready.report.add("serving/KV tokens", 4096.0, "1", "formula")
    tested = load()
    tested.add("serving/KV tokens", 2048.0, "1", "measured", target=4096.0)
    report = write_report(summary(tmp_path, trained=ready, load=tested, parity=parity(2.0)))
    assert [row.quantity for row in report.missed] == [
        "serving/KV tokens", "parity/merged/tokens that differ",
    ]  # fmt: skip
    text = text_of(tmp_path)
    assert "KV cache, tokens: 2,048; gate = 4,096" in text and "trained ≠ served" in text.lower()


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_any_number_of_ranks(tmp_path, num_ranks, without_pictures):
    ready = summary(
        tmp_path, trained=trained(tmp_path, num_ranks=num_ranks), forecast=forecast(num_ranks)
    )
    write_report(ready)
    text = text_of(tmp_path)
    assert ("1 process on" if num_ranks == 1 else "8 processes on") in text
    assert ("4 of 8 ranks are drawn" in text) == (num_ranks == 8)


def test_what_was_not_done_is_said(tmp_path, without_pictures):
    bare = trained(tmp_path, loss_before=None, loss_after=None, evaluations=[], samples=[])
    write_report(
        summary(tmp_path, trained=bare, parity=parity(None), load=None, serving="", forecast=None)
    )
    text = text_of(tmp_path)
    for part in (
        "No load test was asked for", "vLLM is not installed", "Nothing ran on a GPU.",
        "trained = served: not compared",
    ):  # fmt: skip
        assert part.lower() in text.lower()
    assert "Memory of a process" not in text, "nothing was predicted"


def test_both_steps_share_one_axis_in_the_trace(tmp_path, without_pictures):
    write_report(summary(tmp_path))
    events = json.loads((tmp_path / "trace.perfetto.json").read_text())["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e.get("name") == "process_name"}
    assert set(names) == {
        f"rank {rank} ({source})" for rank in range(2) for source in ("simulated", "measured")
    }
    starts = {
        source: min(
            e["ts"] for e in events
            if e["ph"] == "X" and e["pid"] == names[f"rank 0 ({source})"]
        )
        for source in ("simulated", "measured")
    }  # fmt: skip
    assert starts["simulated"] == pytest.approx(starts["measured"])
