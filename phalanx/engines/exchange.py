"""Exchanges of an island with its peers: all-reduces of an epoch, and copies of state between two.

Each epoch has a group of its own and each transfer of state has one with two members, so a transfer
never delays an all-reduce. What is received goes to a buffer first and into the island's tensors
only while its epoch lasts: a late message of an epoch that is over changes nothing.
"""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, DistNetworkError, DistStoreError, TCPStore

from phalanx.action import Action, Collective, Move, Recv, Send
from phalanx.errors import WorldError
from phalanx.worlds.groups import LogicalGroup
from phalanx.worlds.logged_group import LoggedGroup
from phalanx.worlds.torch_tensors import RankContext

_FROM_FIRST = BroadcastOptions()
_FROM_FIRST.rootRank = 0


class _Connections:
    """Connections to a store, made before they are needed.

    Forming a group blocks its connection, so each group has its own; and connecting may take
    seconds, because c10d asks the name service who the other end is.
    """

    def __init__(self, store: TCPStore, num_ready: int = 2) -> None:
        self._store = store
        self._ready: SimpleQueue[TCPStore] = SimpleQueue()
        for _ in range(num_ready):
            self._make_another()

    def take(self) -> TCPStore:
        """A connection of one's own."""
        self._make_another()
        try:
            return self._ready.get_nowait()
        except Empty:
            return self._store.clone()

    def _make_another(self) -> None:
        def make() -> None:
            try:
                self._ready.put(self._store.clone())
            except (DistNetworkError, DistStoreError):
                return  # `take` will meet the same failure where somebody can hear of it

        threading.Thread(target=make, name="store connection", daemon=True).start()


class EpochExchange:
    """Carries out Collective, Move, Send and Recv of one island, from several threads.

    Args:
        store: where groups meet; every group gets a connection of its own.
        context: the tensors of this rank; what is copied or received goes to its host memory.
        kind: backend of the all-reduces; copies of state are of host memory, so on gloo.
        timeout_s: for forming a group and for one exchange.
    """

    def __init__(
        self, store: TCPStore, context: RankContext, kind: str = "gloo", timeout_s: float = 30.0
    ) -> None:
        self._connections = _Connections(store)
        self._context, self._my_id = context, context.rank
        self._kind, self._timeout_s = kind, timeout_s
        self._lock = threading.Lock()
        self._epoch = -1
        self._groups: list[LogicalGroup] = []
        self._exchange: tuple[LogicalGroup, LoggedGroup] | None = None

    def enter(self, epoch: int) -> None:
        """End all waits of earlier epochs; nothing of theirs counts from here on."""
        with self._lock:
            self._epoch, self._exchange = epoch, None
            over, self._groups = self._groups, []
        for group in over:
            group.close()

    def form(self, axis: str, members: tuple[int, ...], epoch: int) -> None:
        """Build the group of an epoch; returns when all members have called this."""
        group = self._new_group(axis, epoch, self._kind)
        process_group = group.form(members, epoch)
        with self._lock:
            self._require_current(epoch)
            self._exchange = (group, process_group)

    def carry_out(self, action: Action, epoch: int) -> None:
        """Block until the action is done.

        Raises:
            WorldError: `world/membership` or `world/timeout` when the epoch is over or its exchange
                broke off, `world/unbound` for what this island has no way to do.
        """
        if isinstance(action, Collective) and action.collective == "all_reduce":
            self._all_reduce(action)
        elif isinstance(action, Move):
            copy = self._require_size(action).to("cpu", copy=True)
            self._keep(action.tensor, copy, epoch)
        elif isinstance(action, Send):
            self._transfer(action, self._context.get(action.tensor, "host"), action.peer, epoch)
        elif isinstance(action, Recv):
            received = torch.empty_like(self._require_size(action), device="cpu")
            self._transfer(action, received, self._my_id, epoch)
            self._keep(action.tensor, received, epoch)
        else:
            rule = "an island has no way to carry this out"
            raise WorldError("world/unbound", action.label or "action", action.operator, rule)

    def close(self) -> None:
        """Give all groups up."""
        self.enter(self._epoch)

    def _all_reduce(self, action: Collective) -> None:
        with self._lock:
            self._require_current(action.epoch)
            exchange = self._exchange
        assert exchange is not None, "an exchange waits for its epoch to be formed"
        group, process_group = exchange
        tensor = self._require_size(action)
        total = tensor.clone()
        group.wait(process_group.allreduce([total]))
        with self._lock:
            self._require_current(action.epoch)
            tensor.copy_(total)

    def _transfer(self, action: Send | Recv, tensor: Tensor, target: int, epoch: int) -> None:
        """A message is a broadcast in a group of two: gloo's send and recv only make progress
        while someone blocks in their `wait`, which nothing can then end but their timeout."""
        source = action.peer if target == self._my_id else self._my_id
        pair = self._new_group(f"{action.axis}.{action.tensor}.{target}", epoch, "gloo")
        process_group = pair.form((source, target), epoch)
        pair.wait(process_group.broadcast([tensor], _FROM_FIRST))

    def _keep(self, handle: str, copy: Tensor, epoch: int) -> None:
        with self._lock:
            self._require_current(epoch)
            self._context.host[handle] = copy

    def _new_group(self, name: str, epoch: int, kind: str) -> LogicalGroup:
        store = self._connections.take()
        group = LogicalGroup(store, name, self._my_id, kind, self._timeout_s)
        with self._lock:
            self._require_current(epoch)
            self._groups.append(group)
        return group

    def _require_current(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise WorldError("world/membership", "epoch", epoch, f"over: now is {self._epoch}")

    def _require_size(self, action: Collective | Move | Recv) -> Tensor:
        """The device's tensor of an action, once its size fits the plan."""
        tensor = self._context.get(action.tensor).detach()
        self._context.require_size(action, tensor.nbytes)
        return tensor
