"""Model families: one file each, from `config.json` to a DecoderConfig and back. No torch.

A family is a module here (or one that the entry-point group `phalanx.families` names) with a
`FAMILY` record; nothing else lists it, and no other code knows families by name. Its tensors keep
Hugging Face's names, so everything that goes by name (sharding, adapters, checkpoints) works for it
at once. A new family needs this file and a test of its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Any

from phalanx.models.architecture import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family.

    Args:
        model_type: Hugging Face's name of the text model's config.
        architecture: Hugging Face's class of the text model.
        read: (table, name of the file in errors) -> DecoderConfig, strictly.
        write: the sizes and options of a `config.json`; `models.config` adds what all have.
        wrapper_types: `model_type`s of multimodal configs that hold this one as `text_config`.
        wrapper_keys: their keys that concern other towers only.
        wrapper_defaults: sizes that a published `text_config` leaves out, as transformers has them.
    """

    model_type: str
    architecture: str
    read: Callable[[Mapping[str, Any], str], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    wrapper_types: tuple[str, ...] = ()
    wrapper_keys: frozenset[str] = frozenset()
    wrapper_defaults: Mapping[str, Any] = field(default_factory=dict)


@cache
def families() -> dict[str, Family]:
    """All families by `model_type`."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    found = [module.FAMILY for module in modules]
    found += [point.load() for point in entry_points(group="phalanx.families")]
    return {family.model_type: family for family in found}


def wrappers() -> dict[str, Family]:
    """Families by the `model_type` of multimodal configs around them."""
    return {name: family for family in families().values() for name in family.wrapper_types}
