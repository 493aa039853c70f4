"""What layers that are computed again keep of a token, in a step that is played. No torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from phalanx.cost.step_saved import Saved, saved_of
from phalanx.cost.step_work import Workload
from phalanx.models.config import DecoderConfig
from phalanx.models.operators import Operator
from phalanx.models.spec import LoraSpec
from phalanx.workload import StepWork, Unit


def with_recompute(
    work: StepWork, config: DecoderConfig, recompute: str, lora: LoraSpec | None
) -> tuple[StepWork, float]:
    """The step with what its layers keep (`cost.step_saved`), and bytes per token that one of them
    needs beside it while it is computed again.

    Args:
        recompute: none, selective or full.
    """
    if recompute == "none":
        return work, 0.0
    longest = max(work.item_tokens)
    load = Workload(
        tokens=longest,
        counted=longest,
        num_items=1,
        row_tokens=longest,
        row_counted=longest,
        longest_row=longest,
        document_tokens=longest,
        num_trained=0,
        lora_rank=lora.rank if lora else 0,
        lora_alpha=lora.alpha if lora else 0.0,
        lora_targets=lora.targets if lora else (),
    )
    parts = [partial(_is_of, layer) for layer in range(config.num_layers)]
    whole, kept = (saved_of(config, load, each, parts) for each in ("none", recompute))
    units = tuple(_kept(unit, whole, kept) for unit in work.units)
    return replace(work, units=units), max(each.again for each in kept)


def _is_of(layer: int, op: Operator) -> bool:
    return op.layer == layer


def _kept(unit: Unit, whole: list[Saved], kept: list[Saved]) -> Unit:
    _, is_layer, layer = unit.name.partition(".layers.")
    if not is_layer:
        return unit
    share = kept[int(layer)].kept / max(whole[int(layer)].kept, 1.0)
    blocks = tuple(
        replace(block, saved_bytes_per_token=share * block.saved_bytes_per_token)
        for block in unit.blocks
    )
    return replace(unit, blocks=blocks)
