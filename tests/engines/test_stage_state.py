"""Norm, replicas and checkpoints where the stages of a model are on several ranks."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from phalanx.engines.checkpoint import Checkpoints, Manifest, Progress, restore
from phalanx.engines.weight_check import WeightCheck
from phalanx.engines.whole_weights import whole_weights
from phalanx.errors import JobError
from tests.engines.stage_cases import (
    ADAPTERS,
    CUT,
    STAGED,
    WHOLE,
    ZERO,
    built,
    join,
    set_gradients,
    state_of,
)
from tests.ranks import RankFailed, run_ranks

EMBEDDING = "model.embed_tokens.weight"
LAYOUTS = {"whole": (1, WHOLE), "tensor 2": (2, CUT), "update cut": (2, ZERO)}
LAYOUTS |= {name: (2, case) for name, case in STAGED.items()}


def updated(rank, world_size, case, folder):
    """After two updates: norms, what this rank holds, and bytes predicted of a checkpoint."""
    join(rank, world_size)
    model, optimizer, process = built(rank, world_size, case)
    norms = []
    for lr in (1e-2, 3e-3):
        set_gradients(model, optimizer)
        norms.append(float(optimizer.step(lr)))
        model.data.finish_update()
    checkpoints = Checkpoints(folder, model, optimizer, process, keep=1, job_key="job")
    checkpoints.save(Progress(2))
    num_bytes = checkpoints.predicted_bytes(periodic=False)
    checkpoints.close()
    return norms, state_of(optimizer), num_bytes


def read_again(rank, world_size, case, folders):
    """What this rank holds after reading each checkpoint."""
    join(rank, world_size)
    model, optimizer, process = built(rank, world_size, case)
    found = []
    for folder in folders:
        with torch.no_grad():
            for parameter in model.decoder.parameters():
                parameter.zero_()
        assert restore(folder / "step-00000002", model, optimizer, process, job_key="job").step == 2
        found.append(state_of(optimizer))
        for name, weight in whole_weights(model.decoder, model.stages and model.stages.group):
            assert name not in found[-1] or torch.equal(weight, found[-1][name]), name
    return found


def joined(states):
    """Of all ranks together; what several hold is equal."""
    found = {}
    for state in states:
        for name, value in state.items():
            assert name not in found or torch.equal(found[name], value), name
            found[name] = value
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Layout -> what its ranks returned, and the folder of its checkpoint."""
    folders = {name: tmp_path_factory.mktemp("saved") for name in LAYOUTS}
    return {
        name: (run_ranks(updated, size, case, folders[name], backend=None), folders[name])
        for name, (size, case) in LAYOUTS.items()
    }


@pytest.mark.dist
def test_the_norm_is_the_same_to_the_bit_however_layers_are_cut_into_stages(saved):
    norms = saved["whole"][0][0][0]
    assert norms[0] > 1.0
    for name in STAGED:
        assert all(of_rank[0] == norms for of_rank in saved[name][0]), name


@pytest.mark.dist
def test_updates_and_checkpoints_are_those_of_the_whole_model(saved):
    ((_, state, num_bytes),), _ = saved["whole"]
    for name in STAGED:
        by_rank, folder = saved[name]
        found = joined(of_rank[1] for of_rank in by_rank)
        assert found.keys() == state.keys()
        assert all(torch.equal(found[key], value) for key, value in state.items()), name
        assert len({of_rank[2] for of_rank in by_rank}) == 1
        stored = sum(path.stat().st_size for path in folder.glob("*/*"))
        assert stored < by_rank[0][2] and num_bytes < by_rank[0][2] < 1.3 * num_bytes
        assert Manifest.load(folder / "step-00000002").mesh == {"pp": 2}


@pytest.mark.dist
@pytest.mark.parametrize("reader", ["whole", "tensor 2", "update cut", "two rounds"])
def test_a_checkpoint_of_any_layout_is_read_on_any_other(saved, reader):
    (size, case), folders = LAYOUTS[reader], [folder for _, folder in saved.values()]
    by_rank = run_ranks(read_again, size, case, folders, backend=None)
    for at, (by_writer, _) in enumerate(saved.values()):
        expected = joined(of_rank[1] for of_rank in by_writer)
        found = joined(of_rank[at] for of_rank in by_rank)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def refused(rank, world_size, case, folder):
    join(rank, world_size)
    with pytest.raises(JobError) as caught:
        restore(folder / "step-00000002", *built(rank, world_size, case))
    return caught.value.code, str(caught.value.value), caught.value.rule


@pytest.mark.dist
def test_what_no_stage_trains_is_named_on_every_rank(saved):
    case = replace(STAGED["two stages"], lora=ADAPTERS)
    first, second = run_ranks(refused, 2, case, saved["whole"][1], backend=None)
    assert first == second and first[0] == "model/tensor"
    assert first[2] == "is no tensor that this job trains"


def compared(rank, world_size, case, flipped):
    """The names compared, and who is slow when the second rank takes thrice the time."""
    join(rank, world_size)
    model, _, process = built(rank, world_size, case)
    check = WeightCheck(model.decoder, process)
    if rank == flipped:
        with torch.no_grad():
            model.decoder.model.embed_tokens.weight[0, 0] += 1e-7
    check.clock.add(3.0 if rank == 1 else 1.0, 10)
    return check.names, check.run(4)["slow"]


@pytest.mark.dist
def test_an_embedding_on_two_stages_is_compared_and_speeds_of_stages_are_not():
    assert run_ranks(compared, 2, STAGED["two stages"], None, backend=None) == [
        ([EMBEDDING], []),
        ([EMBEDDING], []),
    ]
    # both ends of a wave are on the first rank
    assert run_ranks(compared, 2, STAGED["a wave"], None, backend=None) == [([], []), ([], [])]
    with pytest.raises(RankFailed) as caught:
        run_ranks(compared, 2, STAGED["two stages"], 1, backend=None)
    error = caught.value.error
    assert error.code == "train/weights" and error.where == f"{EMBEDDING} after step 4"
    assert re.match(r"different on ranks 0, 1", error.value)


def one_sided(rank, world_size):
    """The tied embedding's gradient on both ranks after a step in which one of them had none."""
    join(rank, world_size)
    model, _, _ = built(rank, world_size, STAGED["two stages"])
    weight = model.decoder.model.embed_tokens.weight
    if rank == 0:
        weight.grad = torch.ones_like(weight)
    model.stages.finish_step(model.decoder, model.data)
    return weight.grad


@pytest.mark.dist
def test_a_loss_that_uses_no_head_leaves_the_tied_embedding_to_the_other_rank():
    for grad in run_ranks(one_sided, 2, backend=None):
        assert torch.equal(grad, torch.ones_like(grad))
