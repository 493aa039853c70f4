"""The doctor reads the machine right, and says what to install for what is missing."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from phalanx import doctor
from phalanx.doctor import machine, packages

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_requirements_are_those_of_the_project():
    assert packages.NAME == PYPROJECT["name"]
    assert packages.PYTHON == PYPROJECT["requires-python"]
    assert sorted(packages.CORE) == sorted(PYPROJECT["dependencies"])
    extras = {k: v for k, v in PYPROJECT["optional-dependencies"].items() if k != "dev"}
    assert {name: list(lines) for name, (lines, _) in packages.EXTRAS.items()} == extras


@pytest.mark.parametrize(
    ("found", "clauses", "verdict"),
    [
        ("2.13.0+cpu", ">=2.13,<2.14", True),
        ("2.14.0", ">=2.13,<2.14", False),
        ("2.9.1", ">=2.13,<2.14", False),
        ("3.11", ">=3.11", True),
        ("3.9.18", ">=3.11", False),
        ("1.0.0", "==1.0.0", True),
        ("1.0", "==1.0.0", True),
        ("5.20.0rc1", ">=5.20,<6", True),
        ("1.2", "", True),
    ],
)
def test_versions_compare_by_number_not_by_letter(found, clauses, verdict):
    assert packages.satisfies(found, clauses) is verdict


def test_a_missing_extra_names_the_command_and_the_purpose(monkeypatch):
    here = packages.installed_version
    absent = {"fastapi": None, "torch": "2.9.0"}
    monkeypatch.setattr(packages, "installed_version", lambda n: absent.get(n, here(n)))
    findings = {finding.topic: finding for finding in doctor.examine()}
    serve, torch = findings["extra serve"], findings["extra torch"]
    assert serve.state == "missing" and "no fastapi" in serve.found
    assert 'pip install "phalanx-parallel[serve]"' in serve.advice and "HTTP" in serve.advice
    assert torch.state == "missing" and "2.9.0, not >=2.13,<2.14" in torch.found


def test_whatever_is_not_ok_comes_with_advice():
    findings = doctor.examine()
    assert {finding.state for finding in findings} <= set(doctor.STATES)
    assert [f.topic for f in findings if f.state != "ok" and not f.advice] == []


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """A machine described by files: path -> text; what is not named does not exist."""
    files: dict[str, str] = {}
    monkeypatch.setattr(machine, "_text", lambda path: files.get(str(path), ""))
    return files


def test_tightest_cgroup_limit_counts_in_version_2(kernel):
    kernel["/proc/meminfo"] = "MemTotal: 1000 kB\nMemAvailable: 900 kB\n"
    kernel["/proc/self/cgroup"] = "0::/outer/inner\n"
    kernel["/sys/fs/cgroup/outer/memory.max"] = "512000\n"
    kernel["/sys/fs/cgroup/outer/memory.current"] = "1000\n"
    kernel["/sys/fs/cgroup/outer/inner/memory.max"] = "max\n"
    kernel["/sys/fs/cgroup/outer/cpu.max"] = "150000 100000\n"
    assert machine.cgroup_memory_bytes() == (512000.0, 1000.0)
    assert machine.usable_cores() == min(1.5, machine.usable_cores())


def test_cgroup_limits_are_read_in_version_1(kernel):
    kernel["/proc/meminfo"] = "MemTotal: 1000 kB\nMemAvailable: 900 kB\n"
    kernel["/proc/self/cgroup"] = "4:memory:/job\n1:cpu:/\n0::/\n"
    kernel["/sys/fs/cgroup/memory/job/memory.limit_in_bytes"] = "256000\n"
    kernel["/sys/fs/cgroup/memory/job/memory.usage_in_bytes"] = "7\n"
    kernel["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = "50000\n"
    kernel["/sys/fs/cgroup/cpu/cpu.cfs_period_us"] = "100000\n"
    assert machine.cgroup_memory_bytes() == (256000.0, 7.0)
    assert machine.usable_cores() == 0.5


def test_an_unlimited_cgroup_is_no_limit(kernel):
    kernel["/proc/meminfo"] = "MemTotal: 1000 kB\nMemAvailable: 900 kB\n"
    kernel["/proc/self/cgroup"] = "4:memory:/\n"
    kernel["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712\n"
    assert machine.cgroup_memory_bytes()[0] is None


def test_a_processor_without_bf16_is_limited(kernel):
    kernel["/proc/cpuinfo"] = "model name : Old\nflags : sse2 avx2\n"
    found = next(f for f in doctor.examine() if f.topic == "processor")
    assert (found.state, found.found) == ("limited", "Old; avx2")


def test_a_gpu_with_a_build_for_cpus_is_limited(monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: ["NVIDIA H200, 143771 MiB, driver 570.1"])
    monkeypatch.setattr(packages, "installed_version", lambda name: "2.13.0+cpu")
    topics = {f.topic: f for f in doctor.examine()}
    assert (
        topics["gpu and torch"].state == "limited"
        and "pytorch.org" in topics["gpu and torch"].advice
    )


def test_gpu_lines_of_nvidia_smi_keep_name_memory_and_driver(monkeypatch):
    monkeypatch.setattr(machine, "_output_of", lambda *_: "NVIDIA H200, 143771 MiB, 570.1\n" * 2)
    assert machine.gpus() == ["NVIDIA H200, 143771 MiB, driver 570.1"] * 2


def test_the_age_of_a_process_counts_from_its_creation(kernel, monkeypatch):
    monkeypatch.setattr(machine.os, "sysconf", lambda name: 100)
    kernel["/proc/uptime"] = "1000.50 7.0\n"
    kernel["/proc/self/stat"] = "12 (a name) " + "0 " * 19 + "99850 0"
    assert machine.process_age_s() == pytest.approx(2.0)


def test_a_machine_without_proc_still_answers(kernel):
    assert machine.process_age_s() == 0.0
    assert machine.usable_cores() >= 1
    assert machine.memory_bytes()[0] > 0
    assert machine.processor_name()
    assert machine.processor_flags() == set()
