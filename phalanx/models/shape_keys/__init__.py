"""The shape of a model from its `config.json`, for more families than the decoder computes.

Prices need sizes only, so keys that change no size are not looked at: a model that cannot be run
here can still be priced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from phalanx.cost.model_shape import ModelShape, shape_of
from phalanx.errors import JobError, nearest_names, shown
from phalanx.models.config import parse_config
from phalanx.models.shape_keys.dense import DENSE
from phalanx.models.shape_keys.hybrid import HYBRID
from phalanx.models.shape_keys.latent import LATENT
from phalanx.models.shape_keys.mixtures import MIXTURES
from phalanx.models.shape_keys.plain import PLAIN
from phalanx.models.shape_keys.reader import ShapeKeys

_DECODER_ONLY = ("gemma3_text", "gemma3", "gemma4_text", "gemma4")
_TEXT_KEYS = ("text_config", "thinker_config", "language_config", "llm_config")
FAMILIES: dict[str, Callable[[ShapeKeys], ModelShape]] = {
    **PLAIN, **DENSE, **MIXTURES, **LATENT, **HYBRID,
}  # fmt: skip


def shape_of_keys(
    table: Mapping[str, Any], where: str = "config.json", name: str = ""
) -> ModelShape:
    """The shape that a Hugging Face config describes; of a multimodal one, its text model.

    Args:
        name: of the model; "": its `model_type`.

    Raises:
        JobError: `model/unknown` for a family that is not known, with the keys that one of a known
            kind would need; `job/missing` naming all keys that are absent; `job/bad-value`.
    """
    kind = table.get("model_type")
    if kind in _DECODER_ONLY:
        return shape_of(parse_config(table, where), name or str(kind))
    for key in _TEXT_KEYS:
        if isinstance(inner := table.get(key), Mapping):
            outer = {"tie_word_embeddings": table.get("tie_word_embeddings", False)}
            merged = outer | {"model_type": kind} | dict(inner)
            return shape_of_keys(merged, f"{where}: {key}", name)
    if not isinstance(kind, str) or kind not in FAMILIES:
        rule = (
            f"model family {shown(kind)} is not known; a dense decoder is priced as model_type "
            "llama with vocab_size, hidden_size, intermediate_size, num_hidden_layers, "
            "num_attention_heads and num_key_value_heads, a mixture of experts as qwen3_moe with "
            "num_experts, num_experts_per_tok and moe_intermediate_size beside them"
        )
        near = nearest_names(str(kind), [*FAMILIES, *_DECODER_ONLY]) or ["llama", "qwen3_moe"]
        raise JobError("model/unknown", f"{where}: model_type", shown(kind), rule, legal=near)
    return FAMILIES[kind](ShapeKeys(table, where, name or kind))
