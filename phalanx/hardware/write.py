"""A machine as the text of its file: what `read_machine` reads, it writes."""

from __future__ import annotations

import json

from phalanx.hardware.machine import OPTIONAL, REQUIRED, TEXTS, Figure, Machine
from phalanx.units import UNITS

# tried in this order; the first that gives a number of 1 or more is taken
_UNITS = {
    "flops_per_s": ("TFLOP/s", "GFLOP/s", "FLOP/s"),
    "bytes": ("GiB", "MiB", "B"),
    "bytes_per_s": ("GB/s", "MB/s", "B/s"),
    "s": ("s", "ms", "us", "ns"),
    "w": ("W",),
    "usd_per_h": ("$/h",),
}


def machine_toml(machine: Machine) -> str:
    """The file of a machine, every figure with unit, kind, source and date."""
    head = [f"title = {json.dumps(machine.title)}"]
    head += [f"{name} = {json.dumps(text)}" for name in TEXTS if (text := getattr(machine, name))]
    head.append(f"devices_per_domain = {machine.devices_per_domain}")
    if machine.cores_per_device:
        head.append(f"cores_per_device = {machine.cores_per_device}")
    dimensions = REQUIRED | OPTIONAL
    tables = [
        f"[{name}]\n" + _figure(figure, dimensions[name])
        for name, figure in machine.figures().items()
    ]
    return "\n\n".join(["\n".join(head), *tables]) + "\n"


def _figure(figure: Figure, dimension: str) -> str:
    value = _text(_quantity(figure.value, dimension)) if dimension else repr(figure.value)
    texts = {name: _text(getattr(figure, name)) for name in ("kind", "source", "date")}
    return "\n".join([f"value = {value}", *(f"{name} = {text}" for name, text in texts.items())])


def _text(text: str) -> str:
    """Quoted. TOML's basic strings are JSON's, but for pairs of surrogates and a bare DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


def _quantity(value: float, dimension: str) -> str:
    """With the largest unit that loses nothing."""
    for unit in _UNITS[dimension]:
        scale = UNITS[dimension][unit]
        number = float(f"{value / scale:.12g}")
        if number >= 1.0 and number * scale == value:
            return f"{number:.12g} {unit}"
    base = next(unit for unit in reversed(_UNITS[dimension]) if UNITS[dimension][unit] == 1.0)
    return f"{value!r} {base}"
