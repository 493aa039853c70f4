"""Hosts by the names that clouds give them."""

import re
from pathlib import Path

import pytest

from phalanx.errors import JobError
from phalanx.hardware import (
    instance_called,
    instance_names,
    machine_names,
    parse_cluster,
    read_cluster,
    read_machine,
)


@pytest.mark.parametrize("name", instance_names())
def test_every_host_has_a_machine_devices_and_a_source(name):
    instance = instance_called(name)
    assert instance.name == name == name.lower() and instance.source
    assert instance.machine in machine_names() and 1 <= instance.devices <= 16
    assert instance.network_gbit_per_s >= 0
    assert parse_cluster(name.upper()).num_devices == instance.devices


def test_no_host_hides_a_machine_and_none_stands_twice():
    assert not set(instance_names()) & set(machine_names())
    table = Path(__file__).parents[2] / "phalanx/hardware/instances.csv"
    assert len(table.read_text().splitlines()) - 1 == len(instance_names())


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("g5.12xlarge", "4xa10g"), ("p4d.24xlarge", "8xa100-40g"), ("p5.48xlarge", "8xh100"),
        ("g6e.48xlarge", "8xl40s"), ("a3-highgpu-8g", "8xh100"), ("a2-ultragpu-8g", "8xa100-80g"),
        ("Standard_ND96isr_H100_v5", "8xh100"), ("nd96isr_h100_v5", "8xh100"),
        ("ml.p5e.48xlarge", "8xh200"), ("2xp5.48xlarge", "16xh100"), ("2 x g4dn.metal", None),
        ("3x p3.8xlarge", "12xv100-16g"), ("gpu_8x_a100_80gb_sxm4", "8xa100-80g"),
    ],
)  # fmt: skip
def test_a_host_stands_for_its_devices(text, cluster):
    if cluster is None:
        with pytest.raises(JobError, match="COUNTxMACHINE"):
            parse_cluster(text)
    else:
        assert str(parse_cluster(text)) == cluster


def test_one_host_is_its_machine_and_several_have_the_network_of_theirs():
    assert parse_cluster("g5.12xlarge") == parse_cluster("4xa10g")
    two = parse_cluster("2xg5.12xlarge").machine
    assert two.devices_per_domain == 4  # PCIe inside a host
    assert two.network_bandwidth.value == pytest.approx(40e9 / 8 / 4)
    assert "40 Gbit/s of a g5.12xlarge / 4" in two.network_bandwidth.source
    efa = parse_cluster("2xp4d.24xlarge").machine  # 4 x 100 Gbit/s for eight
    assert efa.network_bandwidth.value == 50e9 / 8
    assert efa.devices_per_domain == read_machine("a100-40g").devices_per_domain == 8


def test_fast_links_end_at_a_host_that_holds_a_part_of_what_could_share_them():
    assert parse_cluster("2xa3-highgpu-4g").machine.devices_per_domain == 4
    whole = parse_cluster("2xa3-highgpu-8g").machine  # no network is stated
    assert whole.figures() == read_machine("h100").figures() and whole.devices_per_domain == 8
    assert parse_cluster("a2-megagpu-16g").machine.devices_per_domain == 16  # of 8 elsewhere
    rack = parse_cluster("18xa4x-highgpu-4g")  # a domain of 72 spans hosts
    assert (rack.num_devices, rack.machine.devices_per_domain) == (72, 72)


@pytest.mark.parametrize(
    ("text", "devices"),
    [("4xp5.4xlarge", 1), ("2xg6.xlarge", 1), ("2xg5.12xlarge", 4), ("18xa4x-highgpu-4g", 4)],
)
def test_programs_are_started_on_hosts_of_that_size(text, devices):
    assert parse_cluster(text).machine.devices_per_host == devices


def test_hosts_and_machines_make_a_mixed_cluster():
    mixed = read_cluster("1xp5.48xlarge+2xg5.12xlarge")
    assert [str(part) for part in mixed.parts] == ["8xh100", "8xa10g"]


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("p5.48xlarg", "p5.48xlarge"), ("2xp4.24xlarge", "p4d.24xlarge"),
        ("a2-ultragpu-9g", "a2-ultragpu-8g"), ("Standard_ND96isr_H100_v6", "nd96isr_h100_v5"),
        ("t3", "t4"),
    ],
)  # fmt: skip
def test_a_name_that_is_not_known_lists_the_nearest(text, near):
    with pytest.raises(JobError) as caught:
        parse_cluster(text)
    assert caught.value.code == "registry/unknown"
    assert any(near in name for name in caught.value.legal)


def test_more_hosts_than_a_cluster_may_have_devices_are_refused():
    with pytest.raises(JobError, match="1250000xp5") as caught:
        parse_cluster("1250001xp5.48xlarge")
    assert caught.value.code == "job/bad-value"
    assert parse_cluster("1250000xp5.48xlarge").num_devices == 10_000_000


def test_the_page_of_machines_counts_the_hosts():
    page = (Path(__file__).parents[2] / "docs/machines.md").read_text()
    assert re.search(rf"has {len(instance_names())} hosts of AWS", page)
