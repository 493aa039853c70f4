"""Filling a decoder: from stored tensors, from tensors at hand, or freshly drawn from a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from phalanx.errors import JobError, nearest_names
from phalanx.models.spec import TensorSpec
from phalanx.models.stored import StoredTensor, by_file
from phalanx.models.stored_read import Ranges, TensorReader

Part = Sequence[tuple[int, int]]  # (start, stop) of a canonical tensor along each dim


def initial_value(
    seed: int,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    std: float = 0.02,
    mean: float = 0.0,
) -> Tensor:
    """The fresh value of a parameter, a function of the seed and its canonical name only.

    Drawn whole on the CPU in float32, so that every layout starts from the same numbers: slice it.
    """
    if std == 0.0:
        return torch.full(shape, mean, dtype=dtype)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return (torch.randn(shape, generator=generator) * std + mean).to(dtype)


def initial_values(seed: int, specs: Iterable[TensorSpec]) -> Iterable[tuple[str, Tensor]]:
    """(name, fresh whole tensor) of each spec, one at a time."""
    for spec in specs:
        dtype = getattr(torch, spec.dtype)
        std, mean = spec.init_std, spec.init_mean
        yield spec.name, initial_value(seed, spec.name, spec.shape, dtype, std=std, mean=mean)


def load_sharded(
    module: nn.Module,
    stored: Mapping[str, StoredTensor],
    *,
    names: Iterable[str] | None = None,
    parts: Mapping[str, Part] | None = None,
) -> None:
    """Read into a module what this process holds of each stored tensor, and nothing else.

    Beside the parameters themselves it takes one chunk of memory (16 MiB): a process that holds
    1/N of the model reads and keeps 1/N of its rows. Where a dim other than the first is cut, all
    columns of its rows are read and the rest of a chunk is dropped.

    Args:
        module: plain parameters, or DTensors on any mesh, in any float dtype; already allocated.
        stored: canonical name -> stored tensor; may hold more than the module does.
        names: parameters (and buffers) to fill; None: every parameter, and buffers in `stored`.
        parts: canonical name -> what the parameter as a whole covers of the stored tensor, along
            each dim, where that is not all of it (heads that some ranks share).

    Raises:
        JobError: `model/tensor` for a name without a stored tensor, another shape, or a file that
            cannot be read; everything but the last before anything is read.
    """
    held = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    if names is None:
        names = [*held, *(name for name in buffers if name in stored)]
    targets = {name: (held | buffers)[name] for name in names}
    wanted = {name: _stored_for(name, stored) for name in targets}
    ranges = {
        name: _held_ranges(name, target, wanted[name], (parts or {}).get(name))
        for name, target in targets.items()
    }
    with TensorReader() as reader, torch.no_grad():
        for name, source in by_file(wanted):
            target = targets[name]
            local = target.to_local() if hasattr(target, "placements") else target
            reader.read(source, local.detach(), ranges[name])


def _stored_for(name: str, stored: Mapping[str, StoredTensor]) -> StoredTensor:
    if name not in stored:
        rule = "is a parameter of the model without a stored tensor"
        raise JobError("model/tensor", "weights", name, rule, legal=nearest_names(name, stored))
    return stored[name]


def _held_ranges(
    name: str, target: Tensor, source: StoredTensor, part: Part | None
) -> list[Ranges | None]:
    """The indices of the stored tensor that this process holds, along each dim; None: all."""
    offsets = [0] * target.dim() if part is None else [start for start, _ in part]
    shape = source.shape if part is None else tuple(stop - start for start, stop in part)
    if tuple(target.shape) != shape:
        rule = f"must have the shape {tuple(target.shape)}"
        raise JobError("model/tensor", f"{source.path}: {name}", shape, rule)
    ranges: list[Ranges | None] = []
    for dim, offset in enumerate(offsets):
        indices = _held_indices(target, dim)
        if indices is None:
            whole = (offset, offset + shape[dim])
            ranges.append(None if whole == (0, source.shape[dim]) else (whole,))
        else:
            ranges.append(_as_ranges(indices + offset))
    return ranges


def _held_indices(target: Tensor, dim: int) -> Tensor | None:
    """Which indices along a dim this process holds of a DTensor; None: all.

    Cuts the numbers 0, 1, 2, ... as torch cuts the dim, which holds for every placement it has.
    """
    placements = getattr(target, "placements", ())
    if not any(_cuts(placement, dim) for placement in placements):
        return None
    from torch.distributed.tensor import distribute_tensor  # over a second to import

    cuts = [_along_first(placement, dim) for placement in placements]
    indices = torch.arange(target.shape[dim], device=target.device_mesh.device_type)
    return distribute_tensor(indices, target.device_mesh, cuts, src_data_rank=None).to_local().cpu()


def _cuts(placement, dim: int) -> bool:
    return not placement.is_replicate() and placement.dim == dim


def _along_first(placement, dim: int):
    """The placement, if it cuts `dim`, for a tensor that has that dim alone."""
    from torch.distributed.tensor import Replicate, Shard

    if not _cuts(placement, dim):
        return Replicate()
    if not hasattr(placement, "split_factor"):
        return Shard(0)
    return type(placement)(0, split_factor=placement.split_factor)  # of FSDP over a model axis


def _as_ranges(indices: Tensor) -> Ranges:
    """Ascending numbers as ranges of neighbours."""
    if not len(indices):
        return ()
    breaks = (indices.diff() != 1).nonzero().flatten().add(1).tolist()
    ends = pairwise([0, *breaks, len(indices)])
    return tuple((int(indices[start]), int(indices[stop - 1]) + 1) for start, stop in ends)


def load_parameters(
    module: nn.Module, tensors: Iterable[tuple[str, Tensor]], *, strict: bool = True
) -> None:
    """Copy whole canonical tensors into a module, sharded or not; names it lacks are skipped.

    Args:
        module: plain parameters, or DTensors that take their slice without communication.
        strict: demand that every parameter was filled.

    Raises:
        JobError: `model/tensor` for a wrong shape or, if strict, parameters without a tensor.
    """
    missing = dict(module.named_parameters())
    for name, whole in tensors:
        parameter = missing.pop(name, None)
        if parameter is None:
            continue
        if parameter.shape != whole.shape:
            rule = f"must have the shape {tuple(parameter.shape)}"
            raise JobError("model/tensor", name, tuple(whole.shape), rule)
        _fill(parameter, whole)
    if strict and missing:
        rule = f"{len(missing)} parameters of the model got no tensor"
        legal = nearest_names(next(iter(missing)), missing)
        raise JobError("model/tensor", "weights", None, rule, legal=legal)


@torch.no_grad()
def _fill(parameter: Tensor, whole: Tensor) -> None:
    if not hasattr(parameter, "placements"):
        parameter.copy_(whole)
        return
    from torch.distributed.tensor import distribute_tensor  # over a second to import

    local = distribute_tensor(
        whole.to(parameter.device, parameter.dtype),
        parameter.device_mesh,
        parameter.placements,
        src_data_rank=None,
    ).to_local()
    parameter.to_local().copy_(local)
