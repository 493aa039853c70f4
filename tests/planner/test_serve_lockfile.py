"""A priced server as the lockfile of `phalanx serve`: engines of one device, this machine."""

import json
from dataclasses import replace

import pytest

from phalanx.cli.app import run
from phalanx.engines.serve import front
from phalanx.errors import PlanError
from phalanx.hardware import read_machine
from phalanx.hardware.write import machine_toml
from phalanx.models.config import to_huggingface
from phalanx.models.named import named_model
from phalanx.plan import Plan
from phalanx.planner import lock_place
from phalanx.planner.serve_lockfile import serve_limits

HERE = "Some Processor"
CONFIG = named_model("llama-3.1-8b").config
WORDS = ("llama-3.1-8b", "--serve", "--prompt", "500", "--answer", "100", "--rate", "4")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """This machine is two devices as fast as H20s."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hardware = lambda n: {"machine": HERE, "num_devices": n, "cores": 2}  # noqa: E731
    monkeypatch.setattr(lock_place, "hardware_here", hardware)
    machine = read_machine("h20")
    text = machine_toml(machine).replace(machine.title, f"{HERE}, 2 processes", 1)
    (tmp_path / "here.toml").write_text(text)
    return tmp_path


def locked(*words):
    assert run(["plan", *WORDS, "--on", "2x./here.toml", "-o", "lock.json", *words]) == 0
    return Plan.load("lock.json")


def test_limits_are_those_of_the_load_and_the_engine_has_one_device(here, capsys):
    plan = locked()
    assert "2 engines of one device" in capsys.readouterr().out
    limits = serve_limits(plan, CONFIG)
    assert limits["max_tokens"] == 600 and limits["device"] == "cpu" and limits["threads"] >= 1
    assert limits["max_running"] <= limits["max_step_tokens"]
    assert limits["max_tokens"] <= limits["kv_tokens"] <= 600 * limits["max_running"]
    assert limits["scheduler"]["name"] == "continuous"
    assert plan.program("serve").mesh == {"replicate": 2}
    assert {row["quantity"] for row in plan.predictions} >= {"load/TTFT mean", "load/TPOT mean"}


def test_a_server_that_reuses_no_prefixes_is_sized_without(here, capsys):
    """`phalanx serve` keeps no blocks for others: what prompts share changes no limit, no price."""
    plain = locked()
    capsys.readouterr()
    shared = locked("--shared-prefix", "400")
    assert "it reuses no prefixes yet" in " ".join(capsys.readouterr().out.split())
    assert serve_limits(shared, CONFIG) == serve_limits(plain, CONFIG)
    assert shared.predictions == plain.predictions


def test_a_heavier_load_has_a_larger_batch(here):
    few, many = (
        serve_limits(locked("--rate", rate), CONFIG)["max_running"] for rate in ("4", "16")
    )
    assert few == 16 < many


def test_another_model_machine_or_plan_is_refused(here, monkeypatch):
    plan = locked()
    with pytest.raises(PlanError, match="made for llama"):
        serve_limits(plan, replace(CONFIG, vocab_size=1000))
    with pytest.raises(PlanError, match="no such role"):
        serve_limits(Plan.load(_training()), CONFIG)
    other = lambda n: {"machine": "B", "num_devices": n}  # noqa: E731
    monkeypatch.setattr(lock_place, "hardware_here", other)
    with pytest.raises(PlanError, match="made for"):
        serve_limits(plan, CONFIG)


def _training() -> str:
    words = ["--seq", "512", "--global-tokens", "4k", "--tokens", "1M"]
    assert run(["plan", "llama-3.1-8b", "--on", "2x./here.toml", *words, "-o", "train.json"]) == 0
    return "train.json"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ttft", "1 ms"), "no cluster serves it"),
        (("--precision", "fp8"), "16 or 32 bits"),
        (("--emit", "vllm"), "ask twice"),
    ],
)
def test_what_cannot_be_a_lockfile_is_one_line_and_exit_2(here, capsys, words, says):
    assert run(["plan", *WORDS, "--on", "2x./here.toml", "-o", "lock.json", *words]) == 2
    assert says in capsys.readouterr().err and not (here / "lock.json").exists()


def test_a_server_takes_the_limits_but_for_its_own_flags(here, monkeypatch):
    limits = serve_limits(locked(), CONFIG)
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text(json.dumps(to_huggingface(CONFIG)))
    taken = []

    async def serve(settings, announce):
        taken.append(settings)

    monkeypatch.setattr(front, "serve", serve)
    assert run(["serve", "model", "--plan", "lock.json", "--max-running", "3"]) == 0
    (settings,) = taken
    assert settings.max_running == 3 and settings.kv_tokens == limits["kv_tokens"]
    assert (settings.max_tokens, settings.port, settings.dtype) == (600, 8000, "bfloat16")
