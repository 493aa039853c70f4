"""`train` on meshes with a pipeline axis: losses, norms, answers and exports of one process."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from phalanx.trace import Trace
from tests.engines.layout_cases import answers, exported, numbers
from tests.engines.test_train_parts import own
from tests.engines.train_cases import run_train
from tests.tiny_run import write_base, write_pairs

DUAL = {"family": "pipeline", "name": "dualpipe_v"}
INTERLEAVED = {"family": "pipeline", "name": "interleaved"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(write_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl"))


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    return str(write_base(tmp_path_factory.mktemp("model"), vocab_size=291, num_heads=4))


METHODS = {
    "pretrain": (own("smoothed"), INTERLEAVED, [[0, 0], [0, 1], [1, 2], [2, 2]]),
    # fewer documents in a step than the four micro-batches that the order needs
    "lora": (
        {
            "train.method": "lora",
            "train.lora_rank": 3,
            "train.lora_dropout": 0.2,
            "train.global_batch_tokens": 80,
        },
        DUAL,
        [[0, 1], [1, 2], [2, 3], [3, 3]],
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
    """Every rank's passes are in the trace, as many backward as forward."""
    trace = Trace.load(folder / "trace.npz")
    for rank in (0, 1):
        passes = trace.where(rank=rank, step=0, lane="compute")
        count = Counter(passes.column("phase"))
        assert count["F"] == count["B"] + count["W"] > 0 and count["I"] == count["W"]
        assert len(trace.where(rank=rank, step=0, operator="send")) > 0
