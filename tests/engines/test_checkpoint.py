"""Checkpoints are the same state on every mesh, and none is lost."""

from __future__ import annotations

import pytest
import torch

from phalanx.engines.checkpoint import Checkpoints, Progress, latest, restore
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


def size_of(mesh):
    size = 1
    for each in mesh.values():
        size *= each
    return size


def saved(rank, world_size, folder, mesh, num_steps=3, keep=2, every=0):
    """Train, save after the last step (and each `every`); the whole state and the losses."""
    model, optimizer, process = awkward_run(rank, world_size, mesh, seed=1)
    checkpoints = Checkpoints(
        folder, model, optimizer, process, keep=keep, job_key="key", sections=JOB
    )
    losses = []
    for step in range(num_steps):
        losses += train_steps(model, optimizer, [step])
        if step + 1 == num_steps or (every and (step + 1) % every == 0):
            checkpoints.save(Progress(step=step + 1, next_sample=5 * (step + 1)))
    checkpoints.close()
    return whole_state(optimizer), losses


def restored(rank, world_size, path, mesh, num_steps=0):
    """Read into other weights; the whole state before and the losses of further steps."""
    model, optimizer, process = awkward_run(rank, world_size, mesh, seed=2)
    progress = restore(path, model, optimizer, process, job_key="key", sections=JOB)
    state = whole_state(optimizer)
    steps = range(progress.step, progress.step + num_steps)
    return progress, state, train_steps(model, optimizer, steps)


@pytest.mark.dist
@pytest.mark.parametrize("source", MESHES, ids=str)
def test_state_is_bit_equal_on_every_other_mesh(tmp_path, source):
    expected, _ = run_ranks(saved, size_of(source), str(tmp_path), source)[0]
    path = latest(tmp_path)
    assert path.name == "step-00000003"
    for target in MESHES:
        for progress, state, _ in run_ranks(restored, size_of(target), str(path), target):
            assert progress == Progress(step=3, next_sample=15)
            assert state.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(state[name], value), (name, target)
