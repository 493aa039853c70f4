"""Machines by the names that tables of measurements, data sheets and people give them."""

from __future__ import annotations

import re
from functools import lru_cache

from phalanx.hardware.load import machine_names, read_machine
from phalanx.hardware.machine import Machine

# Words of a name, all of which must be there -> machine. The first line that fits counts, so what
# is special stands before what is general. Words are compared without case, and "80GB" gives the
# words "80" and "gb".
_NAMES: tuple[tuple[str, str], ...] = (
    ("gb300", "gb300"),
    ("gb200", "gb200"),
    ("b300", "b300"),
    ("b200", "b200"),
    ("gh200 alps", "gh200-alps"),
    ("gh200 144", "gh200-144g"),
    ("gh200", "gh200-96g"),
    ("h200 nvl", "h200-nvl"),
    ("h200", "h200"),
    ("h100 hbm2e", "h100-hbm2e"),
    ("h100 nvl", "h100-nvl"),
    ("h100 pcie", "h100-pcie"),
    ("h100", "h100"),
    ("h800", "h800"),
    ("h20", "h20"),
    ("a100 pcie", "a100-pcie"),
    ("a100 40", "a100-40g"),
    ("a100", "a100-80g"),
    # the only device of that generation with this peak
    ("ampere 312", "a100-80g"),
    ("v100 16gb", "v100-16g"),
    ("v100 16g", "v100-16g"),
    ("v100 16 gb", "v100-16g"),
    ("v100", "v100-32g"),
    ("l40s", "l40s"),
    ("l40", "l40"),
    ("l4", "l4"),
    ("t4", "t4"),
    ("a10g", "a10g"),
    ("a10", "a10"),
    ("a30", "a30"),
    ("a40", "a40"),
    ("rtx pro 6000", "rtx-pro-6000"),
    ("rtx 6000 ada", "rtx-6000-ada"),
    ("rtx6000 ada", "rtx-6000-ada"),
    ("6000 ada", "rtx-6000-ada"),
    ("a6000", "rtx-a6000"),
    ("rtxa6000", "rtx-a6000"),
    ("a5000", "rtx-a5000"),
    ("rtxa5000", "rtx-a5000"),
    ("rtx 5090", "rtx5090"),
    ("rtx5090", "rtx5090"),
    ("rtx 4090", "rtx4090"),
    ("rtx4090", "rtx4090"),
    ("rtx 3090", "rtx3090"),
    ("rtx3090", "rtx3090"),
    ("rtx 2080", "rtx2080"),
    ("rtx2080", "rtx2080"),
    ("titan rtx", "titan-rtx"),
    ("jetson orin", "jetson-orin"),
    ("mi250x", "mi250x"),
    ("mi250", "mi250x"),
    ("mi300x", "mi300x"),
    ("mi325x", "mi325x"),
    ("mi350x", "mi350x"),
    ("mi355x", "mi355x"),
    ("tpu v3", "v3"),
    ("tpu v4", "v4"),
    ("tpu v5e", "v5e"),
    ("tpu v5litepod", "v5e"),
    ("tpu v5 lite", "v5e"),
    ("tpu v5p", "v5p"),
    ("tpu v6e", "v6e"),
    ("trillium", "v6e"),
    ("tpu v7x", "v7x"),
    ("tpu v7", "v7x"),
    ("tpu7x", "v7x"),
    ("ironwood", "v7x"),
    # training tables count NeuronCores, and say so
    ("trainium1 cores", "trainium1-core"),
    ("trainium1", "trainium1"),
    ("trainium2", "trainium2"),
    ("trainium3", "trainium3"),
    ("inferentia2", "inferentia2"),
    # as Amazon calls the machines that hold them
    ("trn1 cores", "trainium1-core"),
    ("trn1", "trainium1"),
    ("trn1n", "trainium1"),
    ("trn2", "trainium2"),
    ("trn2u", "trainium2"),
    ("inf2", "inferentia2"),
    ("gaudi2", "gaudi2"),
    ("gaudi 2", "gaudi2"),
    ("gaudi3", "gaudi3"),
    ("gaudi 3", "gaudi3"),
    ("arc b60 dual", "arc-b60-dual"),
    ("arc b60", "arc-b60"),
    ("ascend 910c die", "ascend-910c-die"),
    ("ascend 910c", "ascend-910c"),
    ("ascend 910b 376t", "ascend-910b-376t"),
    ("ascend 910b", "ascend-910b"),
)
_MAKERS = ("nvidia", "geforce", "tesla", "amd", "instinct", "intel", "aws", "huawei")
_OTHER_CHIPS = {"ti", "super", "laptop", "d"}  # than the GeForce of that number
_MIXED = re.compile(r"\s\+\s|,\s+(?![^(]*\))")  # a comma outside of brackets
_SIZE = re.compile(r"[\s\-_]\d+ ?GB?$", re.IGNORECASE)
_COUNTED = re.compile(r"^\s*(\d+)\s*[xX*]\s*(?=\D)|\(x(\d+)\)\s*$")


