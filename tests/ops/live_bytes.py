"""How many bytes of tensors are alive at once while some code runs, as torch's allocator says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


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
