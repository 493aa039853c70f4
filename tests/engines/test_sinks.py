"""Sinks get every number, and nothing that they do reaches training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
from torch import nn

from phalanx.engines.callbacks import Callbacks, Run
from phalanx.engines.sinks import NAMES, open_sinks, require_sinks
from phalanx.engines.sinks.background import BackgroundSink, Patience
from phalanx.errors import JobError
from phalanx.job import load_job


def follow(callbacks_of, tmp_path, rank=0, error=None):
    """A run of two steps with an evaluation before and after; what was warned of."""
    warnings = []
    job = load_job(None, {"model.name": "tiny", "train.lora_targets": ["q_proj"]})
    run = Run(job, tmp_path, rank, 2, nn.Identity())
    callbacks = Callbacks(callbacks_of(warnings.append), run)
    callbacks.start()
    callbacks.evaluate({"kind": "evaluate", "step": 0, "loss": 9.0})
    callbacks.step({"kind": "step", "step": 1, "loss": 3.0, "lr": 0.1, "text": "x"})
    callbacks.step({"kind": "step", "step": 2, "loss": float("nan"), "lr": 0.2})
    callbacks.evaluate({"kind": "evaluate", "step": 2, "loss": 2.5})
    callbacks.end(error)
    return warnings


class Notes:
    """A writer that remembers."""

    def __init__(self, config):
        self.config, self.rows, self.is_closed = config, [], False

    def write(self, step, values):
        self.rows.append((step, values))

    def close(self):
        self.is_closed = True


def test_a_writer_gets_numbers_by_step_and_the_job(tmp_path):
    notes = []

    def open_writer(config):
        notes.append(Notes(config))
        return notes[0]

    warned = follow(
        lambda warn: [BackgroundSink("notes", open_writer, warn, patience=Patience(10.0))], tmp_path
    )
    (writer,) = notes
    assert warned == [] and writer.is_closed
    assert writer.config["model.name"] == "tiny"
    assert writer.config["train.lora_targets"] == ["q_proj"]
    steps, values = zip(*writer.rows)
    assert steps == (0, 1, 2, 2)
    assert values[0] == {"evaluate/loss": 9.0}
    assert values[1] == {"train/loss": 3.0, "train/lr": 0.1}
    assert values[2]["train/loss"] != values[2]["train/loss"]
    assert values[3] == {"evaluate/loss": 2.5}


def test_other_ranks_open_nothing(tmp_path):
    opened = []
    follow(
        lambda warn: [BackgroundSink("notes", opened.append, warn, patience=Patience(1.0))],
        tmp_path,
        rank=1,
    )
    assert opened == []


@pytest.mark.parametrize("when", ["open", "write", "close"])
def test_a_failure_is_one_warning_and_training_goes_on(tmp_path, when):
    def fail(*args):
        raise ConnectionError("no route\nto host")

    def open_writer(config):
        if when == "open":
            fail()
        return SimpleNamespace(
            write=fail if when == "write" else lambda *args: None,
            close=fail if when == "close" else lambda: None,
        )

    warned = follow(
        lambda warn: [BackgroundSink("cloud", open_writer, warn, patience=Patience(10.0))], tmp_path
    )
    assert warned == [
        "cloud gets no more metrics: ConnectionError: no route to host; training goes on"
    ]


def test_a_sink_that_hangs_holds_nothing_up(tmp_path):
    release = threading.Event()
    start_s = time.perf_counter()
    warned = follow(
        lambda warn: [
            BackgroundSink("cloud", lambda config: release.wait(60), warn, patience=Patience(0.2)),
            BackgroundSink("notes", Notes, warn, patience=Patience(50.0)),
        ],
        tmp_path,
    )
    release.set()
    assert time.perf_counter() - start_s < 40.0
    assert warned == ["cloud gets no more metrics: did not finish within 0.2 s; training goes on"]


def test_all_sinks_together_are_waited_for_only_so_long(fakes, tmp_path, monkeypatch):
    release = threading.Event()
    for name in ("wandb", "trackio"):
        monkeypatch.setattr(sys.modules[name], "init", lambda **options: release.wait(60))
    start_s = time.perf_counter()
    warned = follow(
        lambda warn: open_sinks(["wandb", "trackio"], tmp_path, "run", warn, wait_s=3.0), tmp_path
    )
    took_s = time.perf_counter() - start_s
    release.set()
    assert len(warned) == 2 and 3.0 <= took_s < 6.0, "not one after the other"


def test_unknown_and_missing_sinks_are_refused_before_the_run(tmp_path, monkeypatch):
    with pytest.raises(JobError, match=r"plan\.log_to = wandbb: is no sink.*wandb"):
        require_sinks(["wandbb"])
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(JobError, match=f"{name}: the package.*pip install {name}$") as info:
            open_sinks([name], tmp_path, "run", print)
        assert info.value.code == "environment/missing"


def fake_module(monkeypatch, name, **members):
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def fakes(monkeypatch):
    """What the three packages would be told; nothing of them is imported."""
    told = {name: [] for name in NAMES}

    class FakeRun:
        def __init__(self, service, options):
            self.rows = told[service]
            self.rows.append(("init", options))

        def log(self, values, step):
            self.rows.append((step, values))

        def finish(self):
            self.rows.append(("finish", {}))

    class FakeEvents:
        def __init__(self, folder):
            told["tensorboard"].append(("init", {"folder": folder}))

        def add_text(self, name, text, step):
            assert "| model.name | tiny |" in text

        def add_scalar(self, name, value, step):
            told["tensorboard"].append((step, {name: value}))

        def close(self):
            told["tensorboard"].append(("finish", {}))

    fake_module(
        monkeypatch,
        "wandb",
        init=lambda **options: FakeRun("wandb", options),
        Settings=lambda **options: options,
    )
    fake_module(monkeypatch, "trackio", init=lambda **options: FakeRun("trackio", options))
    fake_module(monkeypatch, "tensorboard")
    fake_module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=FakeEvents)
    for name in NAMES:
        monkeypatch.delitem(sys.modules, f"phalanx.engines.sinks.to_{name}", raising=False)
    yield told
    for name in NAMES:
        sys.modules.pop(f"phalanx.engines.sinks.to_{name}", None)


def test_all_three_services_get_every_number(fakes, tmp_path):
    warned = follow(lambda warn: open_sinks(NAMES, tmp_path, "first", warn), tmp_path)
    assert warned == []
    for name, rows in fakes.items():
        assert rows[0][0] == "init" and rows[-1][0] == "finish", name
        assert (0, {"evaluate/loss": 9.0}) in rows
        numbers = [(step, each) for step, values in rows[1:-1] for each in values.items()]
        assert (1, ("train/loss", 3.0)) in numbers and (2, ("train/lr", 0.2)) in numbers
    wandb, trackio = fakes["wandb"][0][1], fakes["trackio"][0][1]
    assert wandb["name"] == "first" and wandb["dir"] == str(tmp_path)
    assert wandb["config"]["model.name"] == trackio["config"]["model.name"] == "tiny"
    assert wandb["settings"]["console"] == "off"


def test_a_resumed_run_goes_on_with_the_same_records(fakes, tmp_path):
    for _ in range(2):
        follow(lambda warn: open_sinks(["wandb", "trackio"], tmp_path, "first", warn), tmp_path)
    for name, key in (("wandb", "id"), ("trackio", "name")):
        first, second = (options for what, options in fakes[name] if what == "init")
        assert first[key] == second[key] and first["resume"] == "allow"


def real(tmp_path, name, **environment):
    """Warnings of a run with the real package, in a process of its own; stdout stays empty."""
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from phalanx.engines.sinks import open_sinks\n"
        "from tests.engines.test_sinks import follow\n"
        "folder = Path(sys.argv[1])\n"
        f"sinks = lambda warn: open_sinks([{name!r}], folder, 'real', warn, wait_s=20.0)\n"
        "warned = follow(sinks, folder)\n"
        "(folder / 'warned.json').write_text(json.dumps(warned))\n"
    )
    env = os.environ | {"HOME": str(tmp_path)} | environment
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return json.loads((tmp_path / "warned.json").read_text())


@pytest.mark.dist
def test_real_tensorboard_reads_the_numbers_back(tmp_path):
    assert real(tmp_path, "tensorboard") == []
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = [(each.step, each.value) for each in events.Scalars("evaluate/loss")]
    assert points == [(0, 9.0), (2, 2.5)]


@pytest.mark.dist
def test_real_wandb_offline_writes_its_files(tmp_path):
    assert real(tmp_path, "wandb", WANDB_MODE="offline") == []
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


@pytest.mark.dist
@pytest.mark.parametrize(
    "environment",
    [
        {},  # nobody has logged in
        {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40},
    ],
)
def test_real_wandb_without_a_way_out_is_one_warning(tmp_path, environment):
    warned = real(tmp_path, "wandb", **environment)
    assert len(warned) == 1 and warned[0].startswith("wandb gets no more metrics")


@pytest.mark.dist
def test_real_trackio_keeps_the_numbers_here(tmp_path):
    assert real(tmp_path, "trackio", TRACKIO_DIR=str(tmp_path / "kept")) == []
    assert list((tmp_path / "kept").rglob("*.db"))
