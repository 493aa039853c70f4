"""The one place where communication is counted: a ProcessGroup under DTensor, FSDP2, pipelining.

`init_logged("gloo", ...)` makes the default group, and every group created after it, a
`LoggedGroup`; `device_mesh(...)` names them by mesh axis. Eager code, code compiled by
`torch.compile` (through functional collectives), FSDP2 and `batch_isend_irecv` all end in the
methods of their process group, so each operation is seen exactly once, whatever issued it:

    log = CommLog(rank)
    with log.step(3):
        train_step(...)
    trace = log.trace("my job")  # rows: axis, kind, payload bytes, wire bytes, start, duration

Conventions of bytes and times: `comm_log`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup, Work
from torch.distributed.constants import default_pg_timeout

from phalanx.mesh import Mesh
from phalanx.worlds import comm_log, torch_private
from phalanx.worlds.comm_log import P2P, CommRow
from phalanx.worlds.torch_clock import clock_of

_CPU = torch.device("cpu")

# method of ProcessGroup -> kind, argument that holds the payload, whether times the group's size
_OPERATIONS: dict[str, tuple[str, int | None, bool]] = {
    "allreduce": ("all_reduce", 0, False),
    "allreduce_coalesced": ("all_reduce", 0, False),
    "allgather": ("all_gather", 0, False),
    "allgather_coalesced": ("all_gather", 0, False),
    "all_gather_single": ("all_gather", 0, False),
    "all_gather_single_coalesced": ("all_gather", 0, False),
    "_allgather_base": ("all_gather", 0, False),
    "allgather_into_tensor_coalesced": ("all_gather", 0, False),
    "reduce_scatter": ("reduce_scatter", 1, False),
    "reduce_scatter_single": ("reduce_scatter", 1, False),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1, False),
    "_reduce_scatter_base": ("reduce_scatter", 1, False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1, False),
    "all_to_all_single": ("all_to_all", 1, False),
    "alltoall_base": ("all_to_all", 1, False),
    "alltoall": ("all_to_all", 1, False),
    "broadcast": ("broadcast", 0, False),
    "barrier": ("barrier", None, False),
    "reduce": ("reduce", 0, False),
    "gather": ("gather", 1, True),
    "scatter": ("scatter", 0, True),
    "send": ("send", 0, False),
    "recv": ("recv", 0, False),
    "recv_anysource": ("recv", 0, False),
}


class _LoggedWork(Work):
    """A Work that notes when the caller has waited; all else is the wrapped one's."""

    def __init__(self, inner: Work, rows: Sequence[CommRow]) -> None:
        super().__init__()
        self._inner, self._rows = inner, rows

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for row in self._rows:
            row.begin_wait()
        answer = self._inner.wait(timeout) if timeout else self._inner.wait()
        for row in self._rows:
            row.set_end(waited=True)
        return answer


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: _LoggedWork, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, name)(*args, **kwargs)

    return method


for _name in (
    *("is_completed", "is_success", "exception", "result", "source_rank", "_source_rank"),
    *("synchronize", "block_current_stream", "get_future", "get_future_result", "_get_duration"),
):
    setattr(_LoggedWork, _name, _delegate(_name))


class LoggedGroup(ProcessGroup):
    """A process group that writes down what passes through it.

    The work is done by a plain C++ group over the same backends, which this one answers for in
    `_get_backend`, so FSDP2's allocators, DTensor and Inductor find what they look for.

    Args:
        kind: backend, one of `torch_private.KINDS`.
        store: private to this group.
        ranks: global ranks of the members in group order.
        timeout: of one operation, and for connecting.
        axis: name in the log; "" takes torch's group description ("mesh_tp" is axis "tp").
    """

    def __init__(
        self,
        kind: str,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        timeout: timedelta,
        axis: str = "",
    ) -> None:
        super().__init__(rank, len(ranks))
        backends = torch_private.make_backends(kind, store, rank, len(ranks), timeout)
        torch_private.attach_backends(self, backends)
        self._inner = torch_private.plain_group(store, rank, len(ranks), backends)
        self.kind, self.timeout = kind, timeout
        self._ranks, self._axis = tuple(ranks), axis
        self._counts: Counter[str] = Counter()
        self._batch: list[CommRow] | None = None

    @property
    def axis(self) -> str:
        """Name in the log."""
        if not self._axis:
            self._axis = self.group_desc.removeprefix("mesh_")
        return self._axis

    def get_group_store(self) -> dist.Store:
        return self._inner.get_group_store()

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []
        self._inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Work:
        rows, self._batch = self._batch, None
        return _LoggedWork(self._inner._end_coalescing(device), rows)

    def _run(self, method: str, kind: str, payload_bytes: int, args: tuple, kwargs: dict) -> Any:
        at = args[1] if kind in P2P and method != "recv_anysource" else -1
        name = self._name(kind, at)
        peer = self._ranks[at] if at >= 0 else -1
        clock = clock_of(_device_of(args[0]) if args else _CPU)
        row = CommRow(self.axis, kind, name, peer, payload_bytes, len(self._ranks), clock)
        comm_log.issued(row)
        work = getattr(self._inner, method)(*args, **kwargs)
        row.set_end(waited=False)
        if self._batch is not None:
            self._batch.append(row)
            return work
        return None if work is None else _LoggedWork(work, (row,))

    def _name(self, kind: str, at: int) -> str:
        name = self.axis
        if kind in P2P:
            me, other = self.rank(), "any" if at < 0 else at
            name += f":{me}>{other}" if kind == "send" else f":{other}>{me}"
        count = self._counts[name]
        self._counts[name] += 1
        return f"{name}#{count}"


