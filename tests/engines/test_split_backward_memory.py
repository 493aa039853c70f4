"""What torch keeps between an input gradient and its weight gradient is what the formula counts."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from phalanx.cost.pipeline_memory import waiting_gradients
from phalanx.cost.pipeline_parts import Pipeline
from phalanx.cost.step_work import Workload
from phalanx.engines.recompute import apply_recompute
from phalanx.models.decoder import Decoder, Part
from phalanx.models.lora import inject
from phalanx.models.spec import LoraSpec
from phalanx.registry import build
from tests.live_bytes import LiveBytes
from tests.models.cases import CONFIGS, random_decoder

TOKENS = 300
LORA = LoraSpec(rank=2, alpha=6)


def trained_of(decoder: Decoder, part: Part) -> Iterator[nn.Parameter]:
    modules = [decoder.model.layers[str(at)] for at in part.layers] + [decoder.model.norm]
    return iter([p for m in modules for p in m.parameters() if p.requires_grad])


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["all", "adapters"])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_that_wait_for_their_weight_pass_are_counted(name, lora, mode):
    config, decoder = CONFIGS[name], random_decoder(CONFIGS[name])
    if lora is not None:
        inject(decoder, lora, dtype=config.dtype)
    apply_recompute(decoder.train(), mode)
    last = config.num_layers - 1
    part = Part(range(last, config.num_layers), False, True)
    x_SD = torch.randn(TOKENS, config.hidden_size, requires_grad=True)
    with LiveBytes() as live:
        hidden_SD = decoder(x_SD, part=part, document_starts=(0, 37))
        slope_SD = torch.ones_like(hidden_SD)
        before = live.now([hidden_SD])
        grads, groups = stage_backward_input(
            [hidden_SD], [slope_SD], [x_SD], trained_of(decoder, part)
        )
        gc.collect()
        waiting = live.now([hidden_SD, *grads]) - before
        stage_backward_weight(trained_of(decoder, part), groups)
    order = build("pipeline", "zero_bubble")
    pipeline = Pipeline.of(config, order, 2, [(0, last), (last, config.num_layers)])
    work = Workload(
        tokens=TOKENS, counted=TOKENS, num_items=1.0, row_tokens=TOKENS, row_counted=TOKENS,
        longest_row=TOKENS, document_tokens=TOKENS, num_trained=1,
        lora_rank=lora.rank if lora else 0, lora_targets=LORA.targets,
    )  # fmt: skip
    counted = TOKENS * waiting_gradients(config, work, pipeline)[1]
    few = 0.01 * counted  # scalars
    # gradients of the residual stream may be those of what leaves the stage
    assert counted - 2 * grads[0].nbytes - few <= waiting <= counted + few
