"""Checkpoints are the same state on every mesh, and a run goes on from them unchanged."""

from __future__ import annotations

import json
import os
import time
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

from phalanx.engines.checkpoint import (
    Checkpoints,
    Manifest,
    Progress,
    latest,
    restore,
    restore_latest,
    shard_file,
)
from phalanx.errors import JobError
from tests.engines.checkpoint_cases import JOB, awkward_run, train_steps, whole_state
from tests.ranks import run_ranks

MESHES = [
    {"shard": 1},
    {"shard": 3},
    {"shard": 4},
    {"replicate": 2, "shard": 2},
    {"tp": 2},
    {"shard": 2, "tp": 2},
    {"replicate": 3},
]


def saved(rank, world_size, folder, mesh, num_steps=3, keep=2, every=0):
    """Train and save after the last step (and each `every`); the whole state and further losses."""
    model, optimizer, process = awkward_run(rank, world_size, mesh, seed=1)
    checkpoints = Checkpoints(
        folder, model, optimizer, process, keep=keep, job_key="key", sections=JOB
    )
    for step in range(num_steps):
        train_steps(model, optimizer, [step])
        if step + 1 == num_steps or (every and (step + 1) % every == 0):
            checkpoints.save(Progress(step=step + 1, next_sample=5 * (step + 1)))
    checkpoints.close()
    state = whole_state(optimizer)
    drawn = torch.rand(3)
    losses = train_steps(model, optimizer, range(num_steps, num_steps + 4))
    return state, losses, drawn, whole_state(optimizer)


def restored(rank, world_size, path, mesh):
    """Read into other weights; progress, whole state, and what follows."""
    model, optimizer, process = awkward_run(rank, world_size, mesh, seed=2)
    train_steps(model, optimizer, [0])  # what was gathered and counted before does not matter
    model.decoder(torch.tensor([1]))
    torch.rand(rank)
    progress = restore(path, model, optimizer, process, job_key="key", sections=JOB)
    state, drawn = whole_state(optimizer), torch.rand(3)
    losses = train_steps(model, optimizer, range(progress.step, progress.step + 4))
    return progress, state, losses, drawn, whole_state(optimizer)


def require_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.dist
@pytest.mark.parametrize("source", MESHES, ids=str)
def test_state_is_bit_equal_on_every_mesh_and_so_is_the_rest_of_the_run(tmp_path, source):
    expected, losses, _, _ = run_ranks(saved, prod(source.values()), str(tmp_path), source)[0]
    path = latest(tmp_path)
    assert path.name == "step-00000003"
    for target in MESHES:
        for answer in run_ranks(restored, prod(target.values()), str(path), target):
            progress, state, further, *_ = answer
            assert progress == Progress(step=3, next_sample=15)
            require_equal(state, expected)
            assert further == pytest.approx(losses, rel=1e-9)


@pytest.mark.dist
@pytest.mark.parametrize("mesh", [{"shard": 3}, {"shard": 2, "tp": 2}], ids=str)
def test_a_run_on_the_same_mesh_goes_on_bit_for_bit(tmp_path, mesh):
    size = prod(mesh.values())
    answers = run_ranks(saved, size, str(tmp_path), mesh)
    for before, after in zip(
        answers, run_ranks(restored, size, str(latest(tmp_path)), mesh), strict=True
    ):
        assert after[2] == before[1]
        assert torch.equal(after[3], before[2])  # torch's own generator, rank by rank
        require_equal(after[4], before[3])


@pytest.mark.dist
def test_every_rank_writes_its_own_part_and_whole_tensors_are_written_once(tmp_path):
    run_ranks(saved, 4, str(tmp_path), {"replicate": 2, "shard": 2})
    path = latest(tmp_path)
    manifest = Manifest.load(path)
    assert manifest.mesh == {"replicate": 2, "shard": 2}
    assert manifest.progress["next_sample"] == 15
    itemsize = {"float64": 8, "float32": 4}
    values = sum(prod(t.shape) * itemsize[t.dtype] for t in manifest.tensors.values())
    sizes = {name: (path / name).stat().st_size for name in manifest.files}
    assert len(sizes) == 8 and not {p.name for p in path.iterdir()} - sizes.keys() - {
        "manifest.json"
    }
    headers = {
        name: 8 + int.from_bytes((path / name).open("rb").read(8), "little") for name in sizes
    }
    assert sum(sizes.values()) - sum(headers.values()) == values
    # replicas share the work: nobody writes more than twice the mean
    assert max(sizes[n] - headers[n] for n in sizes) < 2 * values / 4
    assert not any("frozen" in name for name in manifest.tensors)


