"""Bytes that are alive: storages that nobody has let go of, and the most there were at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from time import sleep

import torch
from torch._C._profiler import _EventType
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While entered, notes every storage that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._made[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def now(self, besides: Iterable[torch.Tensor] = ()) -> int:
        """Bytes alive now, without the storages of `besides`."""
        skipped = {StorageWeakRef(tensor.untyped_storage()) for tensor in besides}
        return sum(
            num_bytes
            for storage, num_bytes in self._made.items()
            if not storage.expired() and storage not in skipped
        )

    def settled(self, besides: Iterable[torch.Tensor] = (), patience_s: float = 0.3) -> int:
        """The least alive within `patience_s`: the threads of gloo let go of what they sent or
        summed a moment after the collective is over."""
        besides, steps = list(besides), 30
        found = self.now(besides)
        for _ in range(steps):
            sleep(patience_s / steps)
            found = min(found, self.now(besides))
        return found


def most_live_bytes(run: Callable[[], object]) -> int:
    """The most that `run` holds of what it allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    live = most = 0
    for _, num_bytes in sorted(_allocations(profiled)):
        live += num_bytes
        most = max(most, live)
    return most


def _allocations(profiled: profile) -> Iterator[tuple[int, int]]:
    """(time, bytes): negative where they are freed."""
    events = list(profiled.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events.extend(event.children)
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            yield event.start_time_ns, fields.alloc_size
