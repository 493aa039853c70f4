"""Model families: one file each, from `config.json` to a DecoderConfig and back. No torch.

A family is a module here (or one that the entry-point group `phalanx.families` names) with a
`FAMILY` record; nothing else lists it, and no other code knows families by name. Its tensors keep
Hugging Face's names, so everything that goes by name (sharding, adapters, checkpoints) works for it
at once. A new family needs this file and a test of its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Any

from phalanx.models.architecture import DecoderConfig

# Where files keep the text model: as canonical names have it, then the multimodal forms.
_PREFIXES = (("", ""), ("model.", "model.language_model."), ("", "language_model."))


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
        gguf_architecture: name in GGUF files; "": never met there.
    """

    model_type: str
    architecture: str
    read: Callable[[Mapping[str, Any], str], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    wrapper_types: tuple[str, ...] = ()
    wrapper_keys: frozenset[str] = field(default_factory=frozenset)
    gguf_architecture: str = ""


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


def checkpoint_name(canonical: str, names_present: Collection[str]) -> str:
    """The name under which a checkpoint stores a canonical tensor.

    Multimodal repositories keep the text model under `model.language_model.` or
    `language_model.model.`. A name that is nowhere is given back as it is.
    """
    for ours, theirs in _PREFIXES:
        if canonical.startswith(ours):
            stored = theirs + canonical[len(ours) :]
            if stored in names_present:
                return stored
    return canonical
