"""Bytes by the formula against those that torch's allocator counts in a step of two processes."""

from __future__ import annotations

import pytest
import torch

from phalanx.cost.step_memory import memory_terms, units_of
from phalanx.cost.step_work import Workload
from phalanx.engines.bind import bind_data
from phalanx.mesh import Mesh
from phalanx.models.decoder import Decoder
from phalanx.models.lora import inject
from phalanx.models.parameters import initial_values, load_parameters
from phalanx.models.spec import LoraSpec, canonical_tensors, small_config
from phalanx.ops.loss import counted_cross_entropy
from phalanx.registry import build
from phalanx.worlds.logged_group import device_mesh
from tests.live_bytes import most_live_bytes
from tests.ranks import run_ranks

CONFIG = small_config(
    vocab_size=2000, hidden_size=64, intermediate_size=160, num_layers=4, num_heads=4,
    num_kv_heads=2, head_dim=16, dtype="bfloat16",
)  # fmt: skip
TOKENS, ITEMS = 192, 2
ADAPTERS = LoraSpec(rank=64, alpha=64.0)


def live_bytes(rank: int, world_size: int, lora: LoraSpec | None) -> int:
    decoder = Decoder(CONFIG)
    load_parameters(decoder, initial_values(0, canonical_tensors(CONFIG).values()))
    if lora is not None:
        inject(decoder, lora, dtype="float32")
    mesh = device_mesh("cpu", Mesh(replicate=world_size))
    data = bind_data(decoder, [build("data", "replicate")], mesh, reduce_dtype="float32")
    tokens, counted = torch.arange(TOKENS), torch.arange(TOKENS // 4)

    def step() -> None:
        for item in range(ITEMS):
            data.begin_item(item, ITEMS)
            hidden = decoder.train()(tokens)
            counted_cross_entropy(
                hidden, decoder.head_weight, counted, tokens[counted], num_counted_global=96
            ).backward()
        data.finish_step()
        decoder.zero_grad()

    step()  # tables and threads that stay
    return most_live_bytes(step)


def predicted_bytes(lora: LoraSpec | None) -> float:
    work = Workload(
        tokens=ITEMS * TOKENS, counted=ITEMS * TOKENS / 4, num_items=ITEMS, row_tokens=TOKENS,
        row_counted=TOKENS // 4, longest_row=TOKENS, document_tokens=TOKENS, num_trained=1,
        lora_rank=lora.rank if lora else 0, lora_alpha=lora.alpha if lora else 0.0,
        lora_targets=lora.targets if lora else (),
    )  # fmt: skip
    units = units_of(CONFIG, work, [build("data", "replicate")], Mesh(replicate=2), 4)
    terms = memory_terms(CONFIG, work, units)
    return sum(terms.values()) - terms["weights"] - terms["optimizer"]


@pytest.mark.dist
@pytest.mark.parametrize("lora", [None, ADAPTERS])
def test_a_step_of_replicas_holds_the_bytes_of_the_formula(lora):
    """What an operator makes for a moment is not counted, nor is a tile of the loss."""
    for found in run_ranks(live_bytes, 2, lora, backend="gloo"):
        assert found == pytest.approx(predicted_bytes(lora), rel=0.1)
