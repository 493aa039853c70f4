"""`train` on meshes with a tensor axis: losses, norms, answers and exports of one process."""

from __future__ import annotations

import pytest

from tests.engines.layout_cases import check_layouts
from tests.engines.tensor_cases import MEGATRON, REPLICATE, SEQUENCE
from tests.engines.train_cases import FSDP
from tests.tiny_run import write_base, write_pairs

TOKENS_SPLIT = {"shard": 2, "tp": 2}, (FSDP, SEQUENCE)
HYBRID = {"replicate": 2, "shard": 1, "tp": 2}, (FSDP, REPLICATE, MEGATRON)
LAYOUTS = {
    "pretrain": {"tp 2": ({"tp": 2}, (MEGATRON,)), "hybrid": HYBRID},
    "lora": {"tp 2": ({"shard": 1, "tp": 2}, (FSDP, MEGATRON)), "tokens split": TOKENS_SPLIT},
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
def test_a_tensor_axis_changes_nothing(tmp_path, source, base_folder, method):
    check_layouts(tmp_path, source, base_folder, method, LAYOUTS[method])
