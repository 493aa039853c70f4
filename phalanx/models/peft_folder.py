"""Adapters written as PEFT loads them, and read back as tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from phalanx.models.adapter_folder import (
    CONFIG_FILE,
    PEFT_PREFIX,
    WEIGHTS_FILE,
    peft_config,
    read_adapter,
)
from phalanx.models.folders import atomic_folder
from phalanx.models.spec import DecoderConfig, LoraSpec, lora_tensors
from phalanx.models.stored import STORED_DTYPES, StoredTensor
from phalanx.models.stored_read import TensorReader
from phalanx.models.stored_write import ShardWriter
from phalanx.models.weight_names import stored_name


class StoredAdapters(Mapping[str, Tensor]):
    """Adapter tensors by our names, each read when it is asked for."""

    def __init__(self, weights: Mapping[str, StoredTensor]) -> None:
        self._weights = weights

    def __getitem__(self, name: str) -> Tensor:
        with TensorReader() as reader:
            return reader.whole(self._weights[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def save_adapter(
    target: str | Path,
    config: DecoderConfig,
    lora: LoraSpec,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: str = "float32",
    prefix: str = "model.",
    base_model: str = "",
    overwrite: bool = False,
) -> Path:
    """Write an adapter folder that PEFT loads; it appears whole or not at all.

    Args:
        config: of the base.
        tensors: (`<canonical module>.lora_A.weight`, whole tensor) in any order, one in memory.
        dtype: to write.
        prefix: what the base repository calls "model." (`weight_names.stored_prefix`).
        base_model: its Hub name or folder.

    Raises:
        JobError: as `stored_write.ShardWriter`.
    """
    specs = lora_tensors(config, lora, dtype)
    names = {name: PEFT_PREFIX + stored_name(name, prefix) for name in specs}
    planned = [(names[s.name], STORED_DTYPES[s.dtype], s.shape) for s in specs.values()]
    modules = {name.rpartition(".lora_")[0] for name in specs}
    with atomic_folder(target, overwrite=overwrite) as folder:
        writer = ShardWriter(folder, planned, single=WEIGHTS_FILE)
        for name, tensor in tensors:
            writer.put(names.get(name, name), tensor)
        writer.close()
        table = peft_config(lora, config, modules, prefix, base_model)
        (folder / CONFIG_FILE).write_text(json.dumps(table, indent=2) + "\n")
    return Path(target)


def load_adapter(folder: str | Path) -> tuple[LoraSpec, dict[str, Tensor]]:
    """Settings and whole tensors of a PEFT LoRA folder, by our names.

    Raises:
        JobError: as `adapter_folder.read_adapter`.
    """
    adapter = read_adapter(folder)
    return adapter.lora, dict(StoredAdapters(adapter.weights))
