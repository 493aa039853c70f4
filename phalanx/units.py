"""Quantities at the edge of the program: "80 GiB", "400 Gbit/s", "2 ms" become SI floats and back.

Inside, everything is bytes, seconds, FLOPs and their rates; names carry the unit (`_bytes`, `_s`,
`_flops`, `_bytes_per_s`, `_flops_per_s`). GiB is 2**30, GB is 10**9, bit rates are divided by 8.
"""

from __future__ import annotations

import re
import sys

from phalanx.errors import JobError, nearest_names, shown

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def _bytes_table() -> dict[str, float]:
    table = {f"{prefix}B": scale for prefix, scale in (_DECIMAL | _BINARY).items()}
    return table | {"bytes": 1.0, "byte": 1.0}


def _rates(table: dict[str, float]) -> dict[str, float]:
    return {f"{unit}/s": scale for unit, scale in table.items()}


_BITS = {f"{prefix}{bit}": scale / 8 for prefix, scale in _DECIMAL.items() for bit in ("bit", "b")}
_FLOPS = {f"{prefix}FLOP": scale for prefix, scale in _DECIMAL.items()}

UNITS: dict[str, dict[str, float]] = {
    "bytes": _bytes_table(),
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0, "d": 86400.0},
    "bytes_per_s": _rates(_bytes_table()) | _rates(_BITS),
    "flops": _FLOPS,
    "flops_per_s": _rates(_FLOPS) | {f"{prefix}FLOPS": s for prefix, s in _DECIMAL.items()},
    "tokens": {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "tokens": 1.0},
    "usd": {"USD": 1.0, "$": 1.0},
    "usd_per_h": {"USD/h": 1.0, "$/h": 1.0},
    "w": {"W": 1.0, "kW": 1e3},
}

_QUANTITY = re.compile(r"^\s*([-+]?\d[\d_]*\.?\d*(?:[eE][-+]?\d+)?)\s*(\S*)\s*$")
_LONGEST = 100  # characters; matching takes the cube of them


def parse_quantity(text: str | int | float, dimension: str, where: str = "value") -> float:
    """`text` in SI units of `dimension` (a key of `UNITS`). A bare number is SI already.

    Infinite where the text says more than a float holds, and what a float is stays what it is:
    ranges are the reader's to check (`strict`).

    Raises:
        JobError: `unit/unknown` with the nearest units of that dimension, `job/bad-value` for what
            is no quantity or a whole number that no float holds.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        if isinstance(text, int) and abs(text) > sys.float_info.max:
            raise JobError("job/bad-value", where, shown(text), "must be below 1e308")
        return float(text)
    table = UNITS[dimension]
    match = None
    if isinstance(text, str) and len(text) <= _LONGEST:
        match = _QUANTITY.match(text)
    if match is None:
        raise JobError(
            "job/bad-value",
            where,
            shown(text),
            f"must be a number with a unit of {dimension}",
            legal=[f"1 {unit}".strip() for unit in list(table)[:4]],
        )
    number, unit = float(match[1].replace("_", "")), match[2]
    if unit in table:
        return number * table[unit]
    if not unit:
        return number
    raise JobError(
        "unit/unknown",
        where,
        repr(text),
        f"{unit!r} is no unit of {dimension}",
        legal=nearest_names(unit, [u for u in table if u]),
    )


def _scaled(value: float, steps: list[tuple[float, str]]) -> str:
    for scale, unit in steps:
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value / steps[-1][0]:.4g} {steps[-1][1]}"


def format_bytes(num_bytes: float) -> str:
    """Binary units, four digits: 1.5 GiB."""
    return _scaled(
        num_bytes,
        [(2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")],
    )


def format_s(seconds: float) -> str:
    """The unit that a reader would choose: 2.1 h, 3.2 s, 15 ms, 8 us."""
    return _scaled(seconds, [(3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us")])


def format_count(number: float) -> str:
    """Parameters and tokens: 30.7 B, 489.7 M, 4.1 k, 12."""
    return _scaled(number, [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1.0, "")]).strip()


def format_flops(flops: float) -> str:
    """Decimal units: 1.2 TFLOP."""
    return _scaled(
        flops, [(1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP")]
    )
