"""Process groups whose members come and go: every membership epoch is built fresh from the store.

    group = LogicalGroup(store, "islands", my_id=2, timeout_s=10.0)
    exchange = group.form(members=(0, 2, 3), epoch=7)    # all three call it
    group.wait(exchange.allreduce([tensor]))             # WorldError when the epoch is over
    group.abort()        # from another thread, once heartbeats and a vote say so
    exchange = group.form(members=(0, 2), epoch=8)
    group.close()

The groups stand alone: torch's default group need not exist, and nothing outlives an epoch, since a
gloo group that lost a member cannot be repaired. Whether a member is gone is not decided here: an
exchange that breaks off says only that this epoch's group is of no more use.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Work

from phalanx.errors import WorldError
from phalanx.worlds.logged_group import LoggedGroup
from phalanx.worlds.torch_private import abort_nccl

_MAX_NAP_S = 0.005


class LogicalGroup:
    """One named group of a changing membership, seen by one member.

    Args:
        store: where members meet; must outlive them all (a store of its own process, or a file).
        name: of the group, and of its rows in the communication log.
        my_id: this member; ids are any whole numbers, and the order of `members` is the rank order.
        kind: backend, "gloo" or "nccl".
        timeout_s: for forming a group and for one exchange.
    """

    def __init__(
        self, store: dist.Store, name: str, my_id: int, kind: str = "gloo", timeout_s: float = 30.0
    ) -> None:
        self.store, self.name, self.my_id, self.kind = store, name, my_id, kind
        self.timeout_s = timeout_s
        self.members: tuple[int, ...] = ()
        self.epoch = -1
        self._group: LoggedGroup | None = None
        self._over = threading.Event()

    def form(self, members: Sequence[int], epoch: int) -> LoggedGroup:
        """The process group of an epoch; returns when all its members have called this.

        Raises:
            WorldError: `world/membership` if this member is not in it or the epoch is not a new
                one, `world/timeout` if not everyone came.
        """
        where = f"group {self.name}"
        if self.my_id not in members:
            rule = f"epoch {epoch} is formed without this member"
            raise WorldError("world/membership", where, self.my_id, rule, legal=members)
        if epoch <= self.epoch:
            rule = "an epoch is formed once; later ones have higher numbers"
            raise WorldError("world/membership", where, epoch, rule, legal=[self.epoch + 1])
        self.close()
        self.epoch, self.members = epoch, tuple(members)
        self._over = threading.Event()
        who = "-".join(map(str, members))  # several groups of one name may have one epoch
        prefix = dist.PrefixStore(f"{self.name}/{epoch}/{who}/", self.store)
        rank, timeout = self.members.index(self.my_id), timedelta(seconds=self.timeout_s)
        try:
            if "gloo" not in self.kind:  # NCCL connects at the first exchange only
                _meet(prefix, rank, len(members), timeout)
            self._group = LoggedGroup(
                self.kind, prefix, rank, self.members, timeout, axis=self.name
            )
        except RuntimeError as error:  # torch has no narrower class for a rendezvous that fails
            rule = f"not all of {self.members} came to epoch {epoch} in {self.timeout_s:g} s"
            raise WorldError("world/timeout", where, None, rule, detail=str(error)) from error
        return self._group

    def current(self, members: Sequence[int], epoch: int) -> LoggedGroup:
        """The group of an epoch, formed at the first call; errors as in `form`."""
        if self._group is None or (tuple(members), epoch) != (self.members, self.epoch):
            return self.form(members, epoch)
        return self._group

    def wait(self, work: Work) -> None:
        """Wait for a collective of the current epoch; `abort` from another thread ends the wait.

        Raises:
            WorldError: `world/membership` if the epoch was aborted or the exchange broke off,
                `world/timeout` after `timeout_s`.
        """
        end_s, nap_s = time.monotonic() + self.timeout_s, 1e-4
        while not work.is_completed():
            if self._over.wait(nap_s):
                raise self._broken("world/membership", "the epoch was aborted")
            if time.monotonic() > end_s:
                raise self._broken("world/timeout", f"no answer within {self.timeout_s:g} s")
            nap_s = min(_MAX_NAP_S, 2 * nap_s)
        try:
            work.wait()
        except RuntimeError as error:  # what gloo raises when a connection closes
            rule = "the exchange broke off; heartbeats decide who left"
            raise self._broken("world/membership", rule, str(error)) from error

    def abort(self) -> None:
        """End the waits of this epoch; the next step is a new epoch. Callable from any thread."""
        self._over.set()

    def close(self) -> None:
        """Give this epoch's group up without waiting for what still runs in it."""
        self.abort()
        if self._group is not None:
            bury(self._group, self.timeout_s)
            self._group = None

    def _broken(self, code: str, rule: str, detail: str = "") -> WorldError:
        where = f"group {self.name}, epoch"
        return WorldError(code, where, self.epoch, rule, detail=detail)


def _meet(store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Wait until all ranks of a group are here; RuntimeError when they do not come."""
    store.set(f"here/{rank}", "")
    store.wait([f"here/{each}" for each in range(size)], timeout)


def bury(group: LoggedGroup, timeout_s: float) -> None:
    """Let go of a group in which an operation may still wait.

    gloo's destructor waits for its threads, which a dead peer holds until their timeout. The group
    is kept until then, so that nobody who drops it last is held up, nor the end of the process.
    NCCL's operations are aborted: their kernels would hold the device, and when their timeout has
    come, NCCL's watchdog ends the process.
    """
    if "nccl" in group.kind:
        threading.Thread(target=abort_nccl, args=(group,), name="abort", daemon=True).start()
    holder = [group]
    grave = threading.Timer(timeout_s + 1.0, holder.clear)
    grave.daemon = True
    grave.start()
