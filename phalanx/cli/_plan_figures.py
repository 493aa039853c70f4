"""How `phalanx plan` and `phalanx lab` write hours, dollars, bytes and figures of a machine."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.hardware.machine import OPTIONAL, REQUIRED
from phalanx.units import format_bytes, format_flops, format_s

GIBIBYTE = 2.0**30


def duration(hours: Sequence[float]) -> str:
    """Expected, least and most of a job in the unit that a reader would choose."""
    if hours[0] == float("inf"):
        return "no end"
    seconds = hours[0] * 3600
    scales = ((5400.0, 1.0, "h"), (90.0, 60.0, "min"), (1.0, 3600.0, "s"), (0.0, 3.6e6, "ms"))
    scale, unit = next((scale, unit) for least, scale, unit in scales if seconds >= least)
    expected, least, most = (figure(each * scale) for each in hours)
    return f"{expected} {unit} ({least} to {most})"


def dollars(values: Sequence[float]) -> str:
    """Expected, least and most; cents, unless there is less than one or far more."""
    if values[0] == float("inf"):
        return "price unknown" if values[1] == float("inf") else "no end"
    if values[0] >= 1e6:
        expected, least, most = (figure(each / 1e6) for each in values)
        return f"${expected} M ({least} to {most})"
    digits = 0 if values[0] >= 100 else 2 if values[0] >= 0.1 else 4
    expected, least, most = (f"{each:,.{digits}f}" for each in values)
    return f"${expected} ({least} to {most})"


def figure(value: float) -> str:
    """Two or three digits."""
    if value == float("inf"):
        return "no end"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}"


def gib(num_bytes: float) -> str:
    """Binary, one digit."""
    if num_bytes < 0.1 * GIBIBYTE:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / GIBIBYTE:.1f} GiB"


def gb(num_bytes: float) -> str:
    """Decimal, of disks."""
    scales = ((1e12, 1e12, "TB"), (1e8, 1e9, "GB"), (0.0, 1e6, "MB"))
    scale, unit = next((scale, unit) for least, scale, unit in scales if num_bytes >= least)
    return f"{num_bytes / scale:.3g} {unit}"


def _decimal_rate(bytes_per_s: float) -> str:
    """As makers of memory and links write it."""
    scales = ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"))
    scale, unit = next((each for each in scales if bytes_per_s >= each[0]), (1e3, "kB/s"))
    return f"{bytes_per_s / scale:.4g} {unit}"


def quantity(name: str, value: float) -> str:
    """A figure of a machine as a person reads it."""
    as_text = {
        "bytes": format_bytes,
        "bytes_per_s": _decimal_rate,
        "flops_per_s": lambda each: f"{format_flops(each)}/s",
        "s": format_s,
        "w": lambda each: f"{each:.0f} W",
        "usd_per_h": lambda each: f"{each:.2f} $/h",
    }
    return as_text.get((REQUIRED | OPTIONAL)[name], "{:.3g}".format)(value)
