"""Which matrices PEFT adapts, as its programs write it: names, "all-linear", a regular expression.

PEFT takes a list as names of modules, and one text as an expression that the whole name of a module
must match; parameters that are no modules (experts that are stacked) have a list of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.planner.importers.foreign import NOT_MODELLED
from phalanx.planner.importers.reading import Reading

_MODULES, _PARAMETERS = "lora_target_modules", "lora_target_parameters"
_PREFIXES = ("model", "model.language_model", "language_model.model", "model.text_model")
_MOST_LAYERS = 128
_PLAIN = re.compile(r"[\w., -]+")
_ATTENTION = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
)
_BLOCK = ("gate_proj", "up_proj", "down_proj")
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def read_targets(reading: Reading) -> bool:
    """Set `lora_targets` where the file says them: names, or patterns of `train.lora_targets`.

    Raises:
        JobError: `foreign/value` for an expression that is none, or that names no matrix.
    """
    entry = reading.document.entries.get(_MODULES)
    value = entry.value if entry is not None else None
    if isinstance(value, list) and len(value) == 1:
        (value,) = value  # TRL unpacks it
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        found = _of_expression(reading, value)
        reading.set("lora_targets", found, reading.where(_MODULES))
    else:
        reading.names(_MODULES, "lora_targets")
    stacked = tuple(_of_parameters(reading))
    if stacked and reading.get("lora_targets") != ("all-linear",):
        found = (*(reading.get("lora_targets") or ()), *stacked)
        reading.set("lora_targets", found, reading.where(_PARAMETERS))
    return bool(reading.get("lora_targets"))


def _of_expression(reading: Reading, text: str) -> tuple[str, ...]:
    if text.startswith("$"):
        return tuple(reading.names(_MODULES) or ())
    try:
        expression = re.compile(text)
    except re.error as error:
        raise reading.error(_MODULES, f"is no regular expression: {error}") from None
    found = {
        target: count
        for target, module in _modules()
        if (count := max(_matches(expression, prefix, module) for prefix in _PREFIXES))
    }
    if not found:
        raise reading.error(_MODULES, "matches no matrix of a decoder's layers", list(_ATTENTION))
    if min(found.values()) < _MOST_LAYERS:
        text = "names some layers; priced with adapters on all that have such a matrix"
        reading.note(_MODULES, NOT_MODELLED, text)
    reading.use(_MODULES)
    return tuple(found)


def _modules() -> Iterator[tuple[str, str]]:
    """(target, name in a layer) of all matrices that are known."""
    yield from ((name, f"self_attn.{name}") for name in _ATTENTION)
    yield from ((f"*.mlp.{name}", f"mlp.{name}") for name in _BLOCK)
    for owner, module in (("shared_experts", "shared_experts"), ("experts", "experts.0")):
        yield from ((f"*.{owner}.{name}", f"mlp.{module}.{name}") for name in _BLOCK)


def _matches(expression: re.Pattern[str], prefix: str, module: str) -> int:
    """Layers whose module the expression matches whole."""
    names = (f"{prefix}.layers.{at}.{module}" for at in range(_MOST_LAYERS))
    return sum(expression.fullmatch(name) is not None for name in names)


def _of_parameters(reading: Reading) -> Iterator[str]:
    for name in reading.names(_PARAMETERS) or ():
        owner, _, last = name.rpartition(".")
        if owner.rpartition(".")[2] == "experts" and last in _STACKED:
            yield from (f"*.experts.{each}" for each in _STACKED[last])
        else:
            text = f"an adapter of {name} is not priced"
            reading.note(_PARAMETERS, NOT_MODELLED, text)
