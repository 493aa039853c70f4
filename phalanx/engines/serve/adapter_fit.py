"""Whether an adapter fits the model that is served: names, shapes and rank alone. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from phalanx.errors import JobError, PhalanxError, nearest_names
from phalanx.models.adapter_folder import AdapterFolder, read_adapter
from phalanx.models.spec import DecoderConfig, LoraSpec, lora_tensors, unused_names
from phalanx.models.stored import FLOAT_DTYPES


class Shaped(Protocol):
    """A tensor, or a stored one."""

    @property
    def shape(self) -> Iterable[int]:
        """Its sizes."""
        ...


def read_fitting(config: DecoderConfig, folder: str | Path, max_rank: int) -> AdapterFolder:
    """The settings of a PEFT LoRA folder, and where its tensors lie; headers only are read.

    Raises:
        JobError: `serve/adapter` for a folder that cannot be read, holds an adapter of another
            kind, or does not fit the model.
    """
    try:
        adapter = read_adapter(folder)
        require_fit(config, adapter.lora, adapter.weights, max_rank)
        for name, each in adapter.weights.items():
            if each.dtype not in FLOAT_DTYPES:
                rule = "is a dtype that adapters are not read from"
                raise JobError("serve/adapter", name, each.dtype, rule, legal=FLOAT_DTYPES)
    except PhalanxError as error:
        is_named = str(folder) in f"{error.where} {error.value}"
        where = error.where if is_named else f"{folder}: {error.where}"
        raise JobError(
            "serve/adapter", where, error.value, error.rule, legal=error.legal
        ) from error
    return adapter


def require_fit(
    config: DecoderConfig, lora: LoraSpec, tensors: Mapping[str, Shaped], max_rank: int
) -> None:
    """Check adapter tensors by our names (`<canonical module>.lora_A.weight`).

    Modules that a checkpoint holds and nothing reads may be adapted: no effect, as in training.

    Raises:
        JobError: `serve/adapter` for too large a rank, a tensor that the model has no place for,
            another shape, or one without its partner; it names the tensor.
    """
    if lora.rank > max_rank:
        rule = f"must be at most {max_rank} (serve.max_lora_rank)"
        raise JobError("serve/adapter", "rank", lora.rank, rule, legal=[max_rank])
    specs = lora_tensors(config, LoraSpec(rank=lora.rank, alpha=lora.alpha, targets=("*",)))
    unused = unused_names(config)
    for name, tensor in tensors.items():
        module, _, part = name.removesuffix(".weight").rpartition(".")
        if f"{module}.weight" in unused:
            continue
        if name not in specs:
            rule, near = "adapts no matrix of the model that is served", nearest_names(name, specs)
            raise JobError("serve/adapter", "tensor", name, rule, legal=near)
        if tuple(tensor.shape) != specs[name].shape:
            rule = f"must have the shape {specs[name].shape} to fit the model that is served"
            raise JobError("serve/adapter", name, tuple(tensor.shape), rule)
        partner = f"{module}.{'lora_B' if part == 'lora_A' else 'lora_A'}.weight"
        if partner not in tensors:
            raise JobError("serve/adapter", "tensor", partner, "is missing beside its partner")
