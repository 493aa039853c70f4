"""`train` on meshes with a context axis: losses, norms, answers and exports of one process."""

from __future__ import annotations

import pytest

from tests.engines.layout_cases import check_layouts
from tests.engines.tensor_cases import SEQUENCE
from tests.engines.train_cases import FSDP
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
    check_layouts(tmp_path, source, base_folder, method, LAYOUTS[method])
