"""Who holds how many bytes, and the most so far."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.action import Alloc, Free
from phalanx.errors import CheckError, PlanError
from phalanx.units import format_bytes


class MemoryAccount:
    """Bytes by (rank, memory), counted in the order of the calls.

    Args:
        limits: bytes of each memory, or one number for "device"; what is not listed has no limit.
    """

    def __init__(self, limits: float | Mapping[str, float] | None = None) -> None:
        if limits is None:
            limits = {}
        self.limits = limits if isinstance(limits, Mapping) else {"device": limits}
        self.used: dict[tuple[int, str], float] = {}
        self.peak: dict[tuple[int, str], float] = {}
        self._held: dict[tuple[int, str, str], float] = {}

    def alloc(self, action: Alloc, rank: int) -> float:
        """Take memory; the bytes taken.

        Raises:
            CheckError: `check/memory` naming rank, label, peak and limit; `check/handle` for a
                tensor that is held already.
        """
        where, key = (rank, action.memory), (rank, action.memory, action.tensor)
        if key in self._held:
            raise _handle_error(action, rank, "is held already; free it first")
        self._held[key] = action.num_bytes
        used = self.used[where] = self.used.get(where, 0.0) + action.num_bytes
        if used > self.peak.get(where, 0.0):
            self.peak[where] = used
            limit = self.limits.get(action.memory)
            if limit is not None and used > limit:
                raise self._limit_error(action, rank, used, limit)
        return action.num_bytes

    def free(self, action: Free, rank: int) -> float:
        """Give memory back; the bytes given back.

        Raises:
            CheckError: `check/handle` for a tensor that is not held.
        """
        num_bytes = self._held.pop((rank, action.memory, action.tensor), None)
        if num_bytes is None:
            raise _handle_error(action, rank, "is not held")
        self.used[rank, action.memory] -= num_bytes
        return num_bytes

    def clear(self, rank: int) -> None:
        """A rank lost everything that it held."""
        for key in [key for key in self._held if key[0] == rank]:
            self.used[key[0], key[1]] -= self._held.pop(key)

    def peaks(self, memory: str = "device") -> dict[int, float]:
        """Most bytes at a time, by rank."""
        return {rank: peak for (rank, name), peak in self.peak.items() if name == memory}

    def _limit_error(self, action: Alloc, rank: int, used: float, limit: float) -> CheckError:
        largest = sorted(
            (
                (size, tensor)
                for (r, m, tensor), size in self._held.items()
                if (r, m) == (rank, action.memory)
            ),
            reverse=True,
        )
        lines = [f"  {format_bytes(size):>12}  {tensor}" for size, tensor in largest[:8]]
        if len(largest) > 8:
            lines.append(f"  and {len(largest) - 8} smaller")
        return CheckError(
            "check/memory",
            f"rank {rank}: {action.label or 'alloc of ' + action.tensor}",
            f"peak {format_bytes(used)}",
            f"needs more {action.memory} memory than the limit of {format_bytes(limit)}",
            detail="held at that moment:\n" + "\n".join(lines),
        )


def _handle_error(action: Alloc | Free, rank: int, rule: str) -> PlanError:
    where = f"rank {rank}: {action.label or action.kind}"
    return CheckError("check/handle", where, action.tensor, rule)
