"""Ranks that compute slower than the others, by host. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

SLOW_FACTOR = 1.2  # times the median


@dataclass(frozen=True)
class SlowRank:
    """A rank that needs more time for a token than is usual.

    Attributes:
        rank, host: which one, and where it runs.
        factor: its seconds per token, over the median of all ranks.
    """

    rank: int
    host: str
    factor: float


class RankClock:
    """What a rank computed and how long, between two comparisons.

    Time that a rank waits for others must not be in it: whoever waits is not slow. On the CPU the
    processor time of the process has none of it.
    """

    def __init__(self) -> None:
        self._compute_s = self._num_tokens = 0.0

    def add(self, compute_s: float, num_tokens: int) -> None:
        """A step is over.

        Args:
            compute_s: time in which this rank computed.
            num_tokens: tokens of its own rows.
        """
        self._compute_s += compute_s
        self._num_tokens += num_tokens

    def take(self) -> float:
        """Seconds per token since the last time; 0 without any."""
        rate_s = self._compute_s / self._num_tokens if self._num_tokens else 0.0
        self._compute_s = self._num_tokens = 0.0
        return rate_s


def slow_ranks(
    token_s: Sequence[float], hosts: Sequence[str], *, factor: float = SLOW_FACTOR
) -> list[SlowRank]:
    """Ranks above `factor` times the (lower) median, slowest first.

    Args:
        token_s: seconds per token of each rank; 0: unknown.
        hosts: of each rank.
    """
    known = [each for each in token_s if each > 0.0]
    if len(known) < 2:
        return []
    usual = median_low(known)
    found = [
        SlowRank(rank, hosts[rank], seconds / usual)
        for rank, seconds in enumerate(token_s)
        if seconds > factor * usual
    ]
    return sorted(found, key=lambda each: (-each.factor, each.rank))


def slow_text(found: Sequence[SlowRank], hosts: Sequence[str]) -> str:
    """One line about them, hosts first whose ranks are all slow; "" for none."""
    parts = []
    for host in dict.fromkeys(each.host for each in found):
        slow = sorted(each.rank for each in found if each.host == host)
        times = max(each.factor for each in found if each.host == host)
        is_whole = len(slow) == list(hosts).count(host) and len(slow) < len(hosts)
        ranks = f"rank{'s' * (len(slow) > 1)} {', '.join(map(str, slow))}"
        name = f"host {host} ({ranks})" if is_whole else f"{ranks} (host {host})"
        parts.append(f"{name} up to {times:.2f} times the median")
    return f"slow: {'; '.join(parts)}" if parts else ""
