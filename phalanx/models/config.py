"""Reading and writing a Hugging Face `config.json`, strictly. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import JobError, nearest_names, shown
from phalanx.models.architecture import DTYPE_BYTES, AttentionKind, DecoderConfig
from phalanx.models.config_keys import TABLE, WITHOUT_EFFECT
from phalanx.models.families import Family, families, wrappers
from phalanx.models.families.gemma3 import small_config
from phalanx.strict import read_value

__all__ = [
    "DTYPE_BYTES",
    "AttentionKind",
    "DecoderConfig",
    "parse_config",
    "read_config",
    "small_config",
    "to_huggingface",
]

# What a multimodal config may say of its text model beside `text_config`.
_HOISTED = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")


def read_config(folder: str | Path) -> DecoderConfig:
    """The config of a model folder.

    Raises:
        JobError: `job/not-found` without a readable config.json; otherwise as `parse_config`.
    """
    path = Path(folder) / "config.json"
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        rule = "is no model folder: it has no config.json that can be read"
        near = _folders_in(Path(folder))
        raise JobError("job/not-found", "model folder", folder, rule, legal=near) from error
    try:
        table = json.loads(content.decode())
    except RecursionError:
        raise JobError("job/syntax", str(path), None, "is nested too deeply") from None
    except ValueError as error:
        raise JobError("job/syntax", str(path), None, f"is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise JobError("job/syntax", str(path), shown(table), "must be a JSON object")
    return parse_config(table, str(path))


def _folders_in(folder: Path) -> list[str]:
    """Model folders right below a folder, if that is one."""
    try:
        return sorted(str(found.parent) for found in folder.glob("*/config.json"))[:3]
    except (OSError, ValueError):
        return []


def parse_config(table: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
    """A DecoderConfig from the keys of a Hugging Face config; one it cannot honour is an error.

    A multimodal config is read through its `text_config`; its other towers are left aside.

    Raises:
        JobError: `model/unknown` for another family, an unknown key or an option that the decoder
            does not compute; `job/missing` for an absent size; `job/bad-value` for a value of
            another type or out of range.
    """
    name = table.get("model_type")
    if isinstance(name, str) and (family := wrappers().get(name)):
        return family.read(_text_config(table, where, family), f"{where}: text_config")
    if isinstance(name, str) and (family := families().get(name)):
        return family.read(table, where)
    rule, legal = f"model family {shown(name)} is not supported", sorted({*families(), *wrappers()})
    raise JobError("model/unknown", f"{where}: model_type", shown(name), rule, legal=legal)


def _text_config(table: Mapping[str, Any], where: str, family: Family) -> Mapping[str, Any]:
    known = {*family.wrapper_keys, *WITHOUT_EFFECT, *_HOISTED, "text_config", "tie_word_embeddings"}
    for key, value in table.items():
        if key not in known:
            rule = "is a key that the decoder does not know, so it cannot honour it"
            legal = nearest_names(key, known)
            raise JobError("model/unknown", f"{where}: {key}", shown(value), rule, legal=legal)
    text = read_value(table.get("text_config"), TABLE, f"{where}: text_config")
    if text is None:
        rule = "must hold the sizes of the text model"
        raise JobError("job/missing", f"{where}: text_config", None, rule)
    if (kind := text.get("model_type", family.model_type)) != family.model_type:
        where, legal = f"{where}: text_config.model_type", [family.model_type]
        rule = "is not the text model of this family"
        raise JobError("model/unknown", where, shown(kind), rule, legal=legal)
    # transformers fills unset inner keys with defaults when it saves, so the outer ones count
    outer = {key: table[key] for key in _HOISTED if table.get(key) is not None}
    ties = [each.get("tie_word_embeddings") for each in (table, text)]
    tied = {} if ties == [None, None] else {"tie_word_embeddings": False not in ties}
    return {**family.wrapper_defaults, **text, **outer, **tied}


def to_huggingface(config: DecoderConfig) -> dict[str, Any]:
    """The `config.json` that transformers reads for this model."""
    family = families()[config.family]
    eos = list(config.eos_tokens)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        **family.write(config),
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "initializer_range": config.init_std,
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": config.dtype,
        "bos_token_id": config.bos_token,
        "eos_token_id": eos if len(eos) > 1 else next(iter(eos), None),
        "pad_token_id": config.pad_token,
    }