def _device_of(tensors: Any) -> torch.device:
    while isinstance(tensors, list | tuple) and tensors:
        tensors = tensors[0]
    return tensors.device if isinstance(tensors, torch.Tensor) else _CPU


def _num_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_num_bytes, value))


def _logged(method: str) -> Callable[..., Any]:
    kind, at, is_per_rank = _OPERATIONS[method]

    def run(self: LoggedGroup, *args: Any, **kwargs: Any) -> Any:
        payload_bytes = 0 if at is None else _num_bytes(args[at])
        if is_per_rank:
            payload_bytes *= self.size()
        return self._run(method, kind, payload_bytes, args, kwargs)

    run.__name__ = method
    return run


for _name in _OPERATIONS:
    setattr(LoggedGroup, _name, _logged(_name))


def backend_name(kind: str) -> str:
    """Name of the logged form of a backend, for `init_process_group` and `new_group`.

    Raises:
        WorldError: `world/unbound` for an unknown kind.
    """
    torch_private.require_kind(kind)
    name = "logged_" + kind.replace("cpu:", "").replace(",cuda:", "_")
    torch_private.register_group_backend(name, kind, _create)
    torch_private.batch_p2p_of(LoggedGroup)
    return name


def _create(kind: str, options: Any) -> LoggedGroup:
    ranks = options.global_ranks_in_group or range(options.group_size)
    timeout = _timeout_or_worlds(options.timeout)
    return LoggedGroup(kind, options.store, options.group_rank, ranks, timeout)


def _timeout_or_worlds(given: timedelta) -> timedelta:
    """torch gives a group that names no timeout half an hour, not what the default group has."""
    world = dist.group.WORLD
    is_named = given != default_pg_timeout or not isinstance(world, LoggedGroup)
    return given if is_named else world.timeout


def init_logged(
    kind: str, store: dist.Store, rank: int, world_size: int, timeout_s: float = 300.0
) -> None:
    """`init_process_group` with a logged default group, which all later groups inherit.

    Args:
        kind: "gloo", "nccl" or "cpu:gloo,cuda:nccl"; no device id is bound, because torch would
            then split groups in C++, past the log.
        timeout_s: of one operation, in later groups too unless they name another one.
    """
    dist.init_process_group(
        backend_name(kind),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def device_mesh(device_type: str, mesh: Mesh) -> DeviceMesh:
    """A DeviceMesh with one group per axis, each under its axis' name in the log.

    torch's `init_device_mesh` takes the default group for an axis that spans the world, which hides
    the axis. All ranks call this; `init_logged` (or another default group) comes first.

    Raises:
        JobError: `mesh/product` unless the mesh has as many ranks as the default group.
    """
    mesh.require_devices(dist.get_world_size())
    torch_private.forget_meshes()
    me, mine = dist.get_rank(), []
    for axis in mesh.names:
        for ranks in mesh.groups(axis):
            group = dist.new_group(list(ranks), group_desc=f"mesh_{axis}")
            if me in ranks:
                mine.append(group)
    grid = torch.arange(mesh.size).view(mesh.sizes)
    return DeviceMesh.from_group(mine, device_type, grid, mesh_dim_names=mesh.names)
