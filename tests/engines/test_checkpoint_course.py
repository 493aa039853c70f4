"""A run that crashes and goes on with fewer processes is the run that nothing happened to."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from phalanx.engines.callbacks import Callback
from phalanx.engines.checkpoint import latest
from tests.engines.train_cases import FSDP, REPLICATE, run_train, values
from tests.ranks import RankFailed
from tests.tiny_run import write_base, write_pairs

TENSOR = {"family": "tensor", "name": "megatron"}


class CrashAfter(Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, run):
        if run.step == self.step:
            raise RuntimeError("the machine is gone")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(write_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl"))


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return str(write_base(tmp_path_factory.mktemp("model"), **sizes))


def crashes(folder, flags, every, at, mesh, specs, resume):
    flags = flags | {"plan.checkpoint_every": every}
    with pytest.raises(RankFailed, match="the machine is gone"):
        run_train(folder, flags, mesh, specs, callbacks=[CrashAfter(at)], resume=resume)


@pytest.mark.dist
@pytest.mark.parametrize("method", ["full", "lora"])
def test_stop_at_37_on_four_go_on_with_two_then_three(tmp_path, source, base_folder, method):
    flags = {"data.source": source, "train.steps": 50, "train.global_batch_tokens": 150}
    flags |= {"train.method": method, "model.name": base_folder, "train.eval_rows": 8}
    flags |= {"model.dtype": "float32"}
    if method == "lora":
        flags |= {"train.lora_rank": 3, "train.lora_dropout": 0.2}
    whole, expected = run_train(tmp_path / "whole", flags)
    folder = tmp_path / "parts"
    crashes(folder, flags, 37, 39, {"replicate": 2, "shard": 2}, (FSDP, REPLICATE), None)
    assert [each.name for each in (folder / "checkpoints").iterdir()] == ["step-00000037"]
    crashes(folder, flags, 9, 47, {"tp": 2}, (TENSOR,), True)
    result, metrics = run_train(folder, flags, {"shard": 3}, resume=True)
    assert values(metrics, "step", "step") == list(range(1, 51))
    samples = values(metrics, "step", "first_sample")
    assert samples == values(expected, "step", "first_sample") and len(set(samples)) == 50
    assert (result.num_tokens, result.num_counted) == (whole.num_tokens, whole.num_counted)
    for kind, key in (("step", "loss"), ("evaluate", "loss")):
        found, wanted = (torch.tensor(values(each, kind, key)) for each in (metrics, expected))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0.0)


class FullBetween(Callback):
    """Somebody else's file fills the disk after one step and is gone after another."""

    def __init__(self, disk, full_after, free_after):
        self.file, self.full_after, self.free_after = Path(disk) / "other", full_after, free_after

    def on_step(self, run):
        if run.rank != 0:
            return
        if run.step == self.full_after:
            room = os.statvfs(self.file.parent)
            self.file.write_bytes(bytes(room.f_bavail * room.f_frsize - 8192))
        if run.step == self.free_after:
            self.file.unlink()


@pytest.fixture
def disk(tmp_path):
    """A run folder whose checkpoints are on a disk of their own."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.dist
def test_a_disk_that_fills_up_in_between_costs_checkpoints_and_not_the_run(disk, source):
    flags = {"data.source": source, "train.steps": 10, "plan.checkpoint_every": 2}
    filling = FullBetween(disk, full_after=3, free_after=7)
    result, metrics = run_train(disk.parent, flags, {"shard": 2}, callbacks=[filling])
    assert result.steps == 10 and Path(disk.parent / result.export / "config.json").is_file()
    warnings = [text for text in values(metrics, "warning", "text") if "checkpoint of step" in text]
    assert "checkpoint of step 4: rank" in warnings[0]
    assert all("No space left on device" in text for text in warnings)
    assert latest(disk).name == "step-00000008"
