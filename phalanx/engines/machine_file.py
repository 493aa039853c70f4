"""A machine file of this machine, measured: what `--on 2x./here.toml` plans for. No torch here.

A device of it is what a training process has: a GPU, or a share of the cores. Memory is what is
free now within the limits of the control group, not what is built in.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from phalanx.doctor.machine import (
    MATRIX_FLAGS,
    available_bytes,
    cgroup_memory_bytes,
    memory_bytes,
    num_cores,
    processor_flags,
    processor_name,
    usable_cores,
)
from phalanx.engines.launch import launch_local
from phalanx.errors import JobError
from phalanx.hardware import Figure, Machine, machine_called
from phalanx.hardware.write import machine_toml
from phalanx.planner.here import device_here, gpus_here

_WORKER = "phalanx.engines.machine_bench"
_TIMEOUT_S = 240.0  # where others want the cores too, starting alone takes most of a minute
_MOST_PROCESSES = 8  # of a CPU; their threads share its other cores
_BUFFER_BYTES = 512 << 20
_SYSTEM = Path("/sys/devices/system")
_USABLE = Figure(0.9, "assumption", "other programs, and pieces of memory too small to use", "")
_ALONE = "assumption"  # kind of what a lone device has no other end to measure with


def calibrate_machine(name: str = "here", *, num_devices: int = 0, seconds: float = 1.0) -> Machine:
    """Measure this machine; takes about ten seconds where no other program wants its cores.

    Args:
        name: of the machine.
        num_devices: processes that will train here (0: one per GPU, or one per physical core that
            this process may use, at most 8).
        seconds: of each measurement of a rate.

    Raises:
        JobError: `job/bad-value` for more devices than GPUs or cores.
        WorldError: when a measuring process fails.
    """
    device = device_here()
    most = len(gpus_here()) or max(1, int(usable_cores()))
    count = num_devices or (
        most if device == "cuda" else max(1, min(most, physical_cores(), _MOST_PROCESSES))
    )
    if not 0 < count <= most:
        rule = f"this machine has {most}"
        raise JobError("job/bad-value", "devices", num_devices, rule, legal=[most])
    free_bytes = available_bytes()
    task = {
        "device": device,
        "seconds": seconds,
        "num_devices": count,
        "buffer_bytes": int(min(_BUFFER_BYTES, free_bytes / count / 8)),
    }
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "task.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(task))
        launch_local(_WORKER, [str(asked), str(answer)], count, timeout_s=_TIMEOUT_S)
        found = json.loads(answer.read_text())
    return _machine(name, device, count, free_bytes, found)


def write_machine(machine: Machine, path: Path) -> None:
    """Write the file of a machine.

    Raises:
        JobError: `job/bad-value` for a path that does not end in .toml or cannot be written.
    """
    if path.suffix != ".toml":
        rule = "must end in .toml, as --on reads it"
        raise JobError("job/bad-value", "output", str(path), rule, legal=[f"{path}.toml"])
    try:
        path.write_text(machine_toml(machine), encoding="utf-8")
    except OSError as error:
        rule = error.strerror or "cannot be written"
        raise JobError("job/bad-value", "output", str(path), rule) from None


def physical_cores() -> int:
    """Cores of this machine, threads of one core counted once; all where the kernel is silent."""
    groups = {
        text
        for each in _SYSTEM.glob("cpu/cpu[0-9]*/topology/thread_siblings_list")
        if (text := _read(each))
    }
    return len(groups) or num_cores()


def numa_nodes() -> int:
    """Nodes of memory, at least 1."""
    return len(list(_SYSTEM.glob("node/node[0-9]*"))) or 1


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a core that is switched off, or not this kind of system
        return ""


def _machine(
    name: str, device: str, count: int, free_bytes: float, found: Mapping[str, float]
) -> Machine:
    today, is_gpu = date.today().isoformat(), device == "cuda"
    shared = found["cores_frac"]
    clock = "" if is_gpu else f", by processor time of which they had {shared:.0%}"
    source = f"median of repeated runs on all {count} at once{clock}"

    def measured(key: str, text: str) -> Figure:
        return Figure(_rounded(found[key]), "measured", f"{text}; {source}", today)

    bandwidth = measured("memory_bandwidth", "reading two long vectors")
    free = found["memory"] if is_gpu else free_bytes / count
    total = found["total_memory"] if is_gpu else memory_bytes()[0] / count
    link, latency = _link(found, count, bandwidth, today)
    lone = f"{_other_machines(count)}; "
    return Machine(
        name=name,
        title=_title(device, count, int(found["threads"])),
        **_of_its_kind(is_gpu, found["matmul"]),
        topology=_topology(),
        devices_per_domain=count,
        matmul=measured("matmul", "bf16 products of one weight after another"),
        memory=Figure(
            float(int(free)), "measured", f"free now, of {total / 2**30:.4g} GiB; {_limit()}", today
        ),
        usable_memory_frac=Figure(_USABLE.value, _USABLE.kind, _USABLE.source, today),
        memory_bandwidth=bandwidth,
        link_bandwidth=link,
        link_latency=latency,
        network_bandwidth=Figure(link.value, _ALONE, lone + "as the link", today),
        network_latency=Figure(latency.value, _ALONE, lone + "as the link", today),
        launch_overhead=measured("launch_overhead", "adding to 8 elements"),
        host_memory=Figure(
            _mebibytes(memory_bytes()[0] / count), "measured", "built in, a device's share", today
        ),
    )


def _of_its_kind(is_gpu: bool, matmul: float) -> dict[str, Any]:
    """What no measurement tells: the maker; of a GPU that is known here generation, peaks and
    power, unless the measured rate is above that peak (then it is another device)."""
    if not is_gpu:
        return {"vendor": next(iter(processor_name().split("(")[0].split()), "")}
    known = machine_called(gpus_here()[0].split(",")[0])
    if known is None or (known.bf16_peak and matmul > known.bf16_peak.value):
        return {"vendor": "NVIDIA"}  # `gpus_here` lists no others
    names = ("vendor", "generation", "bf16_peak", "fp8_peak", "fp4_peak", "int8_peak", "tdp")
    return {name: getattr(known, name) for name in names}


def _link(
    found: Mapping[str, float], count: int, bandwidth: Figure, today: str
) -> tuple[Figure, Figure]:
    if count < 2:
        source = "one device has no link; half of its memory bandwidth, as a copy would have"
        return Figure(bandwidth.value / 2, _ALONE, source, today), Figure(
            0.0, _ALONE, source, today
        )
    texts = {"link_bandwidth": "16 MiB", "link_latency": "one number"}
    shared = f"by the wall clock, of which they had their cores {found['cores_frac']:.0%}"
    rate, latency = (
        Figure(_rounded(found[key]), "measured", f"all-reduce of {text}, {shared}", today)
        for key, text in texts.items()
    )
    return rate, latency


def _mebibytes(num_bytes: float) -> float:
    return float(int(num_bytes) >> 20 << 20)


def _rounded(value: float) -> float:
    """To the digits that a measurement has."""
    return float(f"{value:.4g}")


def _other_machines(count: int) -> str:
    return "there is no other machine" if count > 1 else "there is no other device"


def _title(device: str, count: int, threads: int) -> str:
    if device == "cuda":
        return f"{gpus_here()[0].split(',')[0]}, 1 of {count}"
    return f"{processor_name()}, 1 of {count} processes with {threads} of its cores"


def _topology() -> str:
    flags = [flag for flag in MATRIX_FLAGS if flag in processor_flags()]
    return (
        f"{physical_cores()} physical of {num_cores()} logical cores, {usable_cores():g} usable, "
        f"{numa_nodes()} NUMA nodes; {' '.join(flags) or 'no matrix instructions'}"
    )


def _limit() -> str:
    limit, _ = cgroup_memory_bytes()
    if limit is None:
        return "no limit of a control group"
    return f"within a control group's limit of {limit / 2**30:.4g} GiB"
