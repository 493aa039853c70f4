"""How numbers and foreign texts are shown to people. The raw value stays beside each of them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10

from phalanx.report import Row

_SCALES: dict[str, Sequence[tuple[float, str]]] = {
    "s": ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
}
# Seconds are read as seconds for longer than a minute is long, and hours begin at two.
_LEAST: dict[str, float] = {"h": 2.0, "min": 3.0}
_PER_SECOND = ("1/s", "tokens/s")
_DOLLARS = ("USD", "$", "dollars")


@dataclass(frozen=True)
class Shown:
    """A number for people: text, unit, and the value as it was measured or computed."""

    text: str
    unit: str = ""
    raw: str = ""

    def __str__(self) -> str:
        joined = f"{self.text} {self.unit}".rstrip()
        return f"${self.text}" if self.unit == "$" else joined


def shown(value: float | None, unit: str, like: Sequence[float] = ()) -> Shown:
    """A value in the unit that suits its size.

    Args:
        value: None: not known.
        unit: as in `report.Row`.
        like: values of the same row; the largest decides on the unit for all of them.
    """
    if value is None:
        return Shown("unknown")
    raw = f"{value!r} {unit}" if unit != "1" else repr(value)
    if not isfinite(value):
        return Shown(str(value), unit, raw)
    if unit == "h":
        value, unit, like = 3600.0 * value, "s", [3600.0 * each for each in like]
    if unit in _SCALES:
        scale, name = _scale(unit, max([abs(value), *map(abs, like)]))
        return Shown(digits(value / scale), name, raw)
    if unit in _DOLLARS:
        return Shown(f"{value:,.2f}" if abs(value) >= 1.0 else f"{value:.3g}", "$", raw)
    if unit in _PER_SECOND:
        return Shown(digits(value), "/s", raw)
    return Shown(digits(value), "" if unit == "1" else unit, raw)


def shown_row(row: Row | None, others: Iterable[Row | None] = ()) -> Shown:
    """The value of a row, in the unit that suits it and the rows beside it."""
    if row is None:
        return Shown("")
    like = [each.value for each in others if each is not None and each.value is not None]
    return shown(row.value, row.unit, like)


def _scale(unit: str, size: float) -> tuple[float, str]:
    for scale, name in _SCALES[unit]:
        if size >= scale * _LEAST.get(name, 1.0):
            return scale, name
    return _SCALES[unit][-1] if size else next(s for s in _SCALES[unit] if s[0] == 1.0)


def digits(value: float) -> str:
    """Three digits; whole numbers in full, grouped by thousands; tiny ones as powers of ten."""
    if value == round(value) and abs(value) < 1e15:
        return _signed(f"{round(value):,d}")
    size = abs(value)
    if size >= 1000:
        return _signed(f"{value:,.0f}")
    if size < 1e-3:
        return _signed(f"{value:.1e}")
    places = 2 - floor(log10(size))
    return _signed(f"{value:.{places}f}")


def percent(frac: float, *, signed: bool = True) -> str:
    """A relative distance or a share."""
    return _signed(f"{100 * frac:+.1f}" if signed else f"{100 * frac:.0f}") + " %"


def _signed(text: str) -> str:
    return text.replace("-", "−") if "e" not in text else text.replace("-", "−", text[0] == "-")


def visible(text: object) -> str:
    """Text of others as it can stand on a page: what cannot be seen is written out.

    Control characters, marks that turn the direction of writing, and code points that are no
    characters become their escapes; tabs and line ends stay.
    """
    return "".join(_seen(char) for char in str(text))


def _seen(char: str) -> str:
    if char in "\t\n\u200c\u200d" or char.isprintable():  # the last two join letters and emoji
        return char
    if unicodedata.category(char) == "Zs":
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"
