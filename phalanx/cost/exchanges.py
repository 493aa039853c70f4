"""How often activations travel over the tensor axis, by the rules of tensor specs. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.models.config import DecoderConfig
from phalanx.policy import Exchange, Spec


def exchange_counts(
    config: DecoderConfig, specs: Sequence[Spec], recompute: str
) -> dict[str, float]:
    """Collective -> exchanges of activations of one micro-batch, by the rules of tensor specs.

    With `full` recomputation the forward ones of the blocks happen twice.
    """
    counts: dict[str, float] = {}
    blocks = {f"model.layers.0.{block}": config.num_layers for block in ("self_attn", "mlp")}
    for spec in specs:
        for module, times in (blocks | {"model.embed_tokens": 1, "lm_head": 1}).items():
            rule = spec.rule_for(module)
            for exchange in rule.exchanges if rule else ():
                again = recompute == "full" and exchange.phase == "F" and module in blocks
                times_each = times * _moves_activations(exchange) * (1 + again)
                counts[exchange.collective] = counts.get(exchange.collective, 0.0) + times_each
    return counts


def _moves_activations(exchange: Exchange) -> bool:
    return exchange.of in ("activations", "inputs")