def machine_called(text: str) -> Machine | None:
    """The machine that a table's column `hardware`, or a person, means.

    "NVIDIA H100 SXM 80GB (Jean Zay)", "AMD Instinct MI300X-NPS1-SPX-192GB-750W" and "16384xH100"
    have one; capped power and virtual machines are read as the plain device.

    Returns:
        None for what is no known machine, or one of another size of memory; does not say which
        ("Huawei Ascend NPU"); or is more than one kind (`machines_called`).
    """
    if _MIXED.search(text):
        return None
    return _one(text)


def machines_called(text: str) -> list[tuple[Machine, int]] | None:
    """Kinds of devices of a mixed cluster with the number of each, 0 where the text has none.

    Reads "AMD Instinct MI325X 256GB HBM3E (x16), AMD Instinct MI300X 192GB HBM3 (x8)". None if one
    of them is not known.
    """
    found = []
    for part in _MIXED.split(text):
        machine, count = _one(part), _COUNTED.search(part.strip())
        if machine is None:
            return None
        found.append((machine, int(next(filter(None, count.groups()))) if count else 0))
    return found


def machine_named(text: str) -> Machine | None:
    """The machine of which a text is the whole name, however it is written: "a6000", "RTX-4090".

    A size of memory may stand behind it ("H100-80GB"). Unlike `machine_called` it leaves out no
    other word: "h100-pci" is none.
    """
    names = {_bare(name): name for name in machine_names()}
    for whole in (_bare(text), _bare(_SIZE.sub("", text.strip()))):
        called = names.get(whole) or next((to for name, to in _NAMES if _bare(name) == whole), None)
        if called and _has_memory(read_machine(called), text):
            return read_machine(called)
    return None


def _bare(name: str) -> str:
    """Letters and digits, without maker and family in front, and "80GB" as "80g"."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"(\d)gb\b", r"\1g", name.lower()))
    while words and words[0] in _MAKERS:
        words = words[1:]
    return "".join(words)


@lru_cache(maxsize=1024)
def _one(text: str) -> Machine | None:
    plain = _COUNTED.sub("", text.strip()).strip()
    if plain.lower() in machine_names():
        return read_machine(plain.lower())
    words = set(re.findall(r"[a-z]+\d+[a-z]+\d*|[a-z]+\d*|\d+[a-z]+|\d+", plain.lower()))
    words |= {part for word in words for part in re.findall(r"\d+|[a-z]+", word)}
    if words & _OTHER_CHIPS:
        return None
    for name, called in _NAMES:
        if set(name.split()) <= words:
            machine = read_machine(called)
            return machine if _has_memory(machine, plain) else None
    return None


def _has_memory(machine: Machine, text: str) -> bool:
    """Whether one of the sizes that a name states is that of the machine, nominal as sold: a "V100
    16GB" is no V100 of 32 GB. Names of GH200 may state the memory of the processor alone."""
    sizes = [float(each) for each in re.findall(r"(?<![\w.])(\d+) ?GB?\b", text, re.IGNORECASE)]
    near = (0.85 < size * 1e9 / machine.memory.value < 1.15 for size in sizes)
    return not sizes or any(near) or machine.name.startswith("gh200")
