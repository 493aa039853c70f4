"""Seconds and bytes of a training step from a model's shapes and this machine's rates. No torch."""

from __future__ import annotations

from phalanx.models.spec import DecoderConfig, layer_tensors


def counted_weight(config: DecoderConfig) -> float:
    """Work of a target beyond that of any token, in tokens: head over layer products.

    Both cost 2 FLOPs per parameter forward and the same multiple of it backward, so the ratio is
    V D over the layers' matrix parameters, whatever is trained.
    """
    layers = sum(
        spec.num_elements
        for layer in range(config.num_layers)
        for spec in layer_tensors(config, layer)
        if len(spec.shape) == 2
    )
    return config.vocab_size * config.hidden_size / layers
