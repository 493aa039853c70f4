"""Adding up 64 micro-batches: in float32 the sum is the sum, in bfloat16 it is not.

Chu et al., "Scaling Llama 3 Training with Efficient Parallelism Strategies", ISCA 2025, section
6.2: gradients are accumulated in float32 while passes stay in bfloat16.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.models.spec import small_config
from phalanx.worlds.logged_group import init_logged
from tests.engines.tensor_cases import FSDP, Case, bound_loss, build, cpu_process, rows_of
from tests.ranks import current_store, run_ranks

CONFIG = small_config(
    vocab_size=31, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=8, window=4, full_every=2, dtype="bfloat16", init_std=0.2,
)  # fmt: skip
NUM_ITEMS = 64
DTYPES = {"master": "float32", "compute": "bfloat16"}
CASE = Case(config=CONFIG, specs=(FSDP,), mesh={"shard": 1}, rows=((6,),) * NUM_ITEMS)


def relative_errors(rank: int, world_size: int) -> dict[str, float]:
    """By dtype of the sum: how far it is from the float64 sum of the same gradients."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    found = {}
    for dtype in ("float32", "bfloat16"):
        case = replace(CASE, dtypes=DTYPES | {"reduce": dtype})
        model = build(case, cpu_process(rank, world_size, case))
        rows = rows_of(case, 0)

        def gradient(start: int, num_items: int, case=case, model=model, rows=rows) -> Tensor:
            for at in range(num_items):
                model.data.begin_item(at, num_items)
                bound_loss(model, case, rows[start + at], 0).backward()
            model.finish_step()
            parameters = list(model.decoder.parameters())
            grads = [p.grad.full_tensor().double().flatten() for p in parameters]
            for parameter in parameters:
                parameter.grad = None
            return torch.cat(grads)

        exact = sum(gradient(at, 1) for at in range(NUM_ITEMS))
        error = (gradient(0, NUM_ITEMS) - exact).norm() / exact.norm()
        found[dtype] = float(error)
    return found


@pytest.mark.dist
def test_a_float32_sum_of_64_micro_batches_is_ten_times_as_exact_as_a_bfloat16_one():
    (errors,) = run_ranks(relative_errors, 1, backend=None)
    assert errors["bfloat16"] > 1e-3
    assert errors["float32"] < 0.1 * errors["bfloat16"]
