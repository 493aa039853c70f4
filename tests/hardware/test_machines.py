"""Machines: every number has a unit, a source and a date, or the file is refused."""

import pytest

from phalanx.errors import JobError
from phalanx.hardware import machine_names, parse_cluster, read_machine


@pytest.mark.parametrize("name", machine_names())
def test_every_figure_is_positive_and_tells_its_source_and_date(name):
    for figure in read_machine(name).figures().values():
        assert figure.value > 0 and figure.source and figure.date
        assert figure.kind in ("measured", "published", "assumption")


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("8xh100", 8, "h100"), ("H100", 1, "h100"), ("4*v5p", 4, "v5p"), ("v5p-8", 4, "v5p"),
        ("V6e-8", 8, "v6e"), ("16x a100-80g", 16, "a100-80g"), ("a100-40g", 1, "a100-40g"),
    ],
)  # fmt: skip
def test_cluster_shorthand(text, count, name):
    cluster = parse_cluster(text)
    assert (cluster.num_devices, cluster.machine.name) == (count, name)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("8xh10", "registry/unknown"),
        ("0xh100", "job/bad-value"),
        ("00xh100", "job/bad-value"),
        ("8 h100", "job/bad-value"),
        ("10000001xh100", "job/bad-value"),
        ("1" * 5000 + "xh100", "job/bad-value"),
        ("8x" + "a" * 5000, "registry/unknown"),
        ("8x" + "a" * 5000 + ".toml", "registry/unknown"),
        ("8x../hardware/h100", "registry/unknown"),
    ],
    ids=lambda value: value[-18:],
)
def test_bad_clusters_are_refused_with_a_way_out(text, code):
    with pytest.raises(JobError) as caught:
        parse_cluster(text)
    assert caught.value.code == code and caught.value.legal


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ('value = "79.65 GiB"', 'value = "80 GBit"', "unit/unknown"),
        ("[price]", "[prize]", "job/unknown-key"),
        ("devices_per_domain = 8", "", "job/missing"),
        ('kind = "measured"', 'kind = "guess"', "job/bad-value"),
        ('date = "2025"', "", "job/bad-value"),
        ("value = 0.92", "value = 1.5", "job/bad-value"),
        ("value = 0.92", "value = 0", "job/bad-value"),
        ("value = 0.92", "value = nan", "job/bad-value"),
        (
            "devices_per_domain = 8",
            "devices_per_domain = 8\ncores_per_device = -1",
            "job/bad-value",
        ),
        ("[memory]", "[memory", "job/syntax"),
        ("devices_per_domain = 8", "devices_per_domain = 0", "job/bad-value"),
        ("devices_per_domain = 8", "devices_per_domain = 1.5", "job/bad-value"),
        ("devices_per_domain = 8", "devices_per_domain = inf", "job/bad-value"),
        ("devices_per_domain = 8", "devices_per_domain = [8]", "job/bad-value"),
        ("devices_per_domain = 8", "devices_per_domain = 'x'", "job/bad-value"),
        ('value = "79.65 GiB"', "value = nan", "job/bad-value"),
        ('value = "79.65 GiB"', 'value = "0 GB"', "job/bad-value"),
        ('value = "5 us"', 'value = "-5 us"', "job/bad-value"),
        ('date = "2025"', "date = 2025-01-01", "job/bad-value"),
        ("[memory]", "x = " + "[" * 50_000 + "\n[memory]", "job/syntax"),
    ],
    ids=lambda value: value[:28],
)
def test_incomplete_machine_files_are_refused(tmp_path, old, new, code):
    source = _text("h100")
    assert old in source
    path = tmp_path / "mine.toml"
    path.write_text(source.replace(old, new, 1))
    with pytest.raises(JobError) as caught:
        read_machine(str(path))
    assert caught.value.code == code


def test_a_file_that_does_not_say_how_much_memory_is_usable_gets_an_assumption(tmp_path):
    text = _text("h100")
    start = text.index("[usable_memory_frac]")
    path = tmp_path / "mine.toml"
    path.write_text(text[:start] + text[text.index("[memory_bandwidth]") :])
    found = read_machine(str(path)).usable_memory_frac
    assert (found.value, found.kind) == (0.9, "assumption") and found.source
    assert read_machine("h100").usable_bytes == 0.92 * 79.65 * 2**30


def test_a_machine_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xff")
    with pytest.raises(JobError) as caught:
        read_machine(str(path))
    assert caught.value.code == "job/syntax"


def _text(name):
    from importlib.resources import files

    return (files("phalanx.hardware") / f"{name}.toml").read_text()