def read_by_torch(rank, world_size, path, mesh):
    _, optimizer, _ = awkward_run(rank, world_size, mesh, seed=2)
    state = {name: each.detach() for name, each in optimizer.named_parameters.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path))
    return {name: each.full_tensor() for name, each in state.items()}


@pytest.mark.dist
def test_torch_distributed_checkpoint_reads_the_folder(tmp_path):
    expected = run_ranks(saved, 3, str(tmp_path), {"shard": 3})[0][0]
    path = str(latest(tmp_path))
    for state in run_ranks(read_by_torch, 2, path, {"shard": 2}):
        for name, value in state.items():
            assert torch.equal(value, expected[f"weight.{name}"])


def kept(rank, world_size, folder):
    model, optimizer, process = awkward_run(rank, world_size, {"shard": 2}, seed=1)
    saved = []
    checkpoints = Checkpoints(
        folder,
        model,
        optimizer,
        process,
        keep=2,
        job_key="key",
        on_saved=lambda *of: saved.append(of),
    )
    for step in (2, 4, 6):
        checkpoints.save(Progress(step=step))
        checkpoints.save(Progress(step=step), name="best")
    checkpoints.wait()
    assert [(p.step, name) for p, name, _ in saved] == [
        (step, name) for step in (2, 4, 6) for name in ("step", "best")
    ]
    assert saved[-1][2] == Path(folder) / "best-00000006"
    names = sorted(path.name for path in Path(folder).iterdir())
    dist.barrier()
    checkpoints.save(Progress(step=4))  # the run went back
    checkpoints.close()
    return names, sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.dist
def test_the_newest_stay_and_the_best_beside_them(tmp_path):
    for before, after in run_ranks(kept, 2, str(tmp_path)):
        assert before == ["best-00000006", "step-00000004", "step-00000006"]
        assert after == ["best-00000006", "step-00000004"]
    assert latest(tmp_path, "best").name == "best-00000006"
    assert not Manifest.load(tmp_path / "best-00000006").has_optimizer


def expect_refusal(rank, world_size, path, change):
    model, optimizer, process = awkward_run(rank, world_size, {"shard": world_size}, seed=2)
    options = {"job_key": "key", "sections": JOB} | change
    with pytest.raises(JobError) as caught:
        restore(path, model, optimizer, process, **options)
    return caught.value.code, str(caught.value)


@pytest.mark.dist
def test_another_job_is_refused_with_the_key_that_differs(tmp_path):
    run_ranks(saved, 1, str(tmp_path), {"shard": 1})
    path = str(latest(tmp_path))
    other = JOB | {"train": {"lr": 0.02, "steps": 8}}
    change = {"job_key": "other", "sections": other}
    for code, told in run_ranks(expect_refusal, 2, path, change):
        assert code == "checkpoint/job" and "train.lr was 0.01 and is 0.02" in told
    ((code, told),) = run_ranks(expect_refusal, 1, path, {"job_key": "other", "sections": None})
    assert code == "checkpoint/job" and "its key is key and this one's is other" in told


def taken_up(rank, world_size, path, change):
    model, optimizer, process = awkward_run(rank, world_size, {"shard": world_size}, seed=2)
    return restore(path, model, optimizer, process, **change).step


@pytest.mark.dist
def test_a_key_that_came_with_a_later_release_was_at_its_default(tmp_path):
    run_ranks(saved, 1, str(tmp_path), {"shard": 1})
    path = str(latest(tmp_path))
    same = JOB | {"train": JOB["train"] | {"label_smoothing": 0.0, "lora_targets": ()}}
    change = {"job_key": "of more keys", "sections": same}
    assert run_ranks(taken_up, 2, path, change) == [3, 3]
    other = JOB | {"train": JOB["train"] | {"label_smoothing": 0.1}}
    change = {"job_key": "of more keys", "sections": other}
    ((code, told),) = run_ranks(expect_refusal, 1, path, change)
    assert code == "checkpoint/job" and "train.label_smoothing was 0.0 and is 0.1" in told


