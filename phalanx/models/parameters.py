"""Filling a decoder: from tensors, or freshly drawn from a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from phalanx.errors import JobError, nearest_names
from phalanx.models.spec import TensorSpec


def initial_value(
    seed: int, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, std: float = 0.02
) -> Tensor:
    """The fresh value of a parameter, a function of the seed and its canonical name only.

    Drawn whole on the CPU in float32, so that every layout starts from the same numbers: slice it.
    """
    if std == 0.0:
        return torch.zeros(shape, dtype=dtype)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return (torch.randn(shape, generator=generator) * std).to(dtype)


def initial_values(seed: int, specs: Iterable[TensorSpec]) -> Iterable[tuple[str, Tensor]]:
    """(name, fresh whole tensor) of each spec, one at a time."""
    for spec in specs:
        dtype = getattr(torch, spec.dtype)
        yield spec.name, initial_value(seed, spec.name, spec.shape, dtype, std=spec.init_std)


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
