"""Machines: every number has a unit, a source and a date, or the file is refused."""

import math
from pathlib import Path

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
        ("\u0660xh100", "registry/unknown"),  # a zero of another script
        ("v5p-\u0660", "registry/unknown"),
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
        ('value = "989 TFLOP/s"', 'value = "700 TFLOP/s"', "job/bad-value"),  # peak below matmul
        ('value = "1979 TFLOP/s"', 'value = "1400 TFLOP/s"', "job/bad-value"),
        ('value = "1.25 $/h"', 'value = "7 $/h"', "job/bad-value"),  # spot above on demand
        ('value = "6.88 $/h"', "value = nan", "job/bad-value"),
        ('value = "700 W"', 'value = "700 J"', "unit/unknown"),
        ('topology = "NVLink4 all-to-all switch"', "topology = 4", "job/bad-value"),
        ("[price]", "[bf16_matmul]", "job/unknown-key"),
        (
            "devices_per_domain = 8",
            'half_precision = "fp32"\ndevices_per_domain = 8',
            "job/bad-value",
        ),
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


def test_a_precision_has_its_measured_rate_or_its_peak_in_the_share_of_bf16():
    h100, mi300x, a100 = (read_machine(name) for name in ("h100", "mi300x", "a100-80g"))
    assert h100.matmul_of("bf16") is h100.matmul_of("fp16") is h100.matmul
    assert (h100.matmul_of("fp8").kind, h100.matmul_flops_per_s("fp8")) == ("measured", 1402.6e12)
    fp8 = mi300x.matmul_of("fp8")  # never measured: as 668.4 of 1307 in bf16
    assert fp8.value == pytest.approx(2615e12 * 668.4 / 1307) and fp8.kind == "assumption"
    assert "0.511 of the peak" in fp8.source
    assert a100.matmul_of("int8").value == pytest.approx(2 * 271.2e12)
    without = a100.matmul_of("fp8")
    assert without.value == 271.2e12 and without.source.startswith("no fp8 products")
    with pytest.raises(JobError, match="fp4"):
        h100.matmul_of("int3")


@pytest.mark.parametrize("name", machine_names())
def test_no_rate_of_a_shipped_machine_is_above_its_peak_and_fewer_bits_are_no_slower(name):
    machine = read_machine(name)
    rates = [machine.matmul_flops_per_s(each) for each in ("bf16", "fp8", "fp4")]
    assert rates[0] <= rates[1] and rates[0] <= rates[2]
    if machine.bf16_peak:
        assert 0.5 <= rates[0] / machine.bf16_peak.value <= 1
    if machine.fp8_peak:
        assert 0.45 <= rates[1] / machine.fp8_peak.value <= 1


@pytest.mark.parametrize("name", machine_names())
def test_fewer_bits_have_no_lower_peak_and_power_is_above_zero(name):
    machine = read_machine(name)
    peaks = [machine.bf16_peak, machine.fp8_peak, machine.fp4_peak]
    known = [peak.value for peak in peaks if peak]
    assert known == sorted(known)
    if machine.int8_peak and machine.bf16_peak:
        assert machine.int8_peak.value >= machine.bf16_peak.value
    assert machine.tdp is None or machine.tdp.value > 0


# fp32 on vector units, TFLOP/s, and how many times that matrix units do dense with sums in fp32; of
# a figure with sparsity it would be twice as many
DENSE = {
    "t4": (8.1, 8), "v100-16g": (15.7, 8), "v100-32g": (15.7, 8), "a30": (10.3, 16),
    "a10": (31.2, 4), "a40": (37.4, 4), "rtx-a5000": (27.8, 4), "rtx-a6000": (38.7, 4),
    "rtx-6000-ada": (91.1, 4), "l40s": (91.6, 4), "l40": (90.5, 2), "rtx5090": (104.8, 2),
    "rtx4090": (82.6, 2), "rtx3090": (35.6, 2),
}  # fmt: skip


@pytest.mark.parametrize(("name", "fp32_tflops", "times"), [(k, *v) for k, v in DENSE.items()])
def test_peaks_of_cards_are_dense(name, fp32_tflops, times):
    peak = read_machine(name).bf16_peak.value / 1e12
    assert peak == pytest.approx(times * fp32_tflops, rel=0.02)


def test_devices_before_ampere_multiply_16_bits_in_fp16_and_say_so():
    halves = {name: read_machine(name).half for name in machine_names()}
    old = {name for name, half in halves.items() if half == "fp16"}
    assert old == {"t4", "v100-16g", "v100-32g", "rtx2080", "titan-rtx"}
    assert {read_machine(name).generation for name in old} == {"Volta", "Turing"}
    for name in old:
        machine = read_machine(name)
        assert not machine.has_bf16 and machine.bf16_peak.source.startswith("fp16, dense")
        assert machine.matmul_of("bf16").source.startswith("fp16, for there is no bf16")


def test_a_price_that_is_not_known_is_infinite_and_none_is_made_up():
    assert read_machine("h20").price is None and read_machine("h20").usd_per_h == math.inf
    assert "price" not in read_machine("h20").figures()
    assert read_machine("h100").spot_price.value < read_machine("h100").second_price.value


def test_a_machine_with_an_fp8_peak_says_its_bf16_peak_too(tmp_path):
    text = _text("mi300x")
    start, end = text.index("[bf16_peak]"), text.index("[fp8_peak]")
    path = tmp_path / "mine.toml"
    path.write_text(text[:start] + text[end:])
    with pytest.raises(JobError, match=r"mine\.toml: bf16_peak"):
        read_machine(str(path))


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


def test_the_page_of_machines_counts_them_and_where_their_figures_come_from():
    page = " ".join((Path(__file__).parents[2] / "docs/machines.md").read_text().split())
    machines = [read_machine(name) for name in machine_names()]
    kinds = [machine.matmul.kind for machine in machines]
    assert f"{len(machines)} machines come with Phalanx" in page
    measured, shares = kinds.count("measured"), kinds.count("assumption")
    assert f"measured by others for {measured}; for {shares} the bf16 peak" in page
    assert f"for the {kinds.count('published')} TPUs the peak itself" in page
    shown = sum(machine.memory.kind == "measured" for machine in machines)
    assert f"showed for {shown}; else nominal" in page
    assert f"{sum(not machine.price for machine in machines)} have no public price" in page


@pytest.mark.parametrize(("name", "devices"), [("h100", 8), ("l40s", 8), ("gb200", 4), ("v5p", 4)])
def test_a_host_is_what_providers_rent_out(name, devices):
    assert read_machine(name).devices_per_host == devices
