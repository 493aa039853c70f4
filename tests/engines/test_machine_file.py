"""This machine as a file: measured by two processes, read back, and asked for by its path."""

from math import isfinite

import pytest

from phalanx.doctor.machine import memory_bytes
from phalanx.engines import machine_file
from phalanx.engines.machine_file import (
    calibrate_machine,
    numa_nodes,
    physical_cores,
    write_machine,
)
from phalanx.errors import JobError
from phalanx.hardware import read_cluster, read_machine
from phalanx.planner.clusters import asked_clusters


@pytest.mark.dist
def test_two_processes_measure_a_machine_that_a_plan_can_ask_for(tmp_path):
    found = calibrate_machine("mine", num_devices=2, seconds=0.1)
    path = tmp_path / "mine.toml"
    write_machine(found, path)
    assert read_machine(str(path)) == found and found.devices_per_domain == 2
    for name, figure in found.figures().items():
        assert isfinite(figure.value) and figure.value > 0 and figure.source, name
    measured = {name for name, figure in found.figures().items() if figure.kind == "measured"}
    assert measured == {
        "matmul", "memory", "memory_bandwidth", "link_bandwidth", "link_latency",
        "launch_overhead", "host_memory",
    }  # fmt: skip
    assert 2 * found.memory.value < memory_bytes()[0]  # free, not built in
    assert 1e9 < found.matmul.value < 1e14 and 1e8 < found.memory_bandwidth.value < 1e12
    (asked,) = asked_clusters(f"2x{path}")
    assert asked.cluster == read_cluster(f"2x{path}") and asked.cluster.num_devices == 2
    assert asked.cluster.machine.matmul_flops_per_s() == found.matmul.value


def test_one_device_has_an_assumed_link_and_a_measured_one_says_how(monkeypatch):
    figures = {
        "matmul": 2.34567e11, "memory_bandwidth": 2e10, "launch_overhead": 4e-6,
        "cores_frac": 0.5, "threads": 2.0,
    }  # fmt: skip
    alone = machine_file._machine("here", "cpu", 1, 8 * 2.0**30, figures)
    assert (alone.link_bandwidth.value, alone.link_bandwidth.kind) == (1e10, "assumption")
    assert alone.matmul.value == 2.346e11 and "50%" in alone.matmul.source
    assert alone.memory.value == 8 * 2.0**30
    links = {"link_bandwidth": 1e9, "link_latency": 2e-4}
    pair = machine_file._machine("here", "cpu", 2, 8 * 2.0**30, figures | links)
    assert (pair.link_bandwidth.value, pair.link_bandwidth.kind) == (1e9, "measured")
    assert pair.memory.value == 4 * 2.0**30 and pair.network_bandwidth.kind == "assumption"
    monkeypatch.setattr(machine_file, "cgroup_memory_bytes", lambda: (2.0**32, 0.0))
    limited = machine_file._machine("here", "cpu", 1, 2.0**31, figures)
    assert "limit of 4 GiB" in limited.memory.source


def test_a_gpu_has_the_maker_and_the_peaks_of_its_kind_not_of_the_processor(monkeypatch):
    figures = {
        "matmul": 7e14, "memory_bandwidth": 3e12, "launch_overhead": 4e-6, "cores_frac": 1.0,
        "threads": 1.0, "memory": 8e10, "total_memory": 8.5e10,
    }  # fmt: skip
    monkeypatch.setattr(machine_file, "gpus_here", lambda: ("NVIDIA H100 80GB HBM3, 81559 MiB",))
    found, h100 = machine_file._machine("here", "cuda", 1, 1e11, figures), read_machine("h100")
    assert (found.vendor, found.generation) == ("NVIDIA", "Hopper")
    assert (found.bf16_peak, found.fp8_peak) == (h100.bf16_peak, h100.fp8_peak)
    assert found.matmul.value == 7e14 and found.matmul.kind == "measured"
    faster = machine_file._machine("here", "cuda", 1, 1e11, figures | {"matmul": 2e15})
    assert (faster.vendor, faster.bf16_peak) == ("NVIDIA", None)


def test_cores_are_counted_once_and_nodes_at_least_once(tmp_path, monkeypatch):
    for core, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    (tmp_path / "cpu/cpufreq").mkdir()
    monkeypatch.setattr(machine_file, "_SYSTEM", tmp_path)
    assert physical_cores() == 2 and numa_nodes() == 1
    for node in range(3):
        (tmp_path / f"node/node{node}").mkdir(parents=True)
    assert numa_nodes() == 3


def test_what_cannot_be_measured_or_written_is_refused_before_a_process_starts(tmp_path):
    for devices in (-1, 10**6):
        with pytest.raises(JobError, match="this machine has"):
            calibrate_machine(num_devices=devices)
    for name, says in (("mine.json", "toml"), ("no/such/folder/mine.toml", "No such file")):
        with pytest.raises(JobError, match=says):
            write_machine(read_machine("h100"), tmp_path / name)
