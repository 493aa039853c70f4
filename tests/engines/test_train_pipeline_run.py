"""`train` on meshes with a pipeline axis: losses, norms, answers and exports of one process."""

from __future__ import annotations

import pytest
import torch

from phalanx.trace import Trace
from tests.engines.test_train_tensor import answers, exported, numbers
from tests.engines.train_cases import run_train
from tests.tiny_run import write_base, write_pairs

ONE_F_ONE_B = {"family": "pipeline", "name": "1f1b"}
INTERLEAVED = {"family": "pipeline", "name": "interleaved"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(write_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl"))


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    return str(write_base(tmp_path_factory.mktemp("model"), vocab_size=291, num_heads=4))


METHODS = {
    "pretrain": ({}, INTERLEAVED, [[0, 0], [0, 1], [1, 2], [2, 2]]),
    "lora": (
        {"train.method": "lora", "train.lora_rank": 3, "train.lora_dropout": 0.2},
        ONE_F_ONE_B,
        [[0, 2], [2, 3]],
    ),
}


@pytest.mark.dist
@pytest.mark.parametrize("method", METHODS)
def test_a_pipeline_axis_changes_nothing(tmp_path, source, base_folder, method):
    flags, order, stages = METHODS[method]
    flags = {"data.source": source, "train.lr": 1e-3} | flags
    if method == "lora":
        flags |= {"model.name": base_folder}
    result, metrics = run_train(tmp_path / "one", flags)
    batch = {"stages": stages, "row_tokens": 48}
    other, found = run_train(tmp_path / "two", flags, {"pp": 2}, (), order=order, batch=batch)
    torch.testing.assert_close(numbers(found), numbers(metrics), rtol=1e-5, atol=0.0)
    assert answers(other) == answers(result) and other.num_tokens == result.num_tokens
    weights = exported(tmp_path / "one")
    mine = exported(tmp_path / "two")
    assert mine.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(mine[name], value, rtol=0.0, atol=2e-5, msg=name)
    assert_traced(tmp_path / "two")


def assert_traced(folder):
    """Every rank's passes are in the trace, one of each kind per stage and micro-batch."""
    trace = Trace.load(folder / "trace.npz")
    for rank in (0, 1):
        passes = trace.where(rank=rank, step=0, lane="compute")
        phases = [phase for phase in passes.column("phase") if phase in "FB"]
        assert phases.count("F") == phases.count("B") > 0
        assert len(trace.where(rank=rank, step=0, operator="send")) > 0
