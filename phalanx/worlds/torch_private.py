"""Private interfaces of torch.distributed 2.13 that worlds need, and nothing else.

Everything here may change with a torch release; the rest of `worlds` uses public names only.
- process groups made by hand: `ProcessGroup._register_backend`, `_set_default_backend`, and ended
  alone: `Backend.abort`;
- plug-in backends that return a whole ProcessGroup: `Backend.register_backend`;
- batched point-to-point on groups that are subclasses: `distributed_c10d._coalescing_manager`;
- what DTensor remembers of meshes: `debug._clear_sharding_prop_cache`, `_gen_transform_infos`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from phalanx.errors import WorldError

KINDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")


class DeviceBackend(NamedTuple):
    """What carries the messages of one device type."""

    devices: tuple[str, ...]
    type: Any
    backend: Any


def forget_meshes() -> None:
    """Empty DTensor's caches, whose results hold meshes.

    Meshes of equal shape are equal to torch, so after a default group has ended and another has
    begun, a cached result would bring the ended groups back ("Could not resolve the process
    group").
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute, debug

        debug._clear_sharding_prop_cache()
        _redistribute._gen_transform_infos.cache_clear()


def require_kind(kind: str) -> None:
    """Raise `world/unbound` unless `kind` is one of `KINDS`."""
    if kind not in KINDS:
        rule = "no such communication backend"
        raise WorldError("world/unbound", "backend", repr(kind), rule, legal=KINDS)


def make_backends(
    kind: str, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> list[DeviceBackend]:
    """The backends of a group; all members call it (gloo connects them here).

    Args:
        kind: one of `KINDS`. "gloo" carries CPU and CUDA tensors, "nccl" only CUDA tensors.
        store: private to the group (a PrefixStore).
    """
    require_kind(kind)
    made = []
    if kind != "nccl":
        gloo = distributed_c10d.ProcessGroupGloo(
            dist.PrefixStore("gloo/", store), rank, size, timeout=timeout
        )
        gloo._set_sequence_number_for_group()
        devices = ("cpu", "cuda") if kind == "gloo" else ("cpu",)
        made.append(DeviceBackend(devices, ProcessGroup.BackendType.GLOO, gloo))
    if kind != "gloo":
        options = distributed_c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = distributed_c10d.ProcessGroupNCCL(
            dist.PrefixStore("nccl/", store), rank, size, options
        )
        nccl._set_sequence_number_for_group()
        made.append(DeviceBackend(("cuda",), ProcessGroup.BackendType.NCCL, nccl))
    return made


def attach_backends(group: ProcessGroup, backends: Sequence[DeviceBackend]) -> None:
    """Let `group` answer `_get_backend(device)`; the last one is its default."""
    group._set_default_backend(backends[-1].type)
    for each in backends:
        for device in each.devices:
            group._register_backend(torch.device(device), each.type, each.backend)


def plain_group(
    store: dist.Store, rank: int, size: int, backends: Sequence[DeviceBackend]
) -> ProcessGroup:
    """A C++ process group over these backends that no global table knows."""
    group = ProcessGroup(store, rank, size)
    attach_backends(group, backends)
    return group


def abort_nccl(group: ProcessGroup) -> None:
    """End what runs in a group on NCCL, its kernels included; other ranks are not asked."""
    group._get_backend(torch.device("cuda")).abort()


def register_group_backend(
    name: str, kind: str, create: Callable[[str, Any], ProcessGroup]
) -> None:
    """Make `name` a backend of `init_process_group` and `new_group`; twice is harmless.

    Args:
        create: gets `kind` and torch's options: store, group_rank, group_size, timeout,
            global_ranks_in_group ([] for the default group).
    """
    if name.upper() in dist.Backend._plugins:
        return
    devices = ["cuda"] if kind == "nccl" else ["cpu", "cuda"]

    def plug_in(options: Any, _backend_options: Any = None) -> ProcessGroup:
        return create(kind, options)

    dist.Backend.register_backend(name, plug_in, extended_api=True, devices=devices)


def batch_p2p_of(group_class: type[ProcessGroup]) -> None:
    """Keep `batch_isend_irecv` one batch on groups of `group_class`.

    torch 2.13 coalesces only where `type(group) is ProcessGroup`; a subclass over NCCL would issue
    the operations one by one, which deadlocks when two ranks both send first.
    """
    original = distributed_c10d.batch_isend_irecv
    if getattr(original, "batches_logged_groups", False):
        return

    @wraps(original)
    def batch_isend_irecv(operations: list[dist.P2POp]) -> list[dist.Work]:
        group = operations[0].group if operations else None
        group = group or dist.group.WORLD
        device = operations[0].tensor.device if operations else None
        if not isinstance(group, group_class) or not coalesces(group, device):
            return original(operations)
        distributed_c10d._check_p2p_op_list(operations)
        with distributed_c10d._coalescing_manager(group, device, async_ops=True) as batch:
            for each in operations:
                key = "group_dst" if each.op is dist.isend else "group_src"
                each.op(each.tensor, group=group, tag=each.tag, **{key: each.group_peer})
        return batch.works

    batch_isend_irecv.batches_logged_groups = True
    distributed_c10d.batch_isend_irecv = batch_isend_irecv
    dist.batch_isend_irecv = batch_isend_irecv


def coalesces(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the group can issue several operations as one (NCCL can, gloo needs not to)."""
    return group._get_backend(device).supports_coalescing
