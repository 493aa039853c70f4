"""LoRA adapters served live: several of them, and the base, share each batch.

An adapter sits in a slot as low-rank products of the packed matrices: what its modules (q, k, v or
gate, up) add to one packed matrix is one pair of factors, so that a matrix costs two small products
per adapter in the batch. Rows of a step stand grouped by slot; the base's rows cost nothing.

Legend: S rows of a step, N rows of one adapter in it, I inputs and O outputs of a packed matrix,
P ranks of an adapter's parts of that matrix together, R rank, L layers.

Source: unmerged adapters with a batched base product, Punica, arXiv 2310.18547, section 3; S-LoRA,
arXiv 2311.03285, section 4. Different: no gathered kernels; rows are ordered so that each adapter's
are a slice. An adapter takes memory for its own rank while it is loaded, not for the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.engines.serve.adapter_fit import read_fitting, require_fit
from phalanx.errors import JobError, PhalanxError, nearest_names
from phalanx.models.peft_folder import StoredAdapters
from phalanx.models.spec import DecoderConfig, LoraSpec, layer_tensors
from phalanx.ops.packed_linear import packed_linear

# last part of a module's name -> the packed matrix that its outputs are columns of, in this order
MATRIX_OF = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "o_proj": "out",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "down_proj": "down",
    "per_layer_input_gate": "per_layer.gate",
    "per_layer_projection": "per_layer.projection",
}
BASE = -1  # the slot of rows without an adapter


class LowRank(NamedTuple):
    """What an adapter adds to a packed matrix: (x down^T) up^T; alpha / rank is in `up`."""

    down_PI: Tensor
    up_OP: Tensor


_Tensors = Mapping[str, Tensor]
Products = Mapping[tuple[int, str], LowRank]  # (layer, packed matrix) -> product


class AdapterBatch:
    """The adapters of one step.

    Args:
        groups: (products, first row, row behind the last) of each slice of rows with an adapter.
    """

    def __init__(self, groups: Sequence[tuple[Products, int, int]]) -> None:
        self._groups = groups

    def add_(self, out_SO: Tensor, x_SI: Tensor, layer: int, matrix: str) -> None:
        """Add to the outputs of a packed matrix, in place, what the rows' adapters make of `x`."""
        for products, start, end in self._groups:
            product = products.get((layer, matrix))
            if product is not None:
                low_NP = packed_linear(x_SI[start:end], product.down_PI)
                out_SO[start:end].add_(packed_linear(low_NP, product.up_OP))


@dataclass(slots=True, eq=False)
class _Slot:
    """One adapter: its weights, how many requests use it, and whether it goes when they end."""

    name: str
    version: int
    products: Products
    num_users: int = 0
    is_leaving: bool = False


@dataclass(frozen=True)
class _Column:
    """Where a module's outputs stand in its packed matrix."""

    layer: int
    matrix: str
    start: int
    end: int
    width: int  # of the whole matrix


