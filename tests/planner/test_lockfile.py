"""A priced plan as the lockfile of `phalanx train`: made for these devices, this job."""

import json
from dataclasses import replace

import pytest

from phalanx.cli.app import run
from phalanx.errors import PlanError
from phalanx.hardware import read_machine
from phalanx.hardware.write import machine_toml
from phalanx.job import load_job
from phalanx.plan import Plan
from phalanx.planner import lock_place, lockfile

HERE = "Some Processor"


@pytest.fixture
def locked(tmp_path, monkeypatch):
    """The lockfile of a job on two devices of this machine, and the job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        lock_place, "hardware_here", lambda n: {"machine": HERE, "num_devices": n, "cores": 2}
    )
    text = machine_toml(read_machine("h20"))
    title = read_machine("h20").title
    (tmp_path / "here.toml").write_text(text.replace(title, f"{HERE}, 2 processes", 1))
    rows = [{"prompt": f"word {at} " * 9, "completion": "answer " * 9} for at in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def lock(*words):
        flags = ["--data", "data.jsonl", "--train.method", "pretrain", *words]
        asked = ["plan", "tiny", "--on", "2x./here.toml", *flags, "-o", "lock.json"]
        assert run(asked) == 0
        given = {"model.name": "tiny", "data.source": "data.jsonl", "train.method": "pretrain"}
        return Plan.load("lock.json"), load_job(None, given)

    return lock


def test_a_plan_for_this_machine_is_laid_out_as_it_was_priced(locked):
    plan, job = locked("--plan.mesh.tp", "2")
    keys = lockfile.layout_keys(plan, job)
    assert plan.hardware["machine"] == HERE
    assert keys["plan.mesh"]["tp"] == 2 and keys["plan.tensor"]["name"] == "megatron"
    laid_out = load_job(None, {"model.name": "tiny", "data.source": "data.jsonl"} | keys)
    assert laid_out.plan.row_tokens == keys["plan.row_tokens"] > 0


def test_a_plan_of_other_devices_or_another_job_is_refused(locked, monkeypatch):
    plan, job = locked()
    other = load_job(None, {"model.name": "tiny", "train.method": "pretrain"})
    with pytest.raises(PlanError, match=r"data\.source = .* is not what the plan was made for"):
        lockfile.layout_keys(plan, other)
    monkeypatch.setattr(lock_place, "hardware_here", lambda n: {"machine": "B", "num_devices": n})
    with pytest.raises(PlanError, match="made for"):
        lockfile.layout_keys(plan, job)


def test_a_plan_for_a_named_accelerator_runs_where_the_driver_calls_it_so(locked, monkeypatch):
    plan, job = locked()
    priced = replace(plan, hardware={**plan.hardware, "machine": "h100"})
    gpu = {"machine": "NVIDIA H100 80GB HBM3, 81559 MiB, 550.54", "num_devices": 2}
    monkeypatch.setattr(lock_place, "hardware_here", lambda n: dict(gpu))
    assert lockfile.layout_keys(priced, job)["plan.recompute"]


def test_a_lockfile_of_a_run_is_run_as_it_stands(locked):
    plan, job = locked()
    measured = replace(plan, hardware={**plan.hardware, "rates": {}})
    assert lockfile.layout_keys(measured, job) == {}
