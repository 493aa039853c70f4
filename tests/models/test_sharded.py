"""The decoder under FSDP2: loss and gradients equal those of one process."""

from __future__ import annotations

import pytest
import torch

from phalanx.models.decoder import Decoder
from phalanx.ops.loss import counted_cross_entropy
from tests.models.cases import CONFIGS, random_decoder, random_tokens
from tests.ranks import run_ranks

CONFIG = CONFIGS["one_kv_head_capped"].with_dtype("float64")  # odd sizes, tied and capped head
ROWS = (40, 23)  # tokens of rank 0 and of rank 1
COUNTED = (31, 5)


def rank_loss(decoder: Decoder, rank: int) -> torch.Tensor:
    tokens = random_tokens(CONFIG, ROWS[rank] + 1, seed=rank)
    counted = torch.arange(COUNTED[rank])
    return counted_cross_entropy(
        decoder(tokens[:-1], None, (0, 9)), decoder.head_weight, counted, tokens[counted + 1],
        num_counted_global=sum(COUNTED), soft_cap=CONFIG.logit_soft_cap,
    )  # fmt: skip


def sharded_gradients(rank: int, world_size: int) -> tuple[float, list[torch.Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    decoder = random_decoder(CONFIG)
    for module in [*decoder.model.layers.values(), decoder]:
        fully_shard(module, mesh=mesh)
        module.set_gradient_divide_factor(1.0)  # the loss is already divided by the global count
    loss = rank_loss(decoder, rank)
    loss.backward()
    return loss.item(), [parameter.grad.full_tensor() for parameter in decoder.parameters()]


@pytest.mark.dist
def test_sharded_gradients_equal_one_process():
    """Rows of different length, few of them counted; the head is used outside of forward."""
    decoder = random_decoder(CONFIG)
    loss = sum(rank_loss(decoder, rank) for rank in range(2))
    loss.backward()
    results = run_ranks(sharded_gradients, 2)
    assert sum(part for part, _ in results) == pytest.approx(loss.item(), rel=1e-12)
    for _, gradients in results:
        for mine, parameter in zip(gradients, decoder.parameters()):
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-9, atol=1e-12)
