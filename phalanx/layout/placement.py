"""Placements: the two words of which layouts are made, and the arithmetic of one cut."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Literal, get_args

import numpy as np

from phalanx.errors import PlanError, nearest_names, nearest_numbers

Rule = Literal["ceil", "even", "repeat"]


@dataclass(frozen=True, init=False, repr=False)
class Shard:
    """Cut `dim` over mesh axes: `Shard(0, "tp")`, or jointly `Shard(0, "shard", "cp")`.

    Several axes in one `Shard` act as one axis of their product, the first one slowest. Several
    `Shard`s of a layout apply in order, each to the slices of the one before. So FSDP under TP
    (DTensor's strided sharding) is `Shard(0, "tp"), Shard(0, "shard")`.

    Args:
        dim: dimension of the canonical tensor.
        axes: mesh axes.
        units: the dim consists of this many equal units (heads, quantisation blocks) that no cut
            may tear; None: of single rows.
        rule: "ceil": ceil(units / n) units each, the last rank that has any may have fewer, those
            after it are empty (torch.chunk, FSDP2). "even": all alike, else an error. "repeat":
            as even, and with n a multiple of the units each unit stands on n / units neighbours
            (key-value heads when there are more ranks than heads).

    Raises:
        PlanError: `layout/rule` for an unknown rule.
    """

    dim: int
    axes: tuple[str, ...]
    units: int | None
    rule: Rule

    def __init__(self, dim: int, *axes: str, units: int | None = None, rule: Rule = "ceil") -> None:
        if rule not in get_args(Rule):
            legal = nearest_names(str(rule), get_args(Rule))
            raise PlanError("layout/rule", "rule", repr(rule), "no such cut rule", legal=legal)
        for field, value in (("dim", dim), ("axes", axes), ("units", units), ("rule", rule)):
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        units = "" if self.units is None else f", units={self.units}"
        rule = "" if self.rule == "ceil" else f", rule={self.rule!r}"
        return f"Shard({', '.join(map(repr, (self.dim, *self.axes)))}{units}{rule})"


@dataclass(frozen=True, init=False, repr=False)
class Only:
    """Held only at these coordinates of `axis`: `Only("pp", 3)`; tied weights `Only("pp", 0, 3)`.

    All these coordinates hold the same; the others hold nothing.

    Raises:
        PlanError: `layout/axis` without a coordinate.
    """

    axis: str
    at: tuple[int, ...]

    def __init__(self, axis: str, *at: int) -> None:
        if not at:
            raise PlanError("layout/axis", f"Only({axis!r})", None, "must name a coordinate")
        object.__setattr__(self, "axis", axis)
        object.__setattr__(self, "at", tuple(sorted(set(at))))

    def __repr__(self) -> str:
        return f"Only({', '.join(map(repr, (self.axis, *self.at)))})"


Placement = Shard | Only


def cut(
    shard: Shard,
    size: int,
    starts: np.ndarray,
    stops: np.ndarray,
    index: np.ndarray,
    degree: int,
    where: str,
) -> tuple[np.ndarray, np.ndarray]:
    """The slices [starts, stops) of a dim of `size` rows, cut once more.

    Args:
        starts, stops: [ranks] rows held so far.
        index: [ranks] position on the joint axis of `degree`.
        where: for the error.

    Raises:
        PlanError: `layout/divide` with the nearest legal units or degrees.
    """
    unit_rows = _unit_rows(shard, size, where)
    num_units, torn = np.divmod(stops - starts, unit_rows)
    if torn.any():
        rule = f"an earlier cut left {int(torn.max())} rows beside whole units of {unit_rows}"
        raise PlanError("layout/divide", where, degree, rule)
    if shard.rule == "ceil":
        width = -(-num_units // degree)
        first = np.minimum(index * width, num_units)
        last = np.minimum(first + width, num_units)
    else:
        _require_even(shard, np.unique(num_units), degree, where)
        spare = shard.rule == "repeat"
        copies = np.maximum(1, degree // np.maximum(1, num_units)) if spare else 1
        width = np.where(num_units < degree, np.minimum(num_units, 1), num_units // degree)
        first = index // copies * width
        last = first + width
    return starts + first * unit_rows, starts + last * unit_rows


def _unit_rows(shard: Shard, size: int, where: str) -> int:
    if shard.units is None:
        return 1
    if shard.units < 1 or size % shard.units:
        rule = f"{shard.units} units do not divide the {size} rows of the dim"
        legal = nearest_numbers(shard.units, divisors(size))
        raise PlanError("layout/divide", f"{where}, units", shard.units, rule, legal=legal)
    return max(1, size // shard.units)


def _require_even(shard: Shard, num_units: np.ndarray, degree: int, where: str) -> None:
    """All counts of units, which earlier cuts left, have to suit the degree."""
    counts = num_units[num_units > 0].tolist()
    repeats = shard.rule == "repeat"

    def suits(count: int, degree: int) -> bool:
        return count % degree == 0 or (repeats and degree % count == 0)

    wrong = [count for count in counts if not suits(count, degree)]
    if not wrong:
        return
    degrees = set(divisors(wrong[0]))
    if repeats:
        degrees |= {copies * wrong[0] for copies in range(1, degree // wrong[0] + 2)}
    fitting = [n for n in degrees if all(suits(count, n) for count in counts)]
    what = "rows" if shard.units is None else "units"
    rule = f"{wrong[0]} {what} cannot be cut{' or repeated' if repeats else ''} evenly"
    legal = [int(n) for n in nearest_numbers(degree, fitting)]
    raise PlanError("layout/divide", where, degree, rule, legal=legal)


def divisors(number: int) -> list[int]:
    """All divisors of a whole number >= 1, ascending; of 0: 1."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)}) or [1]