class AdapterSlots:
    """The adapters that an engine holds.

    Args:
        config: of the base.
        max_adapters: slots.
        max_rank: largest rank of an adapter.
        dtype: of the base's matrices; factors are cast to it once, scaled in float32 before that.
        device: where.
    """

    def __init__(
        self,
        config: DecoderConfig,
        max_adapters: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self._config, self._max_rank = config, max_rank
        self._dtype, self._device = dtype, device
        self._columns = _columns(config)
        self._slots: list[_Slot | None] = [None] * max_adapters
        self._next_version: dict[str, int] = {}

    # ---- adapters ------------------------------------------------------------------------------

    @property
    def versions(self) -> dict[str, str]:
        """Name -> "name@version" of every adapter that new requests may ask for."""
        return {each.name: f"{each.name}@{each.version}" for each in self._live()}

    def load(self, name: str, folder: str | Path, *, version: int | None = None) -> None:
        """Take an adapter from a PEFT LoRA folder into a free slot.

        Args:
            version: what to count its versions from; None: on from the last of this name, or 0.

        Raises:
            JobError: `serve/adapter` for a name that is loaded already, no free slot, or a folder
                that does not fit: unreadable, another kind, too large a rank, other shapes.
        """
        self._require_room(name)
        self.put(name, *_read(self._config, folder, self._max_rank), version=version)

    def put(
        self,
        name: str,
        lora: LoraSpec,
        tensors: _Tensors,
        *,
        version: int | None = None,
    ) -> None:
        """Take whole adapter tensors by our names (`<module>.lora_A.weight`), as `load`.

        An adapter that is loaded gets the new weights; its requests go on with them, and with the
        cache that they have. `lora.targets` are not read: the tensors say what is adapted.
        """
        slot = self._find(name)
        if slot is None:
            self._require_room(name)
        products = self._products(lora, tensors)
        number = self._next_version.get(name, 0) if version is None else version
        self._next_version[name] = number + 1
        if slot is None:
            at = self._slots.index(None)
            self._slots[at] = _Slot(name, number, products)
        else:
            slot.products, slot.version = products, number

    def update(self, name: str, folder: str | Path, *, version: int | None = None) -> None:
        """Give a loaded adapter the weights of another folder, as `put`."""
        self._require_loaded(name)
        self.put(name, *_read(self._config, folder, self._max_rank), version=version)

    def unload(self, name: str) -> None:
        """Refuse new requests at once; the slot is free when the last that uses it has ended.

        Raises:
            JobError: `serve/adapter` for one that is not loaded.
        """
        slot = self._require_loaded(name)
        slot.is_leaving = True
        self._free_unused()

    # ---- requests ------------------------------------------------------------------------------

    def acquire(self, name: str) -> int:
        """The slot for a new request; `BASE` for "".

        Raises:
            JobError: `serve/adapter` for one that is not loaded.
        """
        if not name:
            return BASE
        slot = self._require_loaded(name)
        slot.num_users += 1
        return self._slots.index(slot)

    def release(self, slot: int) -> None:
        """A request that had acquired the slot has ended."""
        if slot != BASE:
            self._held(slot).num_users -= 1
            self._free_unused()

    def suffix(self, slot: int) -> str:
        """What a slot adds to the weights' version: "+name@version", "" for the base."""
        if slot == BASE:
            return ""
        held = self._held(slot)
        return f"+{held.name}@{held.version}"

    def batch(self, slot_of_row: Sequence[int], counts: Sequence[int]) -> AdapterBatch | None:
        """The adapters of a step; None when no row has one.

        Args:
            slot_of_row: slot of each request's rows, `BASE` for none; neighbours of one slot share
                their products, so rows should stand grouped.
            counts: rows (tokens) of each request.
        """
        groups: list[tuple[Products, int, int]] = []
        row, last = 0, BASE
        for slot, count in zip(slot_of_row, counts):
            if slot != BASE and slot == last:
                groups[-1] = (*groups[-1][:2], row + count)
            elif slot != BASE:
                groups.append((self._held(slot).products, row, row + count))
            row, last = row + count, slot
        return AdapterBatch(groups) if groups else None

    # ---- inside --------------------------------------------------------------------------------

    def _live(self) -> Iterable[_Slot]:
        return (each for each in self._slots if each is not None and not each.is_leaving)

    def _find(self, name: str) -> _Slot | None:
        return next((each for each in self._live() if each.name == name), None)

    def _held(self, slot: int) -> _Slot:
        held = self._slots[slot]
        assert held is not None, f"slot {slot} is free"
        return held

    def _free_unused(self) -> None:
        for at, each in enumerate(self._slots):
            if each is not None and each.is_leaving and not each.num_users:
                self._slots[at] = None

    def _require_loaded(self, name: str) -> _Slot:
        slot = self._find(name)
        if slot is None:
            legal = nearest_names(name, self.versions)
            raise JobError("serve/adapter", "adapter", repr(name), "is not loaded", legal=legal)
        return slot

    def _require_room(self, name: str) -> None:
        if not name:
            raise JobError("serve/adapter", "adapter", repr(name), "must have a name")
        if self._find(name) is not None:
            rule = "is loaded already: unload it, or update its weights"
            raise JobError("serve/adapter", "adapter", repr(name), rule)
        if None not in self._slots:
            rule = f"all {len(self._slots)} slots are taken (serve.max_adapters): unload one first"
            raise JobError("serve/adapter", "adapter", repr(name), rule, legal=self.versions)

    def _products(self, lora: LoraSpec, tensors: _Tensors) -> Products:
        require_fit(self._config, lora, tensors, self._max_rank)
        parts: dict[tuple[int, str], list[tuple[_Column, str]]] = {}
        for module, column in self._columns.items():
            if f"{module}.lora_A.weight" in tensors:
                parts.setdefault((column.layer, column.matrix), []).append((column, module))
        return {
            place: self._product(lora, of_matrix, tensors) for place, of_matrix in parts.items()
        }

    @torch.no_grad()
    def _product(
        self,
        lora: LoraSpec,
        parts: Sequence[tuple[_Column, str]],
        tensors: _Tensors,
    ) -> LowRank:
        """The factors of all adapted parts of a packed matrix: `up` is diagonal by blocks."""
        wide = torch.promote_types(self._dtype, torch.float32)
        down_PI = torch.cat([tensors[f"{module}.lora_A.weight"].to(wide) for _, module in parts])
        up_OP = torch.zeros(parts[0][0].width, len(down_PI), dtype=wide)
        for at, (column, module) in enumerate(parts):
            ranks = slice(at * lora.rank, (at + 1) * lora.rank)
            b_OR = tensors[f"{module}.lora_B.weight"].to(wide)
            up_OP[column.start : column.end, ranks] = lora.scale * b_OR
        product = LowRank(*(each.to(self._device, self._dtype) for each in (down_PI, up_OP)))
        if not all(each.isfinite().all() for each in product):
            names = ", ".join(module for _, module in parts)
            raise JobError("serve/adapter", names, None, "holds values that are not finite")
        return product


def _columns(config: DecoderConfig) -> dict[str, _Column]:
    """Canonical module -> its columns, in the order of `MATRIX_OF` in each matrix."""
    columns: dict[str, _Column] = {}
    for layer in range(config.num_layers):
        num_outputs = {
            spec.name.removesuffix(".weight").rpartition("."): spec.shape[0]
            for spec in layer_tensors(config, layer)
        }
        of_matrix: dict[str, list[tuple[str, int]]] = {}
        for leaf, matrix in MATRIX_OF.items():
            for (parent, _, last), count in num_outputs.items():
                if last == leaf:
                    of_matrix.setdefault(matrix, []).append((f"{parent}.{leaf}", count))
        for matrix, modules in of_matrix.items():
            width, start = sum(count for _, count in modules), 0
            for module, count in modules:
                columns[module] = _Column(layer, matrix, start, start + count, width)
                start += count
    return columns


def _read(config: DecoderConfig, folder: str | Path, max_rank: int) -> tuple[LoraSpec, _Tensors]:
    adapter = read_fitting(config, folder, max_rank)
    try:
        return adapter.lora, dict(StoredAdapters(adapter.weights))
    except PhalanxError as error:  # the file changed, or its disk fails
        raise JobError("serve/adapter", error.where, error.value, error.rule) from error
