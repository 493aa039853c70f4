"""What goes wrong while a checkpoint is written or read: the last good one stays."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from phalanx.engines.checkpoint import (
    Checkpoints,
    Manifest,
    Progress,
    StopSignal,
    latest,
    restore,
    restore_latest,
    shard_file,
)
from phalanx.errors import JobError, WorldError
from tests.engines.checkpoint_cases import awkward_run, train_steps, whole_state
from tests.ranks import DIED, run_ranks


def checkpoints_of(rank, world_size, folder, **options):
    model, optimizer, process = awkward_run(rank, world_size, {"shard": world_size}, seed=1)
    made = Checkpoints(folder, model, optimizer, process, keep=2, job_key="key", **options)
    return made, model, optimizer


def saved(rank, world_size, folder, steps=(1, 2)):
    checkpoints, model, optimizer = checkpoints_of(rank, world_size, folder)
    states = []
    for step in steps:
        train_steps(model, optimizer, [step])
        checkpoints.save(Progress(step=step))
        states.append(whole_state(optimizer))
    checkpoints.close()
    return states


def read(rank, world_size, path):
    """The whole state, or what was told."""
    model, optimizer, process = awkward_run(rank, world_size, {"shard": world_size}, seed=2)
    try:
        restore(path, model, optimizer, process, job_key="key")
    except JobError as error:
        return error.code, str(error)
    return whole_state(optimizer)


def truncate(path):
    file = path / "weights-00000-of-00002.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    return "checkpoint/damaged", "weights-00000-of-00002.safetensors has"


def remove(path):
    (path / "optimizer-00001-of-00002.safetensors").unlink()
    return "checkpoint/damaged", "optimizer-00001-of-00002.safetensors is missing"


def flip_a_bit(path):
    file = path / "weights-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    return "checkpoint/damaged", "weights-00001-of-00002.safetensors is not what was written"


def cut_the_manifest(path):
    file = path / "manifest.json"
    os.truncate(file, file.stat().st_size // 2)
    return "checkpoint/damaged", "manifest.json cannot be read"


def change_the_manifest(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"step": 2', '"step": 3'))
    return "checkpoint/damaged", "manifest.json is not what was written"


@pytest.mark.dist
@pytest.mark.parametrize(
    "harm", [truncate, remove, flip_a_bit, cut_the_manifest, change_the_manifest]
)
def test_damage_is_refused_on_all_ranks_and_the_good_one_before_named(tmp_path, harm):
    run_ranks(saved, 2, str(tmp_path))
    path = tmp_path / "step-00000002"
    expected = harm(path)
    for world_size in (1, 2):
        for code, told in run_ranks(read, world_size, str(path)):
            assert code == expected[0] and expected[1] in told
            assert told.endswith(f"nearest legal values: {tmp_path / 'step-00000001'}")
    assert latest(tmp_path).name == "step-00000001"


def save_by_torch(folder):
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    return "environment/trust", ".metadata is a pickle"


def add_a_pickle(folder):
    (folder / "more.pt").write_bytes(b"\x80\x04N.")
    return "environment/trust", "pickles can run code"


def other_version(folder):
    table = json.loads((folder / "manifest.json").read_text()) | {"format_version": 99}
    (folder / "manifest.json").write_text(json.dumps(table))
    return "checkpoint/format", "format_version = 99: this version of Phalanx cannot read it"


def others_manifest(folder):
    (folder / "manifest.json").write_text("[]")
    return "checkpoint/format", "manifest.json is another's"


def no_manifest(folder):
    (folder / "manifest.json").unlink()
    return "checkpoint/format", "it has no manifest.json"


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "change", [save_by_torch, add_a_pickle, other_version, others_manifest, no_manifest]
)
def test_what_is_no_checkpoint_of_ours_is_refused(tmp_path, change):
    run_ranks(saved, 1, str(tmp_path), (1,))
    path = tmp_path / "step-00000001"
    code, rule = change(path)
    for found, told in run_ranks(read, 2, str(path)):
        assert found == code and rule in told
    assert latest(tmp_path) is None


def full_for_one(rank, world_size, folder):
    """Rank 1 cannot write more than half of its files; afterwards it can."""
    failures = []
    checkpoints, model, optimizer = checkpoints_of(
        rank, world_size, folder, on_failure=failures.append
    )
    checkpoints.save(Progress(step=1))
    checkpoints.wait()
    good = whole_state(optimizer)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        train_steps(model, optimizer, [1])
        checkpoints.save(Progress(step=2))
        train_steps(model, optimizer, [2, 3])  # goes on meanwhile
        with pytest.raises(WorldError) as caught:
            checkpoints.wait()
        checkpoints.save(Progress(step=3))
        checkpoints.save(Progress(step=4))  # hears of the one before
        with pytest.raises(WorldError, match="step 4"):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    names = sorted(path.name for path in Path(folder).iterdir())
    dist.barrier()
    checkpoints.save(Progress(step=5))
    checkpoints.close()
    told = caught.value.code, str(caught.value), [str(each) for each in failures]
    return *told, names, good


@pytest.mark.dist
def test_a_file_that_cannot_be_written_fails_on_all_ranks_and_the_last_good_one_stays(tmp_path):
    answers = run_ranks(full_for_one, 2, str(tmp_path))
    for code, told, failures, names, _ in answers:
        assert code == "checkpoint/write"
        assert "checkpoint of step 2: rank 1: File too large" in told
        assert "the checkpoints before it stand" in told
        assert len(failures) == 1 and "checkpoint of step 3: rank 1" in failures[0]
        assert names == ["step-00000001"]
    assert latest(tmp_path).name == "step-00000005"
    state = run_ranks(read, 1, str(tmp_path / "step-00000001"))[0]
    assert all(torch.equal(state[name], value) for name, value in answers[0][-1].items())


@pytest.fixture
def small_disk(tmp_path):
    """A file system with little more room than one checkpoint."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def filling(rank, world_size, folder):
    checkpoints, model, optimizer = checkpoints_of(rank, world_size, folder)
    with pytest.raises(JobError) as space:
        checkpoints.require_space()
    checkpoints.save(Progress(step=1))
    checkpoints.wait()
    good = whole_state(optimizer)
    train_steps(model, optimizer, [1])
    with pytest.raises(WorldError) as caught:
        for step in range(2, 5):
            checkpoints.save(Progress(step=step))
            checkpoints.wait()
    return str(space.value), str(caught.value), good


