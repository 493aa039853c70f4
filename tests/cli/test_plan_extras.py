"""`phalanx plan` on mixed clusters, this machine, with measured runs, and of a step of RL."""

import json

import pytest

from phalanx.cli.app import run
from phalanx.hardware import read_machine
from phalanx.hardware.write import machine_toml
from phalanx.planner.feedback import remember
from tests.planner.test_corrected import run as measured_run

ROWS = ("--seq", "512", "--global-tokens", "16k", "--tokens", "1M")
WORK = "prompts=32,samples=4,prompt=100,answer=500"
SITES = """
[[groups]]
site = "paris"
machine = "h100"
devices = 4
[[groups]]
site = "oslo"
machine = "h100"
devices = 4
[[links]]
between = ["paris", "oslo"]
bandwidth = "{}"
latency = "20 ms"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(*words):
    return run(["plan", "llama-3.1-8b", *words])


def test_a_mixed_cluster_and_one_of_two_sites_are_told_with_a_plan_for_each_part(folder, capsys):
    (folder / "sites.toml").write_text(SITES.format("100 Gbit/s"))
    assert plan("--lora", "8", *ROWS, "--on", "4xh100+4xl40s,./sites.toml") == 0
    text = capsys.readouterr().out
    assert text.count("a plan for each part") == 2 and "the slowest device" in text
    assert "4xh100 at paris" in text and "100 Gbit/s, 20 ms" in text


@pytest.mark.parametrize(
    ("on", "says"),
    [
        ("./sites.toml", "bandwidth"),  # zero
        ("4xh100+4xh100", "8xh100"),
        ("here", "lab calibrate"),
        ("./none.toml", "No such file"),
    ],
)
def test_bad_clusters_are_one_line_and_exit_2(folder, capsys, on, says):
    (folder / "sites.toml").write_text(SITES.format("0 Gbit/s"))
    assert plan("--lora", "8", *ROWS, "--on", on) == 2
    error = capsys.readouterr().err
    assert says in error and len(error.strip().splitlines()) <= 2


def test_here_is_priced_from_its_file_and_has_no_price(folder, capsys):
    (folder / "here.toml").write_text(machine_toml(read_machine("h20")))
    assert plan("--lora", "8", *ROWS, "--on", "here") == 0
    text = capsys.readouterr().out
    assert "price unknown" in text and "all of here.toml" in text


def test_measured_runs_change_a_price_only_where_they_are_asked_for(folder, capsys):
    remember(measured_run(2.0), folder / "runs.json")

    def expected(*words):
        assert plan("--lora", "8", *ROWS, "--on", "2xh100", "--json", "-", *words) == 0
        table = json.loads(capsys.readouterr().out)
        return table["clusters"][0]["hours"]["expected"], " ".join(table["notes"])

    (plain, before), (twice, after) = expected(), expected("--measured", "runs.json")
    assert twice == pytest.approx(2 * plain)
    assert "measured" not in before and "measured 1 run: x2.00" in after
    assert plan("--lora", "8", *ROWS, "--on", "2xh100", "--measured", "none.json") == 2
    assert "none.json" in capsys.readouterr().err


def test_a_step_of_rl_is_told_for_each_cluster(capsys):
    assert plan("--rl", WORK, "--on", "8xh100,1xl40s") == 0
    text = capsys.readouterr().out
    assert "1, on policy" in text and "2, 1 behind" in text and "does not fit" in text
    assert max(map(len, text.splitlines())) <= 100
    assert plan("--rl", WORK, "--on", "1xl40s") == 1
    assert plan("--rl", "prompts=32,samples=4", "--prompt", "100", "--on", "8xh100") == 2
    assert "--rl answer" in capsys.readouterr().err
