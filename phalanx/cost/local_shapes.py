"""A rank's part of a decoder under tensor parallelism, as a decoder of smaller sizes. No torch."""

from __future__ import annotations

from dataclasses import replace

from phalanx.layout.tensor_split import kv_heads_of, tensor_legality, vocabulary_part
from phalanx.models.config import AttentionKind, DecoderConfig


def local_config(config: DecoderConfig, degree: int) -> DecoderConfig:
    """What the first of `degree` ranks computes of every layer: heads, feed-forward, vocabulary.

    Operator lists, weights and adapters of the result have the local shapes, since tensor
    parallelism cuts exactly these sizes. Where key and value heads do not divide, a rank stores
    whole projections of them but computes the heads that it needs; the difference in stored bytes
    is not counted.

    Raises:
        PlanError: `plan/illegal` for a degree that cannot be cut.
    """
    if degree == 1:
        return config
    tensor_legality(config, degree).require("plan.mesh.tp")
    embedded = config.per_layer_embedding
    if embedded is not None:
        part = vocabulary_part(embedded.vocab_size, degree)
        embedded = embedded._replace(vocab_size=part)
    return replace(
        config,
        kinds=tuple(_local_kind(kind, degree) for kind in config.kinds),
        intermediate_size=config.intermediate_size // degree,
        ffn_widths=tuple(width // degree for width in config.ffn_widths),
        vocab_size=vocabulary_part(config.vocab_size, degree),
        per_layer_embedding=embedded,
    )


def _local_kind(kind: AttentionKind, degree: int) -> AttentionKind:
    num_kv_heads = len(kv_heads_of(kind.num_heads, kind.num_kv_heads, degree, 0))
    return replace(kind, num_heads=kind.num_heads // degree, num_kv_heads=num_kv_heads)
