"""What a run folder says of its run, who may write it, and what happens where it cannot be."""

from __future__ import annotations

import errno
import json
import os
import resource
from contextlib import contextmanager
from math import prod
from types import SimpleNamespace

import pytest

from phalanx.engines import run_folder
from phalanx.engines.metrics import MetricsFile, StepTrace, write_traces
from phalanx.engines.run_folder import (
    alone_in,
    finished,
    holds_checkpoint,
    holds_run,
    read_job,
    require_same_inputs,
    require_same_result,
    write_job,
    write_run_file,
)
from phalanx.engines.whole.relaid import relaid
from phalanx.errors import JobError, PlanError
from phalanx.job import load_job
from phalanx.models.stored import mark_of, stored_tensors
from phalanx.planner.training_shape import training_shape
from tests.tiny_run import tiny_base, write_base


def test_two_runs_are_never_in_one_folder(tmp_path):
    with alone_in(tmp_path / "run"):
        with pytest.raises(JobError, match=f"under way in it \\(process {os.getpid()} on "):
            with alone_in(tmp_path / "run"):
                pass
    with alone_in(tmp_path / "run"):
        pass


def test_where_a_file_system_has_no_locks_a_run_is_not_kept_from_its_folder(tmp_path, monkeypatch):
    def lacking(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder.fcntl, "flock", lacking)
    with alone_in(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()


def test_a_full_disk_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "job.json"
    write_run_file(path, "before")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder.os, "fsync", full)
    with pytest.raises(JobError, match="no space left"):
        write_run_file(path, "after")
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["job.json"]


def test_a_run_of_a_release_with_fewer_keys_goes_on_and_one_with_more_is_refused(tmp_path):
    job = load_job(None, {"model.name": "toy", "train.label_smoothing": 0.1})
    write_job(job, tmp_path)
    path = tmp_path / "job.json"
    table = json.loads(path.read_text())
    del table["sections"]["train"]["label_smoothing"], table["sections"]["plan"]["offload"]
    path.write_text(json.dumps(table))
    again = read_job(tmp_path, {"plan.devices": 2})
    assert again.train.label_smoothing == 0.0 and again.plan.offload == "none"
    require_same_result(read_job(tmp_path), again)
    with pytest.raises(PlanError, match=r"train\.label_smoothing = 0\.1.*legal values: 0\.0"):
        require_same_result(again, job)
    table["sections"]["train"]["momentum"] = 0.9
    path.write_text(json.dumps(table))
    with pytest.raises(JobError, match=r"job\.json: train\.momentum = 0\.9: this release has no"):
        read_job(tmp_path)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("step-00000012", True),
        (".step-00000012.replaced", True),
        (".step-00000012.partial", False),
        ("best-00000012", False),
    ],
)
def test_only_whole_checkpoints_of_steps_can_be_gone_on_from(tmp_path, name, is_one):
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert holds_checkpoint(tmp_path) is is_one and holds_run(tmp_path)


def result(folder, **values):
    numbers = dict.fromkeys(("steps", "num_ranks", "num_tokens", "num_counted", "step_s"), 1)
    numbers |= {"loss_before": None, "loss_after": None, "evaluations": [], "tokens_per_s": 1.0}
    (folder / "train.json").write_text(json.dumps(numbers | values))


def test_a_run_that_a_signal_stopped_is_not_finished(tmp_path):
    assert finished(tmp_path) is None
    result(tmp_path, stopped="signal")
    assert finished(tmp_path) is None
    result(tmp_path, stopped="early stop: 3 evaluations were no better")
    assert finished(tmp_path).steps == 1


def test_other_rows_or_another_base_under_the_same_name_are_refused(tmp_path):
    job = load_job(None, {"model.name": "tiny"})
    write_job(job, tmp_path, {"samples": "aa", "weights": "bb"})
    require_same_inputs(tmp_path, {"samples": "aa", "weights": "bb"})
    for changed in ({"samples": "ab", "weights": "bb"}, {"samples": "aa", "weights": "cb"}):
        with pytest.raises(PlanError, match="is not what the run began with"):
            require_same_inputs(tmp_path, changed)
    write_job(job, tmp_path)  # of a version that noted nothing
    require_same_inputs(tmp_path, {"samples": "ab"})


