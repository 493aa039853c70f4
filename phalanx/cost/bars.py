"""A number with its bar."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bar:
    """An expected value between the least and the most that nine of ten cases stay within."""

    value: float
    low: float
    high: float

    def __iter__(self) -> Iterator[float]:
        return iter((self.value, self.low, self.high))

    def __mul__(self, factor: float) -> Bar:
        return Bar(self.value * factor, self.low * factor, self.high * factor)
