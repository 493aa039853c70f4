"""Clusters of several kinds and sites: the slowest part, the narrowest link, and bad files."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import JobError, PhalanxError
from phalanx.hardware import Cluster, MixedCluster, read_cluster, read_machine
from phalanx.hardware.write import machine_toml
from tests.fuzz.inputs import near_tables, outcome, to_toml

NAMES = ["h100", "a100-80g", "l40s", "mi300x", "v5p", "h20"]
FILE = """
[[groups]]
site = "paris"
machine = "h100"
devices = 64
[[groups]]
site = "oslo"
machine = "h100"
devices = 32
devices_per_node = 4
network_bandwidth = "200 Gbit/s"
price = "2.5 $/h"
[[groups]]
site = "rome"
machine = "a100-80g"
devices = 16
[[links]]
between = ["paris", "oslo"]
bandwidth = "100 Gbit/s"
latency = "20 ms"
[[links]]
between = ["rome", "oslo"]
bandwidth = "40 Gbit/s"
latency = "30 ms"
"""
_numbers = count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("clusters")


def write(folder, text):
    path = folder / f"c{next(_numbers)}.toml"
    path.write_text(text)
    return str(path)


def test_shorthand_of_two_kinds_has_the_worst_of_both():
    found = read_cluster("8xh100 + 16xA100-80g")
    assert isinstance(found, MixedCluster) and str(found) == "8xh100+16xa100-80g"
    h100, a100, one = read_machine("h100"), read_machine("a100-80g"), found.as_one()
    assert (one.num_devices, str(one)) == (24, "24xh100+a100-80g")
    assert one.machine.matmul == a100.matmul
    assert one.machine.usable_bytes == a100.usable_bytes < h100.usable_bytes
    assert one.machine.link_bandwidth == a100.link_bandwidth
    # all 16 A100 have 25 GB/s each, all 8 H100 50 GB/s: 400 GB/s join the two, 50 for each H100
    assert found.slowest_link().bytes_per_s == 400e9
    assert one.machine.network_bandwidth.value == 25e9
    assert found.usd_per_h == pytest.approx(8 * 6.88 + 16 * 3.431)
    assert one.machine.usd_per_h * 24 == pytest.approx(found.usd_per_h)
    assert (one.machine.generation, one.machine.vendor) == ("", "NVIDIA")


def test_sites_meet_over_the_widest_way_of_links(folder):
    found = read_cluster(write(folder, FILE))
    assert isinstance(found, MixedCluster) and found.sites == ("paris", "oslo", "rome")
    assert found.link_between(0, 1).bytes_per_s == 12.5e9
    assert found.link_between(0, 1).latency_s == pytest.approx(0.020015)
    over_oslo = found.link_between(0, 2)
    assert (over_oslo.bytes_per_s, over_oslo.latency_s) == (5e9, pytest.approx(0.050015))
    assert found.slowest_link() == over_oslo
    one = found.as_one().machine
    assert one.network_bandwidth.value == 5e9 / 16  # what is left for each device of rome
    assert one.network_latency.value == over_oslo.latency_s
    assert one.devices_per_domain == 4
    oslo = found.parts[1].machine
    assert (oslo.price.value, oslo.network_bandwidth.value) == (2.5, 25e9)
    assert oslo.price.source.startswith("the cluster file")
    assert oslo.spot_price is None and oslo.second_price is None and not oslo.price_terms
    assert found.to_dict()["num_devices"] == 112


def test_one_group_is_a_plain_cluster_and_a_machine_file_stays_one(folder):
    text = '[[groups]]\nmachine = "h100"\ndevices = 8\ndevices_per_node = 4\n'
    found = read_cluster(write(folder, text))
    assert isinstance(found, Cluster) and found.num_devices == 8
    assert found.machine.devices_per_domain == 4
    assert read_cluster("8xh100") == Cluster(read_machine("h100"), 8)


def test_a_file_may_have_any_name(folder):
    path = folder / "two sites (draft) +1.toml"
    path.write_text(FILE)
    assert read_cluster(str(path)).num_devices == 112
    path.write_text(machine_toml(read_machine("h100")))
    assert read_cluster(f"8x{path}").num_devices == 8


def test_a_machine_file_is_looked_for_beside_the_cluster_file(folder):
    (folder / "own.toml").write_text(machine_toml(read_machine("h20")))
    found = read_cluster(write(folder, '[[groups]]\nmachine = "own.toml"\ndevices = 8\n'))
    assert found.machine.memory == read_machine("h20").memory


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('bandwidth = "40 Gbit/s"', 'bandwidth = "0 Gbit/s"', "must be above 0"),
        ('bandwidth = "40 Gbit/s"', "bandwidth = nan", "finite"),
        ('bandwidth = "40 Gbit/s"', 'bandwidth = "40 GiB"', "no unit"),
        ('latency = "30 ms"', 'latency = "-30 ms"', "at least 0"),
        ('price = "2.5 $/h"', "price = nan", "finite"),
        ('price = "2.5 $/h"', 'price = "0 $/h"', "must be above 0"),
        ('network_bandwidth = "200 Gbit/s"', "network_bandwidth = 0", "must be above 0"),
        ('price = "2.5 $/h"', "price = -1.0", "must be above 0"),
        ("devices = 64", "devices = -64", "at least 1"),
        ("devices = 64", "devices = 0", "at least 1"),
        ("devices = 64", "devices = 10_000_000", "at most"),
        ("devices = 32", "devices = 30", "no whole number of nodes"),
        ("devices_per_node = 4", "devices_per_node = -4", "at least 1"),
        ('machine = "a100-80g"', 'machine = "a100"', "no such machine"),
        ('site = "rome"\nmachine = "a100-80g"', 'site = "oslo"\nmachine = "h100"', "twice"),
        ('between = ["rome", "oslo"]', 'between = ["rome", "bonn"]', "no such site"),
        ('between = ["rome", "oslo"]', 'between = ["rome", "rome"]', "one site"),
        ('between = ["rome", "oslo"]', 'between = ["oslo", "paris"]', "joined already"),
        ('between = ["rome", "oslo"]', 'between = ["oslo"]', "list of 2"),
        ('site = "rome"', 'site = "bonn"', "no such site"),
        ('[[links]]\nbetween = ["rome"', '[[lines]]\nbetween = ["rome"', "no such key"),
    ],
    ids=lambda value: value[-22:],
)
def test_bad_cluster_files_are_refused_in_one_line(folder, old, new, says):
    assert old in FILE
    with pytest.raises(JobError) as caught:
        read_cluster(write(folder, FILE.replace(old, new, 1)))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_sites_that_no_link_joins_are_refused(folder):
    text = FILE[: FILE.rindex("[[links]]")]
    with pytest.raises(JobError, match="no link joins 'oslo' and 'rome'"):
        read_cluster(write(folder, text))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8xh100+8xh100", "16xh100"),
        ("8xh100+", "COUNTxMACHINE"),
        ("8xh100+a100-80g", "COUNTxMACHINE"),
        ("+8xh100", "COUNTxMACHINE"),
        ("8xh100+0xl40s", "at least one"),
        ("8xh100+8xl41", "no such machine"),
        ("9000000xh100+9000000xl40s", "at most"),
        ("./none.toml", "No such file"),
    ],
)
def test_bad_shorthand_is_refused_in_one_line(text, says):
    with pytest.raises(JobError) as caught:
        read_cluster(text)
    assert says in str(caught.value) and "\n" not in str(caught.value)


parts = st.lists(
    st.tuples(st.integers(1, 5000), st.sampled_from(NAMES)),
    min_size=2, max_size=5, unique_by=lambda part: part[1],
)  # fmt: skip


@given(parts=parts)
def test_as_one_is_never_better_than_any_part(parts):
    found = read_cluster("+".join(f"{number}x{name}" for number, name in parts))
    one = found.as_one()
    assert one.num_devices == sum(number for number, _ in parts) == found.num_devices
    for _, name in parts:
        own = read_machine(name)
        for figure in ("matmul", "memory_bandwidth", "link_bandwidth", "network_bandwidth"):
            assert getattr(one.machine, figure).value <= getattr(own, figure).value
        assert one.machine.usable_bytes <= own.usable_bytes
        assert one.machine.network_latency.value >= own.network_latency.value
        assert one.machine.devices_per_domain <= own.devices_per_domain
    prices = [read_machine(name).usd_per_h for _, name in parts]
    assert min(prices) <= one.machine.usd_per_h or one.machine.price is None
    assert one.machine.usd_per_h <= max(prices) * (1 + 1e-12)


@given(text=st.text("8xh100+l40sa., /") | st.text())
def test_any_text_is_a_cluster_or_one_clear_line(text):
    assert isinstance(outcome(read_cluster, text), Cluster | MixedCluster | PhalanxError)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_cluster_file_is_a_cluster_or_one_clear_line(folder, data):
    import tomllib

    table = data.draw(near_tables(tomllib.loads(FILE)))
    found = outcome(read_cluster, write(folder, to_toml(table)))
    assert isinstance(found, Cluster | MixedCluster | PhalanxError)
    if isinstance(found, MixedCluster):
        assert found.slowest_link().bytes_per_s > 0 and found.as_one().num_devices > 0