def best_only(rank, world_size, folder):
    model, optimizer, process = awkward_run(rank, world_size, {"shard": 2}, seed=1)
    checkpoints = Checkpoints(folder, model, optimizer, process, keep=1, job_key="key")
    checkpoints.save(Progress(step=1), name="best")
    expected = whole_state(optimizer)
    train_steps(model, optimizer, range(3))
    checkpoints.close()
    path = latest(folder, "best")
    with pytest.raises(JobError, match="holds weights only") as caught:
        restore(path, model, optimizer, process)
    restore(path, model, optimizer, process, weights_only=True)
    state = whole_state(optimizer)
    gathered = model.decoder.state_dict()
    return caught.value.code, expected, state, {n: gathered[n].full_tensor() for n in gathered}


@pytest.mark.dist
def test_best_weights_come_back_and_training_cannot_go_on_from_them(tmp_path):
    for code, expected, state, module in run_ranks(best_only, 2, str(tmp_path)):
        assert code == "checkpoint/format"
        for name in (name for name in expected if name.startswith("weight.")):
            assert torch.equal(state[name], expected[name])
            assert torch.equal(module[name.removeprefix("weight.")], expected[name])
        assert state["step.scale"] == 3.0


def newest(rank, world_size, folder):
    model, optimizer, process = awkward_run(rank, world_size, {"shard": 2}, seed=2)
    told = []
    options = {"job_key": "key", "on_damaged": lambda error: told.append(str(error))}
    found = restore_latest(folder, model, optimizer, process, **options)
    return found and (found[0].name, found[1].step), told


@pytest.mark.dist
def test_a_run_goes_on_from_the_newest_good_one(tmp_path):
    assert run_ranks(newest, 2, str(tmp_path)) == [(None, [])] * 2
    run_ranks(saved, 2, str(tmp_path), {"shard": 2}, 6, 3, 2)
    assert run_ranks(newest, 2, str(tmp_path)) == [(("step-00000006", 6), [])] * 2
    file = tmp_path / "step-00000006" / "optimizer-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    table = json.loads((tmp_path / "step-00000004" / "manifest.json").read_text())
    table["progress"]["next_sample"] = 0
    (tmp_path / "step-00000004" / "manifest.json").write_text(json.dumps(table))
    for found, told in run_ranks(newest, 2, str(tmp_path)):
        assert found == ("step-00000002", 2)
        assert "optimizer-00001-of-00002.safetensors is not what was written" in told[0]
        assert "manifest.json is not what was written" in told[1]
    assert latest(tmp_path).name == "step-00000002"
    assert latest(tmp_path, verify=False).name == "step-00000006"


def saved_slowly(rank, world_size, folder):
    """The disk takes longer than a step; the state at the moment of each save."""
    model, optimizer, process = awkward_run(rank, world_size, {"shard": 2}, seed=1)
    checkpoints = Checkpoints(folder, model, optimizer, process, keep=9, job_key="key")
    write = os.write

    def slow_write(handle, piece):
        time.sleep(0.01)
        return write(handle, piece[:100])

    shard_file.os.write = slow_write
    states = []
    try:
        for step in range(3):
            train_steps(model, optimizer, [step])
            states.append(whole_state(optimizer))
            checkpoints.save(Progress(step=step + 1))
            train_steps(model, optimizer, [step])
        restore(latest(folder), model, optimizer, process)  # changes what is being written
        checkpoints.close()
    finally:
        shard_file.os.write = write
    assert not optimizer.before_change
    return states


@pytest.mark.dist
def test_a_checkpoint_is_of_its_moment_however_long_it_takes_to_write(tmp_path):
    states = run_ranks(saved_slowly, 2, str(tmp_path))[0]
    for step, state in enumerate(states):
        path = str(tmp_path / f"step-{step + 1:08d}")
        require_equal(run_ranks(restored, 1, path, {"shard": 1})[0][1], state)
