"""Lists of clusters as users write them."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.errors import JobError, PhalanxError
from phalanx.hardware import read_machine
from phalanx.hardware.write import machine_toml
from phalanx.planner.clusters import asked_clusters


def test_clusters_are_read_in_their_order_and_a_slice_says_how_many_chips_it_is():
    found = asked_clusters("2xH100, 16x a100-80g,v5p-8,v6e-8")
    assert [str(each.cluster) for each in found] == ["2xh100", "16xa100-80g", "4xv5p", "8xv6e"]
    assert [each.note for each in found[:2]] == ["", ""]
    assert found[2].note.startswith("v5p-8 counts TensorCores, 2 to a chip: 4 chips; a price")
    assert found[3].note.startswith("v6e-8: a price")  # this name counts chips


def test_names_that_people_give_are_read_and_it_is_said_as_what():
    found = asked_clusters("8xA100,4xRTX 4090,16xMI250")
    assert [str(each.cluster) for each in found] == ["8xa100-80g", "4xrtx4090", "16xmi250x"]
    assert found[0].note == ("8xA100 is read as 8xa100-80g; there are a100-40g, a100-pcie as well")
    with pytest.raises(JobError, match="a100-40g"):
        asked_clusters("8xA100-20GB")  # another size of memory is another machine


def test_here_is_the_machine_that_was_measured_in_this_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError, match="phalanx lab calibrate -o here"):
        asked_clusters("8xh100,here")
    (tmp_path / "here.toml").write_text(machine_toml(read_machine("l40s")))
    found = asked_clusters("8xh100,here")[1]
    assert (found.cluster.num_devices, found.cluster.machine.name) == (1, "here")
    assert found.note.startswith("all of here.toml, measured on 20")
    (tmp_path / "here.toml").write_text(machine_toml(read_machine("h100")))  # measured again
    assert asked_clusters("here")[0].cluster.num_devices == 8


def test_a_mixed_cluster_is_asked_for_as_its_slowest_part_and_says_so():
    (found,) = asked_clusters("8xh100+8xa100-80g")
    assert found.cluster.num_devices == 16 and found.mixed is not None
    assert [str(part) for part in found.mixed.parts] == ["8xh100", "8xa100-80g"]
    assert found.note.startswith("8xh100 and 8xa100-80g: a step waits for the slowest device")
    assert "1600 Gbit/s, 0.015 ms" in found.note
    assert asked_clusters("8xh100")[0].mixed is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "separated by commas"),
        ("2xh100,", "separated by commas"),
        (",".join(["h100"] * 33), "separated by commas"),
        ("2xh100,2xH100", "the same as 2xh100"),
        ("v5p-8,4xv5p", "the same as v5p-8"),
        ("2xh100,here", "phalanx run"),
        ("HERE", "phalanx run"),
        ("v5p-7", "v5p-8"),
        ("2xv5p-8", "v5p"),
        ("h100-8", "h100"),
        ("v5p-0", "at least one"),
        ("0xh100", "at least one"),
    ],
)
def test_what_is_no_list_of_clusters_is_refused_with_a_way_out(text, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a folder without here.toml
    with pytest.raises(JobError) as raised:
        asked_clusters(text)
    assert says in str(raised.value) and "\n" not in str(raised.value)


@given(
    text=st.text() | st.lists(st.sampled_from(["2xh100", "v5p-8", "", "here", "x"])).map(",".join)
)
@example("," * 1000)
@example("v5p-" + "9" * 5000)
@example("v5p-\u0661")
def test_any_text_is_a_list_of_clusters_or_refused(text):
    try:
        found = asked_clusters(text)
    except PhalanxError as error:
        assert "\n" not in str(error)
    else:
        assert len(found) == text.count(",") + 1


@pytest.mark.parametrize(
    ("text", "cluster", "says"),
    [
        ("a6000", "1xrtx-a6000", "a6000 is read as 1xrtx-a6000"),
        ("4xA10", "4xa10", ""),
        ("RTX-5090", "1xrtx5090", "RTX-5090 is read as 1xrtx5090"),
        ("p5.48xlarge", "8xh100", "p5.48xlarge is 8xh100; the price is the machine's"),
        ("2xg5.12xlarge", "8xa10g", "8xa10g on 2 hosts of 4, 10 Gbit/s a device between them"),
        ("8xT4", "8xt4", "8xT4 has no bf16 units: products of 16 bits are priced in fp16"),
        ("g4dn.12xlarge", "4xt4", "rents it out; g4dn.12xlarge has no bf16 units"),
    ],
)
def test_cards_and_hosts_are_read_as_people_write_them_and_it_is_said(text, cluster, says):
    (found,) = asked_clusters(text)
    assert str(found.cluster) == cluster
    assert says in found.note if says else found.note == ""


def test_a_cluster_with_one_part_without_bf16_has_none():
    (found,) = asked_clusters("4xt4+4xl4")
    assert not found.cluster.machine.has_bf16 and "no bf16 units" in found.note


def test_a_bare_name_with_another_word_is_refused_with_the_nearest():
    with pytest.raises(JobError, match="h100-pcie"):
        asked_clusters("h100-pci")