@pytest.mark.dist
def test_a_full_disk_leaves_the_last_good_one(small_disk):
    answers = run_ranks(filling, 2, str(small_disk))
    for space, told, _ in answers:
        assert f"checkpoint folder = {small_disk}: needs 0.00" in space
        assert "No space left on device" in told
    path = latest(small_disk)
    assert {each.name for each in small_disk.iterdir()} == {path.name}
    assert path.name == "step-00000001"
    state = run_ranks(read, 2, str(path))[0]
    assert all(torch.equal(state[name], value) for name, value in answers[0][-1].items())


def without_room(rank, world_size, folder):
    model, optimizer, process = awkward_run(rank, world_size, {"shard": world_size}, seed=1)
    options = {"keep": 10**12, "job_key": "key"}
    checkpoints = Checkpoints(folder, model, optimizer, process, **options)
    with pytest.raises(JobError) as caught:
        checkpoints.require_space()
    checkpoints.require_space(periodic=False)
    Checkpoints(folder, model, optimizer, process, keep=1, job_key="key").require_space()
    return caught.value.code, str(caught.value)


@pytest.mark.dist
def test_a_disk_that_will_be_too_small_is_told_before_the_first_step(tmp_path):
    for code, told in run_ranks(without_room, 2, str(tmp_path)):
        assert code == "checkpoint/space"
        assert f"checkpoint folder = {tmp_path}: needs " in told and "the disk has " in told


def killed_while_writing(rank, world_size, folder):
    checkpoints, model, optimizer = checkpoints_of(rank, world_size, folder)
    checkpoints.save(Progress(step=1))
    checkpoints.wait()
    train_steps(model, optimizer, [1])
    if rank == 1:
        write = os.write

        def die(handle, piece):
            write(handle, piece[: len(piece) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        shard_file.os.write = die
    checkpoints.save(Progress(step=2))
    with pytest.raises(WorldError) as caught:
        checkpoints.wait()
    return caught.value.code


def going_on(rank, world_size, folder):
    model, optimizer, process = awkward_run(rank, world_size, {"shard": world_size}, seed=2)
    path, progress = restore_latest(folder, model, optimizer, process)
    checkpoints = Checkpoints(folder, model, optimizer, process, keep=2, job_key="key")
    checkpoints.save(Progress(step=2))
    checkpoints.close()
    return path.name, progress.step


@pytest.mark.dist
def test_a_rank_killed_while_it_writes_costs_only_that_checkpoint(tmp_path):
    assert run_ranks(killed_while_writing, 2, str(tmp_path), may_die=(1,)) == ["world/dead", DIED]
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        ".step-00000002.partial",
        "step-00000001",
    ]
    assert run_ranks(going_on, 3, str(tmp_path)) == [("step-00000001", 1)] * 3
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_signals_become_a_question_and_the_second_one_acts():
    # a shell starts what it puts in the background with interrupts ignored
    started_with = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _one_signal_asks_and_two_act()
    finally:
        signal.signal(signal.SIGINT, started_with)


def _one_signal_asks_and_two_act():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested and stop.signal is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal is signal.SIGTERM
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_manifest_survives_its_file(tmp_path):
    manifest = Manifest("key", {"shard": 2}, Progress(step=3).to_dict(), {}, {}, {"a": {"b": 1}})
    manifest.save(tmp_path)
    again = Manifest.load(tmp_path)
    assert again.progress["best_loss"] is None
    assert Progress.from_dict(again.progress) == Progress(step=3)
    assert (again.job_key, again.sections) == ("key", {"a": {"b": 1}})