def test_the_mark_of_weights_follows_their_values_and_not_their_place(tmp_path):
    base = write_base(tmp_path)
    before = mark_of(stored_tensors(base).values())
    moved = base.rename(tmp_path / "moved")
    assert mark_of(stored_tensors(moved).values()) == before
    last = max(stored_tensors(moved).values(), key=lambda each: each.start)
    with last.path.open("r+b") as file:
        file.seek(last.start)
        file.write(b"\x01")
    assert mark_of(stored_tensors(moved).values()) != before


PIPELINE = {"plan.mesh": {"pp": 2}, "plan.pipeline": "gpipe", "plan.stages": [2, 1]}
BOTH = {"plan.mesh": {"replicate": 2, "tp": 2}, "plan.tensor": "megatron"}
HYBRID = {"plan.mesh": {"replicate": 2, "shard": 2}, "plan.data": ["fsdp", "replicate"]}


@pytest.mark.parametrize(
    ("flags", "changes", "mesh", "is_told"),
    [
        (PIPELINE, {"plan.devices": 1}, {"replicate": 1}, True),
        (PIPELINE, {"plan.devices": 3}, {"replicate": 3}, True),
        (PIPELINE, {"plan.devices": 2}, {"replicate": 1, "pp": 2}, False),
        (BOTH, {"plan.devices": 2}, {"replicate": 1, "tp": 2}, True),
        (BOTH, {"plan.devices": 6}, {"replicate": 3, "tp": 2}, True),
        (BOTH, {"plan.devices": 3}, {"replicate": 3}, True),
        (HYBRID, {"plan.devices": 2}, {"replicate": 1, "shard": 2}, True),
        (HYBRID, {"plan.devices": 3}, {"replicate": 3}, True),
        (PIPELINE | {"plan.devices": 2}, {"plan.mesh.pp": "1"}, {"pp": 1}, False),
        ({}, {"plan.devices": 5}, {"replicate": 5}, False),
    ],
)
def test_a_run_goes_on_with_whatever_number_of_processes(flags, changes, mesh, is_told):
    before = {"model.name": "m", "model.dtype": "float32"} | flags
    job, note = relaid(load_job(None, before | changes), changes)
    count = job.plan.devices or prod(job.plan.mesh.values())
    shape = training_shape(job, tiny_base(num_heads=4, num_kv_heads=2), count)
    assert shape.mesh.to_dict() == mesh and shape.mesh.size == count
    assert bool(note) is is_told


@contextmanager
def files_of_at_most(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_for_a_while_costs_no_line_and_is_told_once(tmp_path):
    told: list[str] = []
    metrics = MetricsFile(tmp_path / "metrics.jsonl", on_failure=told.append)
    with files_of_at_most(100):  # ends within the fourth line
        for step in range(8):
            metrics.write(kind="step", step=step, loss=1.5)
    assert len(told) == 1 and "metrics.jsonl cannot be written" in told[0]
    metrics.write(kind="step", step=8, loss=1.5)
    metrics.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(9))


def test_lines_that_are_none_are_left_out_when_a_run_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = [json.dumps({"kind": "step", "step": step}) + "\n" for step in (1, 2, 3)]
    path.write_text("".join(whole[:2]) + '{"kind": "st{"kind": "step"}\n[1]\n' + whole[2] + '{"k')
    MetricsFile(path, done_steps=2).close()
    assert path.read_text() == "".join(whole[:2])


def test_a_run_does_not_end_for_want_of_its_trace(tmp_path):
    alone = SimpleNamespace(rank=0, world_size=1, leads=True, sum=float)
    with files_of_at_most(100):
        assert write_traces(tmp_path, StepTrace(0, "job").build(), alone) == ""
    assert os.listdir(tmp_path) == []
    assert write_traces(tmp_path, StepTrace(0, "job").build(), alone) == "trace.npz"
    assert os.listdir(tmp_path) == ["trace.npz"]
