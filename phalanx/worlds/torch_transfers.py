"""Transfers on a process group: issued without waiting, their ends collected by threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any
from zlib import crc32

import torch
from torch.distributed import BarrierOptions, Work

from phalanx.action import Collective, Recv, Send
from phalanx.worlds.logged_group import LoggedGroup
from phalanx.worlds.pending import Entry
from phalanx.worlds.torch_clock import DeviceClock
from phalanx.worlds.torch_private import coalesces

Done = tuple[Entry, torch.Tensor | None, Any, Exception | None]


def issue_collective(
    group: LoggedGroup, action: Collective, tensor: torch.Tensor | None, device: torch.device
) -> tuple[Work, torch.Tensor | None]:
    """Start a collective; its work, and the tensor that will hold the result.

    Args:
        tensor: the input, whose size fits the plan (None for a barrier).
        device: of this rank's tensors.
    """
    if tensor is None:
        return group.barrier(_barrier_on(device)), None
    source, size = tensor.contiguous(), group.size()
    rows, rest = source.shape[:1], source.shape[1:]
    if action.collective == "all_gather":
        output = source.new_empty((size * rows[0], *rest))
        return group.all_gather_single(output, source), output
    if action.collective == "reduce_scatter":
        output = source.new_empty((rows[0] // size, *rest))
        return group.reduce_scatter_single(output, source), output
    if action.collective == "all_to_all":
        output = torch.empty_like(source)
        return group.all_to_all_single(output, source, [], []), output
    output = source.clone() if action.into else source
    if action.collective == "broadcast":
        return group.broadcast(output, 0), output
    return group.allreduce([output]), output


def _barrier_on(device: torch.device) -> BarrierOptions:
    """NCCL guesses a GPU from the rank in the group where none is named: the second rank of every
    group would take the host's second, and two processes on one GPU end in an error."""
    options = BarrierOptions()
    options.device = device
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        options.device_ids = [index]
    return options


def issue_messages(
    group: LoggedGroup, messages: Sequence[tuple[Send | Recv, torch.Tensor]]
) -> list[Work]:
    """Start messages, as one batch where the backend can; their works, in order.

    Both ends name the tensor of a message, which gives it its tag: on gloo messages of one pair may
    come in another order than they were sent.
    """
    device = messages[0][1].device if messages else None
    if device is None or not coalesces(group, device):
        return [_issue_message(group, *message) for message in messages]
    group._start_coalescing(device)
    for message in messages:
        _issue_message(group, *message)
    return [group._end_coalescing(device)] * len(messages)


def _issue_message(group: LoggedGroup, action: Send | Recv, tensor: torch.Tensor) -> Work:
    tag = crc32(action.tensor.encode()) >> 2  # gloo takes 31 bits; NCCL ignores it
    if isinstance(action, Send):
        return group.send([tensor], action.peer, tag)
    return group.recv([tensor], action.peer, tag)


class Waiters:
    """One thread per lane that waits for the lane's transfers in order.

    gloo messages tell nobody that they have ended, and waiting for one in the main thread could
    hold up the send that a peer needs first.
    """

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._queues: dict[str, SimpleQueue] = {}
        self._done: SimpleQueue[Done] = SimpleQueue()
        self._open: dict[Entry, None] = {}

    @property
    def num_open(self) -> int:
        """Transfers that have not been reported by `next_done`."""
        return len(self._open)

    def add(self, entry: Entry, work: Work, output: torch.Tensor | None) -> None:
        """Wait for a transfer from now on."""
        self._open[entry] = None
        lane = entry.action.lane
        if lane not in self._queues:
            self._queues[lane] = SimpleQueue()
            threading.Thread(
                target=self._wait_in_order, args=(self._queues[lane],), name=lane, daemon=True
            ).start()
        self._queues[lane].put((entry, work, output))

    def next_done(self, timeout_s: float) -> Done:
        """The next transfer that has ended, with its result, the moment and any error.

        Raises:
            queue.Empty: none ended in time.
        """
        done = self._done.get(timeout=timeout_s)
        del self._open[done[0]]
        return done

    def oldest(self) -> Entry:
        """The transfer that has been under way for the longest time."""
        return next(iter(self._open))

    def close(self) -> None:
        """End the threads once they have waited for what they have."""
        for queue in self._queues.values():
            queue.put(None)

    def _wait_in_order(self, queue: SimpleQueue) -> None:
        while (item := queue.get()) is not None:
            entry, work, output = item
            error = None
            try:
                work.wait()
            except RuntimeError as raised:  # what gloo raises when a connection closes
                error = raised
            self._done.put((entry, output, self._clock.now(), error))
