"""Where the time of one of our steps goes, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from torch.profiler import ProfilerActivity, profile

_PARTS = {
    "products": ("_FrozenPlusLowRank",),
    "attention": ("_CompiledAttention", "_BlockedAttention"),
    "loss": ("_CrossEntropySum",),
    "norms": ("_RmsNorm",),
    "gate": ("_GatedProduct",),
}
_OPTIMIZER = "Optimizer.step"


def profiled(step: Callable[[int], None], number: int) -> dict[str, float]:
    """Seconds of each part of step `number`, with what is left as "rest"."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start_s = perf_counter()
        step(number)
        total_s = perf_counter() - start_s
    found = dict.fromkeys((*_PARTS, "optimizer"), 0.0)
    for event in profiler.key_averages():
        seconds = event.cpu_time_total * 1e-6
        for part, names in _PARTS.items():
            if event.key in (*names, *(f"{name}Backward" for name in names)):
                found[part] += seconds
        if event.key.startswith(_OPTIMIZER):
            found["optimizer"] += seconds
    return found | {"rest": total_s - sum(found.values()), "step": total_s}
