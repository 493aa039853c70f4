"""`train` on meshes with a context axis: losses, norms, answers and exports of one process."""

from __future__ import annotations

import pytest
import torch

from tests.engines.tensor_cases import SEQUENCE
from tests.engines.test_train_tensor import answers, exported, numbers
from tests.engines.train_cases import FSDP, run_train
from tests.tiny_run import write_base, write_pairs

RING = {"family": "context", "name": "ring"}
GATHERED = {"family": "context", "name": "all_gather", "layout": "per_document"}
HEADS = {"family": "context", "name": "ulysses", "axis": "heads"}
LAYOUTS = {
    "pretrain": {
        "sharded": ({"shard": 2, "cp": 2}, (FSDP, GATHERED)),
        "heads in a ring": ({"cp": 2, "heads": 2}, (HEADS, RING)),
    },
    "lora": {
        "tokens split": ({"shard": 1, "cp": 2, "tp": 2}, (FSDP, SEQUENCE, RING)),
    },
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(write_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl"))


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return str(write_base(folder, vocab_size=291, num_heads=4))


@pytest.mark.dist
@pytest.mark.parametrize("method", LAYOUTS)
def test_a_context_axis_changes_nothing(tmp_path, source, base_folder, method):
    flags = {"data.source": source, "train.lr": 1e-3}
    if method == "lora":
        flags |= {"model.name": base_folder, "train.method": "lora", "train.lora_rank": 3}
        flags |= {"train.lora_alpha": 12.0, "train.lora_dropout": 0.2, "train.weight_decay": 0.0}
    else:
        flags |= {"model.width": 64}  # two query heads, one key and value head
    result, metrics = run_train(tmp_path / "one", flags)
    expected, weights = numbers(metrics), exported(tmp_path / "one")
    for name, (mesh, specs) in LAYOUTS[method].items():
        folder = tmp_path / name.replace(" ", "")
        other, metrics = run_train(folder, flags, mesh, specs)
        torch.testing.assert_close(numbers(metrics), expected, rtol=1e-5, atol=0.0, msg=name)
        assert answers(other) == answers(result), name
        assert other.num_tokens == result.num_tokens
        found = exported(folder)
        assert found.keys() == weights.keys()
        for weight, value in weights.items():
            torch.testing.assert_close(found[weight], value, rtol=0.0, atol=2e-5, msg=weight)
