"""ZeRO 1 and 2 on real processes: the training of one process, with an update that is cut.

N=31 rows of the embedding, odd widths and 3 ranks make shards uneven, and some empty.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.models.spec import small_config
from tests.engines.tensor_cases import MEGATRON, REPLICATE, Case, train_cases, train_plain
from tests.ranks import run_ranks

CONFIG = small_config(
    vocab_size=31, hidden_size=18, intermediate_size=22, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=6, window=3, full_every=2, dtype="float64",
)  # fmt: skip
ZERO_1 = {"family": "data", "name": "zero"}
ZERO_2 = ZERO_1 | {"stage": 2}
PLAIN = Case(config=CONFIG, mesh={})
TWO = (
    replace(PLAIN, mesh={"shard": 2}, specs=(ZERO_1,)),
    replace(PLAIN, mesh={"shard": 2}, specs=(ZERO_2,)),
    replace(PLAIN, mesh={"shard": 1, "tp": 2}, specs=(ZERO_2, MEGATRON)),
    replace(PLAIN, mesh={"replicate": 2, "shard": 1}, specs=(ZERO_2, REPLICATE)),
)
FOUR = (
    replace(PLAIN, mesh={"shard": 4}, specs=(ZERO_2,)),
    replace(PLAIN, mesh={"replicate": 2, "shard": 2}, specs=(ZERO_2, REPLICATE)),
    replace(PLAIN, mesh={"shard": 2, "tp": 2}, specs=(ZERO_1, MEGATRON)),
)


def named(case: Case) -> str:
    return f"{dict(case.mesh)}"


@pytest.fixture(scope="module")
def expected():
    return train_plain(PLAIN)


@pytest.mark.dist
@pytest.mark.parametrize(("world_size", "cases"), [(2, TWO), (4, FOUR)], ids=["2", "4"])
def test_a_cut_update_trains_as_one_process(expected, world_size, cases):
    for outcomes in run_ranks(train_cases, world_size, cases, backend=None):
        for case, found in zip(cases, outcomes):
            assert found.losses == pytest.approx(expected.losses, rel=1e-10), named(case)
            assert found.norms == pytest.approx(expected.norms, rel=1e-9), named(case)
            assert found.weights.keys() == expected.weights.keys()
            for name, weight in expected.weights.items():
                torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=1e-9)
            assert not found.misplaced
