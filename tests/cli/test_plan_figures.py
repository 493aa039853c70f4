"""How hours and dollars are written."""

import json
import math

import pytest

from phalanx.cli._plan_figures import dollars, duration, gb, gib, quantity
from phalanx.cli.app import run


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        ((0.0123, 0.011, 0.015), "12.3 ms (11.0 to 15.0)"),
        ((0.334, 0.1, 0.6), "334 ms (100 to 600)"),
        ((6.0, 5.3, 8.2), "6.0 s (5.3 to 8.2)"),
        ((120.0, 90.0, 150.0), "2.0 min (1.5 to 2.5)"),
        ((4.7e6, 4.2e6, 6.5e6), "1,306 h (1,167 to 1,806)"),
        ((math.inf, 7200.0, math.inf), "no end"),
        ((7200.0, 7200.0, math.inf), "2.0 h (2.0 to no end)"),
    ],
)
def test_times_have_the_unit_of_a_reader(seconds, text):
    assert duration([each / 3600 for each in seconds]) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((0.0301, 0.018, 0.048), "$0.0301 (0.0180 to 0.0480)"),
        ((8.5, 7.0, 9.0), "$8.50 (7.00 to 9.00)"),
        ((1234.0, 1000.0, 2000.0), "$1,234 (1,000 to 2,000)"),
        ((170.2e6, 154e6, 238e6), "$170 M (154 to 238)"),
        ((math.inf, math.inf, math.inf), "price unknown"),
    ],
)
def test_dollars_have_cents_where_they_matter(values, text):
    assert dollars(values) == text


def test_small_sizes_keep_their_digits():
    assert (gb(7.56e5), gb(1.21e8), gb(1.47e9), gb(4.87e12)) == (
        *("0.756 MB", "0.121 GB", "1.47 GB", "4.87 TB"),
    )
    assert (gib(30 * 2**20), gib(9.3 * 2**30)) == ("30.0 MiB", "9.3 GiB")


def test_figures_of_a_machine_have_units():
    assert quantity("memory_bandwidth", 3.35e12) == "3.35 TB/s"
    assert quantity("link_latency", 5e-6) == "5 us"
    assert quantity("tdp", 700.0) == "700 W" and quantity("usable_memory_frac", 0.92) == "0.92"


def test_moments_in_host_memory_are_told_as_memory_of_the_host(capsys, tmp_path):
    file = tmp_path / "plan.json"
    words = ["llama-3.1-8b", "--full", "--seq", "1024", "--global-tokens", "4k", "--on", "1xh100"]
    assert run(["plan", *words, "--json", str(file)]) == 0
    assert run(["plan", *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    cluster = json.loads(file.read_text())["clusters"][0]
    assert cluster["host_state_bytes"] == 8 * 8_030_261_248  # two moments of four bytes
    assert "for moments of each host: 1xh100 59.8 GiB" in text


def test_lower_prices_of_the_same_devices_are_told_beside_that_of_the_list(capsys, tmp_path):
    file = tmp_path / "plan.json"
    words = ["llama-3.1-8b", "--full", "--seq", "1024", "--global-tokens", "64k", "--on", "8xh100"]
    words += ["--tokens", "100M"]
    assert run(["plan", *words, "--json", str(file)]) == 0
    assert run(["plan", *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    runs = json.loads(file.read_text())["clusters"][0]["rented"]
    listed, *others = sorted(runs, key=lambda each: -each["usd"][0])
    assert others and "elsewhere for less: 8xh100 " in text
    told = text.partition("elsewhere for less: 8xh100 ")[2]
    assert f"${listed['usd'][0]:,.2f}" not in told
    assert all(f"${each['usd'][0]:,.2f} {each['terms']}" in told for each in others)
