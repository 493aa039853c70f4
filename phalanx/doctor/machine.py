"""The machine as the kernel describes it: processor, cores, memory, limits, GPUs, folders.

Every function answers on a system without /proc too, with the less exact number that Python has.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path

MATRIX_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "sve", "bf16", "i8mm")
_CGROUPS = Path("/sys/fs/cgroup")


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:  # not this kind of system
        return ""


def _cpuinfo(*keys: str) -> str:
    for line in _text("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""


def processor_name() -> str:
    """The model, or the architecture where the kernel does not say."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def processor_flags() -> set[str]:
    """Instruction set extensions by the kernel's names; empty where it does not say."""
    return set(_cpuinfo("flags", "Features").split())


def num_cores() -> int:
    """Logical cores of the machine."""
    return os.cpu_count() or 1


def usable_cores() -> float:
    """Cores that this process may use: affinity and cgroup quota, whichever is less."""
    affinity = getattr(os, "sched_getaffinity", None)
    usable = float(len(affinity(0))) if affinity else float(num_cores())
    for folder in _cgroup_folders("cpu"):
        words = _text(folder / "cpu.max").split()  # version 2: "quota period"
        if not words:  # version 1: a file each
            words = [*_text(folder / "cpu.cfs_quota_us").split()]
            words += _text(folder / "cpu.cfs_period_us").split()
        if len(words) == 2 and words[0] not in ("max", "-1"):
            usable = min(usable, int(words[0]) / int(words[1]))
    return usable


def process_age_s() -> float:
    """Seconds since this process was created; 0 where the kernel does not say."""
    fields = _text("/proc/self/stat").rpartition(")")[2].split()  # its name may hold spaces
    uptime = _text("/proc/uptime").split()
    if len(fields) < 20 or not uptime:
        return 0.0
    return max(0.0, float(uptime[0]) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))


def memory_bytes() -> tuple[float, float]:
    """Total and available memory of the machine."""
    table = {}
    for line in _text("/proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        table[key] = float(value.split()[0]) * 1024
    if "MemAvailable" in table:
        return table["MemTotal"], table["MemAvailable"]
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return total, total


def cgroup_memory_bytes() -> tuple[float | None, float]:
    """The tightest memory limit of this process's control groups, and what is used of it.

    The limit is None where there is none below the machine's memory.
    """
    limit, used, total = None, 0.0, memory_bytes()[0]
    for folder in _cgroup_folders("memory"):
        text = _text(folder / "memory.max") or _text(folder / "memory.limit_in_bytes")
        if text.strip().isdigit() and float(text) < (limit or total):
            limit = float(text)
            usage = _text(folder / "memory.current") or _text(folder / "memory.usage_in_bytes")
            used = float(usage or 0)
    return limit, used


def available_bytes() -> float:
    """Memory that this process may still take: of the machine, within its cgroup."""
    limit, used = cgroup_memory_bytes()
    available = memory_bytes()[1]
    return available if limit is None else min(available, limit - used)


def _cgroup_folders(controller: str) -> list[Path]:
    """Folders of this process's group and its parents, in version 2 and in version 1."""
    folders = []
    for line in _text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = _CGROUPS
        elif controller in controllers.split(","):
            joint = _CGROUPS / controllers
            root = joint if joint.is_dir() else _CGROUPS / controller
        else:
            continue
        group = root / path.lstrip("/")
        folders += [group, *[parent for parent in group.parents if parent.is_relative_to(root)]]
    return folders


def shared_memory_bytes() -> int | None:
    """Size of /dev/shm, or None without one."""
    if not os.path.isdir("/dev/shm"):
        return None
    numbers = os.statvfs("/dev/shm")
    return numbers.f_frsize * numbers.f_blocks


def _output_of(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # a tool that is broken is a tool that is absent
        return ""
    return done.stdout if done.returncode == 0 else ""


def gpus() -> list[str]:
    """One line per GPU that a vendor's own tool reports; a device file counts as "unknown"."""
    query = "--query-gpu=name,memory.total,driver_version"
    lines = _output_of("nvidia-smi", query, "--format=csv,noheader").splitlines()
    found = [", driver ".join(line.strip().rsplit(", ", 1)) for line in lines if line.strip()]
    if found:
        return found
    if Path("/dev/nvidia0").exists():
        found.append("NVIDIA, unknown: nvidia-smi does not answer")
    if Path("/dev/kfd").exists():
        found.append("AMD, seen by the kernel driver")
    return found


def compiler_version() -> str:
    """First line of `g++ --version`, or "" without g++."""
    return next(iter(_output_of("g++", "--version").splitlines()), "")


def has_python_headers() -> bool:
    """Whether Python.h of this interpreter is installed."""
    folders = (sysconfig.get_path("include"), sysconfig.get_path("platinclude"))
    return any((Path(folder) / "Python.h").is_file() for folder in folders)


def cache_folders() -> dict[str, Path]:
    """Where downloaded models and prepared ones are kept, by Hugging Face's own variables."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    home = Path(os.environ.get("HF_HOME", cache / "huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    return {"model cache": hub, "phalanx cache": cache / "phalanx"}


def is_offline() -> bool:
    """Whether Hugging Face's offline mode is on."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def free_disk_bytes(folder: Path) -> int:
    """Free space where `folder` is or would be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
