"""The course of a run: stops, goes on, keeps the best, hears its callbacks."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time

import pytest
import torch

from phalanx.engines.callbacks import Callback
from phalanx.engines.result import TrainResult
from phalanx.errors import JobError, WorldError
from phalanx.models.hf import load_decoder
from tests.engines.train_cases import (
    FSDP,
    REPLICATE,
    SMALL,
    run_train,
    train_in,
    values,
)
from tests.ranks import run_ranks
from tests.tiny_run import write_base, write_pairs


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(write_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl"))


class StopAfter(Callback):
    """Asks on one rank for the end of the run, or sends the process a signal."""

    def __init__(self, step, rank=0, by_signal=False):
        self.step, self.rank, self.by_signal = step, rank, by_signal

    def on_step(self, run):
        if run.step == self.step and run.rank == self.rank:
            if self.by_signal:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                run.request_stop("seen enough")


def numbers(metrics):
    losses = [*values(metrics, "step", "loss"), *values(metrics, "step", "grad_norm")]
    return torch.tensor([*losses, *values(metrics, "evaluate", "loss")], dtype=torch.float64)


def same_weights(one, other):
    mine, theirs = load_decoder(one / "export"), load_decoder(other / "export")
    pairs = zip(mine.named_parameters(), theirs.named_parameters())
    return all(torch.equal(a, b) for (_, a), (_, b) in pairs)


@pytest.mark.dist
def test_a_run_stopped_by_a_signal_goes_on_bit_for_bit(tmp_path, source):
    flags = {"data.source": source, "train.steps": 9, "train.eval_every": 3}
    mesh = {"shard": 2}
    _, whole = run_train(tmp_path / "whole", flags, mesh)
    stopper = StopAfter(4, rank=1, by_signal=True)
    stopped, _ = run_train(tmp_path / "parts", flags, mesh, callbacks=[stopper])
    assert stopped.stopped == "signal" and stopped.export == "" and stopped.steps in (5, 6)
    assert (tmp_path / "parts" / stopped.checkpoint / "manifest.json").is_file()
    result, parts = run_train(tmp_path / "parts", flags, mesh, resume=True)
    assert result.stopped == "" and result.steps == 9
    assert torch.equal(numbers(parts), numbers(whole))
    assert same_weights(tmp_path / "whole", tmp_path / "parts")
    first = values(parts, "step", "first_sample")
    assert first == values(whole, "step", "first_sample") and len(set(first)) == 9


@pytest.mark.dist
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, source):
    flags = {"data.source": source, "train.steps": 8, "plan.checkpoint_every": 3}
    _, whole = run_train(tmp_path / "whole", flags)
    parts = tmp_path / "parts"
    run_train(parts, flags, {"shard": 4}, callbacks=[StopAfter(2, by_signal=True)])
    run_train(parts, flags, {"shard": 2}, callbacks=[StopAfter(5, by_signal=True)], resume=True)
    _, metrics = run_train(parts, flags, {"replicate": 3}, [REPLICATE], resume=True)
    torch.testing.assert_close(numbers(metrics), numbers(whole), rtol=1e-5, atol=0.0)
    assert values(metrics, "step", "step") == list(range(1, 9))
    assert values(metrics, "step", "first_sample") == values(whole, "step", "first_sample")


@pytest.mark.dist
def test_one_rank_that_asks_stops_all_and_the_result_is_exported(tmp_path, source):
    flags = {"data.source": source, "train.steps": 50}
    stopper = StopAfter(2, rank=1)
    result, metrics = run_train(tmp_path / "run", flags, {"shard": 2}, callbacks=[stopper])
    assert result.stopped == "a callback of another rank" and result.steps in (3, 4)
    assert values(metrics, "evaluate", "step") == [0, result.steps]
    assert (tmp_path / "run" / result.export / "config.json").is_file()


@pytest.mark.dist
def test_the_best_weights_are_exported_and_the_run_stops_early(tmp_path, source):
    flags = {"data.source": source, "train.steps": 60, "train.eval_every": 1}
    flags |= {"train.lr": 0.3, "train.schedule": "constant", "train.warmup_steps": 0}
    flags |= {"train.keep_best": True, "train.early_stop": 3, "train.clip_norm": 0.0}
    result, metrics = run_train(tmp_path / "run", flags, {"shard": 2})
    assert result.stopped.startswith("early stop: 3 evaluations")
    assert result.steps == result.best_step + 3
    assert result.loss_after == min(values(metrics, "evaluate", "loss"))
    best = flags | {"train.steps": max(1, result.best_step), "train.early_stop": 0}
    if result.best_step:
        run_train(tmp_path / "best", best, {"shard": 2})
        assert same_weights(tmp_path / "run", tmp_path / "best")


class LosesTheBest(Callback):
    """As a disk does that was full when they were to be written."""

    def on_evaluate(self, run):
        if run.step < 4:
            return
        while not (kept := list((run.folder / "checkpoints").glob("best-*"))):
            time.sleep(0.01)
        shutil.rmtree(kept[0])


@pytest.mark.dist
def test_where_the_best_weights_are_gone_the_last_ones_are_told(tmp_path, source):
    flags = {"data.source": source, "train.steps": 4, "train.eval_every": 1, "train.lr": 30.0}
    flags |= {"train.warmup_steps": 0, "train.keep_best": True, "train.clip_norm": 0.0}
    result, metrics = run_train(tmp_path / "run", flags, callbacks=[LosesTheBest()])
    losses = values(metrics, "evaluate", "loss")
    assert result.best_step < 4 and result.loss_after == losses[-1] > min(losses)
    (told,) = (line["text"] for line in metrics if "were not kept" in line.get("text", ""))
    assert told.endswith("those of the last step are exported")
    last = flags | {"train.keep_best": False}
    run_train(tmp_path / "last", last)
    assert same_weights(tmp_path / "run", tmp_path / "last")


@pytest.mark.dist
def test_rows_need_not_be_held_out(tmp_path, source):
    flags = {"data.source": source, "data.held_out_frac": 0.0}
    result, metrics = run_train(tmp_path / "run", flags)
    assert result.loss_before is None and result.samples == []
    assert TrainResult.load(tmp_path / "run") == result
    assert not values(metrics, "evaluate", "loss")


def ends_in_error(rank, world_size, *args):
    with pytest.raises(WorldError) as caught:
        train_in(rank, world_size, *args)
    return caught.value.code, str(caught.value)


class Poison(Callback):
    """Makes a weight infinite after a step."""

    def on_step(self, run):
        if run.step == 3:
            next(run.model.parameters()).data.fill_(torch.inf)


@pytest.mark.dist
def test_a_step_that_is_not_finite_ends_the_run_with_the_weights_before_it(tmp_path, source):
    flags = SMALL | {"data.source": source, "train.steps": 9}
    folder = tmp_path / "run"
    folder.mkdir()
    args = (str(folder), flags, {"shard": 2}, [FSDP], {}, [Poison()])
    for code, text in run_ranks(ends_in_error, 2, *args, backend=None):
        assert code == "train/nonfinite" and "step 4" in text
    assert (folder / "checkpoints" / "step-00000003" / "manifest.json").is_file()


def with_own_data(rank, world_size, sources, folder, flags):
    args = (folder, flags | {"data.source": sources[rank]}, {"shard": 2}, [FSDP], {})
    with pytest.raises(WorldError) as caught:
        train_in(rank, world_size, *args)
    return str(caught.value)


@pytest.mark.dist
def test_ranks_that_see_different_data_never_begin(tmp_path, source):
    other = str(write_pairs(tmp_path / "edited.jsonl", 60))
    folder = tmp_path / "run"
    folder.mkdir()
    flags = SMALL | {"model.vocabulary": 300}
    for told in run_ranks(with_own_data, 2, [source, other], str(folder), flags, backend=None):
        assert "of rank 1" in told and "which rank 0 has" in told


class FillTheDisk(Callback):
    """After a step no file may grow beyond so many bytes: less than an export, more than what was
    trained."""

    def __init__(self, step, num_bytes):
        self.step, self.num_bytes = step, num_bytes

    def on_step(self, run):
        if run.step == self.step:
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.num_bytes, hard))


def with_a_full_disk(rank, world_size, *args):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        return ends_in_error(rank, world_size, *args)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.dist
def test_a_run_whose_export_finds_no_room_keeps_what_it_trained(tmp_path, source):
    base = str(write_base(tmp_path, hidden_size=96, intermediate_size=160))
    flags = {"model.name": base, "data.source": source, "train.method": "lora"}
    flags |= {"train.lora_rank": 1, "plan.profile_steps": 0}
    whole, _ = run_train(tmp_path / "whole", flags, {"replicate": 2}, [REPLICATE])
    folder = tmp_path / "parts"
    folder.mkdir()
    args = (str(folder), SMALL | flags, {"replicate": 2}, [REPLICATE], {})
    fill = FillTheDisk(SMALL["train.steps"] - 1, 200_000)
    for code, text in run_ranks(with_a_full_disk, 2, *args, [fill], backend=None):
        assert code == "cli/file" and "export" in text
    assert not (folder / "export").exists()
    result, metrics = run_train(folder, flags, {"replicate": 2}, [REPLICATE], resume=True)
    assert result.steps == whole.steps and len(values(metrics, "step", "step")) == whole.steps
    assert result.loss_after == whole.loss_after
    assert same_weights(tmp_path / "whole", folder)


def going_on(rank, world_size, *args):
    with pytest.raises(JobError) as caught:
        train_in(rank, world_size, *args)
    return caught.value.code, str(caught.value)


@pytest.mark.dist
def test_a_run_all_of_whose_checkpoints_are_damaged_says_so(tmp_path, source):
    flags = SMALL | {"data.source": source, "plan.checkpoint_every": 2}
    folder = tmp_path / "run"
    run_train(folder, flags, {"shard": 1})
    (folder / "checkpoints" / "step-00000002" / "manifest.json").write_text("{")
    args = (str(folder), flags, {"shard": 1}, [FSDP], {}, [], True)
    ((code, text),) = run_ranks(going_on, 1, *args, backend=None)
    assert code == "job/not-found" and "step-00000002 manifest.json cannot be read" in text
