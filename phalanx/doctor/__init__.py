"""What this machine has, what it lacks, and what to install: `phalanx doctor` as a function.

Nothing heavy is imported: versions come from package metadata, the machine from the files in which
the kernel describes it. Only `deep` imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.doctor import machine, packages
from phalanx.units import format_bytes

__all__ = ["STATES", "Finding", "examine"]

STATES = ("ok", "limited", "missing")
_SMALL_SHM_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about this machine.

    Attributes:
        topic: what was looked at.
        found: what is there.
        state: "ok"; "limited" (works, with the restriction that `advice` names); "missing".
        advice: what to install or change, and what for ("" when there is nothing to do).
    """

    topic: str
    found: str
    state: str = "ok"
    advice: str = ""


def examine(*, deep: bool = False) -> list[Finding]:
    """Everything `phalanx doctor` prints, in its order.

    Args:
        deep: also import torch and ask it for its devices and backends (1-2 s).
    """
    findings = [_python(), _core(), *map(_extra, packages.EXTRAS)]
    findings += [_processor(), _cores(), _memory(), _shared_memory(), *_gpus()]
    findings += [_compiler(), _headers(), *_caches()]
    return findings + (_torch() if deep else [])


def _python() -> Finding:
    version, wanted = packages.python_version(), packages.PYTHON
    if packages.satisfies(version, wanted):
        return Finding("python", version)
    return Finding("python", version, "missing", f"install Python {wanted}")


def _core() -> Finding:
    lacking = [line for line in packages.CORE if not packages.is_met(line)]
    if not lacking:
        return Finding("core packages", f"all {len(packages.CORE)}")
    found = f"{len(packages.CORE) - len(lacking)} of {len(packages.CORE)}"
    quoted = " ".join(f'"{line}"' for line in lacking)
    return Finding("core packages", found, "missing", f"pip install {quoted}")


def _extra(name: str) -> Finding:
    requirements, purpose = packages.EXTRAS[name]
    found = ", ".join(packages.describe(line) for line in requirements)
    if all(map(packages.is_met, requirements)):
        return Finding(f"extra {name}", found)
    advice = f'pip install "{packages.NAME}[{name}]" for {purpose}'
    return Finding(f"extra {name}", found, "missing", advice)


def _processor() -> Finding:
    flags = machine.processor_flags()
    known = [flag for flag in machine.MATRIX_FLAGS if flag in flags]
    found = f"{machine.processor_name()}; {', '.join(known) or 'no vector extensions known'}"
    if "avx512_bf16" in known or "amx_bf16" in known or "bf16" in known:
        return Finding("processor", found)
    advice = "bf16 is emulated here: train and serve in float32, or expect slow matrix products"
    return Finding("processor", found, "limited", advice)


def _cores() -> Finding:
    usable, present = machine.usable_cores(), machine.num_cores()
    if usable >= present:
        return Finding("cores", f"{present}")
    advice = "fewer cores may be used than the machine has (affinity or cgroup quota)"
    return Finding("cores", f"{usable:g} of {present}", "limited", advice)


def _memory() -> Finding:
    total, free = machine.memory_bytes()
    limit, used = machine.cgroup_memory_bytes()
    found = f"{format_bytes(free)} free of {format_bytes(total)}"
    if limit is None:
        return Finding("memory", found)
    found += f"; cgroup: {format_bytes(used)} used of {format_bytes(limit)}"
    advice = f"a process is killed above {format_bytes(limit)}, whatever the machine has free"
    return Finding("memory", found, "limited", advice)


def _shared_memory() -> Finding:
    num_bytes = machine.shared_memory_bytes()
    if num_bytes is None:
        return Finding("shared memory", "no /dev/shm", "limited", "data loader workers need it")
    found = f"/dev/shm holds {format_bytes(num_bytes)}"
    if num_bytes >= _SMALL_SHM_BYTES:
        return Finding("shared memory", found)
    advice = "processes that share tensors may fail: start the container with --shm-size=2g"
    return Finding("shared memory", found, "limited", advice)


def _gpus() -> list[Finding]:
    gpus = machine.gpus()
    if not gpus:
        return [Finding("gpu", "none", "ok", "")]
    findings = [Finding("gpu", gpu) for gpu in gpus]
    version = packages.installed_version("torch") or ""
    if version.endswith("+cpu"):
        advice = "torch is a build for CPUs: install the build for this GPU from pytorch.org"
        findings.append(Finding("gpu and torch", f"torch {version}", "limited", advice))
    return findings


def _compiler() -> Finding:
    version = machine.compiler_version()
    if version:
        return Finding("compiler", version)
    advice = "apt install g++ for compiled kernels; without it everything runs eager"
    return Finding("compiler", "no g++", "missing", advice)


def _headers() -> Finding:
    if machine.has_python_headers():
        return Finding("python headers", "here")
    advice = "apt install python3-dev for compiled kernels; without it everything runs eager"
    return Finding("python headers", "not found", "missing", advice)


def _caches() -> list[Finding]:
    findings = []
    for name, folder in machine.cache_folders().items():
        state = "exists" if folder.is_dir() else "not there yet"
        free = format_bytes(machine.free_disk_bytes(folder))
        findings.append(Finding(name, f"{folder} ({state}; {free} of disk free)"))
    if machine.is_offline():
        advice = "models come from the cache alone; unset HF_HUB_OFFLINE to download"
        findings.append(Finding("downloads", "offline mode is on", "limited", advice))
    return findings


def _torch() -> list[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return [Finding("import torch", str(error), "missing", "install the extra torch")]
    backends = ("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())
    found = ", ".join(name for name, here in backends if here)
    threads = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    devices = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    return [
        Finding("import torch", f"{torch.__version__}, {threads}"),
        Finding("torch.distributed", found or "no backend", "ok" if found else "missing"),
        Finding("torch devices", ", ".join(["cpu", *devices])),
    ]
