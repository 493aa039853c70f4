"""When hooks are called, what they see, and what becomes of their errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from phalanx.engines.callbacks import HOOKS, Callback, Callbacks, Run, load_callbacks
from phalanx.errors import JobError, WorldError
from phalanx.job import load_job


def a_run(tmp_path):
    return Run(load_job(None, {"model.name": "tiny"}), tmp_path, 0, 2, nn.Linear(2, 2))


class Notes(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def on_start(self, run):
        self.seen.append(("start", run.step, dict(run.metrics)))

    def on_step(self, run):
        self.seen.append(("step", run.step, run.metrics["loss"]))

    def on_evaluate(self, run):
        self.seen.append(("evaluate", run.step, run.evaluation["loss"]))

    def on_save(self, run, path):
        self.seen.append(("save", run.step, path.name))

    def on_end(self, run):
        self.seen.append(("end", run.step, run.error))


def test_hooks_see_the_run_as_it_goes(tmp_path):
    notes = Notes()
    callbacks = Callbacks([notes], a_run(tmp_path))
    callbacks.start()
    callbacks.evaluate({"loss": 9.0})
    callbacks.step({"loss": 3.0})
    callbacks.step({"loss": 2.0})
    callbacks.save(Path("step-2"))
    callbacks.end()
    callbacks.end()  # the run is over once
    assert notes.seen == [
        ("start", 0, {}),
        ("evaluate", 0, 9.0),
        ("step", 1, 3.0),
        ("step", 2, 2.0),
        ("save", 2, "step-2"),
        ("end", 2, None),
    ]


def test_the_view_is_read_only_and_knows_the_job(tmp_path):
    run = a_run(tmp_path)
    assert run.leads and run.num_ranks == 2 and run.folder == tmp_path
    assert run.job.train.steps > 0 and isinstance(run.model, nn.Linear)
    with pytest.raises(TypeError):
        run.metrics["loss"] = 0.0
    with pytest.raises(AttributeError, match="loss"):
        _ = run.loss


def test_a_resumed_run_counts_on(tmp_path):
    notes = Notes()
    callbacks = Callbacks([notes], a_run(tmp_path))
    callbacks.resume(36)
    callbacks.step({"loss": 1.0})
    assert notes.seen == [("step", 37, 1.0)]


def test_the_first_reason_to_stop_stays(tmp_path):
    class Stops(Callback):
        def on_step(self, run):
            run.request_stop(f"after {run.step}")

    callbacks = Callbacks([Stops()], a_run(tmp_path))
    assert callbacks.stop_reason == ""
    callbacks.step({})
    callbacks.step({})
    assert callbacks.stop_reason == "after 1"


@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_names_callback_and_hook_and_shows_where(tmp_path, hook):
    def broken(self, run, *args):
        raise ZeroDivisionError("one by nought")

    callback = type("Broken", (Callback,), {hook: broken})()
    callbacks = Callbacks([callback], a_run(tmp_path))
    calls = {
        "on_start": callbacks.start,
        "on_step": lambda: callbacks.step({}),
        "on_evaluate": lambda: callbacks.evaluate({}),
        "on_save": lambda: callbacks.save(Path("x")),
        "on_end": lambda: (callbacks.start(), callbacks.end()),
    }
    with pytest.raises(WorldError, match=rf"Broken\.{hook} = ZeroDivisionError: one by") as info:
        calls[hook]()
    assert info.value.code == "train/callback"
    assert "test_callbacks.py" in info.value.detail and "callbacks.py" in info.value.detail
    assert isinstance(info.value.__cause__, ZeroDivisionError)


def test_every_callback_ends_and_the_error_of_the_run_is_the_one_reported(tmp_path):
    class Broken(Callback):
        def on_end(self, run):
            raise OSError("disk")

    notes = Notes()
    callbacks = Callbacks([Broken(), notes], a_run(tmp_path))
    callbacks.start()
    error = WorldError("world/failed", "x", 1, "y")
    callbacks.end(error)
    assert notes.seen[-1] == ("end", 0, error)
    callbacks.start()
    with pytest.raises(WorldError, match="disk"):
        callbacks.end()
    assert notes.seen[-1] == ("end", 0, None)


def test_on_end_comes_only_where_on_start_was(tmp_path):
    class Broken(Callback):
        def on_start(self, run):
            raise OSError("no")

    notes = Notes()
    callbacks = Callbacks([Broken(), notes], a_run(tmp_path))
    with pytest.raises(WorldError):
        callbacks.start()
    callbacks.end(None)
    assert notes.seen == []


class Misspelt(Callback):
    def on_evaluation(self, run):
        pass


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (Notes, "is a class; give an instance"),
        (print, "is no instance of"),
        (Misspelt(), "on_evaluation.*nearest legal values: on_evaluate"),
    ],
)
def test_what_is_no_callback_is_refused(tmp_path, value, match):
    with pytest.raises(JobError, match=match):
        Callbacks([Notes(), value], a_run(tmp_path))


@pytest.fixture
def own_callbacks(tmp_path, monkeypatch):
    """A file of callbacks in the working folder."""
    (tmp_path / "own_callbacks.py").write_text(
        "from phalanx.engines.callbacks import Callback\n"
        "class Watches(Callback):\n"
        "    def on_step(self, run): run.request_stop('seen')\n"
        "class NeedsMore(Callback):\n"
        "    def __init__(self, limit): self.limit = limit\n"
        "made = NeedsMore(3)\n"
        "class Misspelt(Callback):\n"
        "    def on_steps(self, run): pass\n"
        "class Other: pass\n"
    )
    monkeypatch.chdir(tmp_path)


def test_callbacks_are_found_by_name(own_callbacks, tmp_path):
    found = load_callbacks(["own_callbacks:Watches", "own_callbacks:made"])
    assert [type(each).__name__ for each in found] == ["Watches", "NeedsMore"]
    assert found[1].limit == 3
    callbacks = Callbacks(found, a_run(tmp_path))
    callbacks.step({})
    assert callbacks.stop_reason == "seen"
    assert load_callbacks([]) == []


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("Watch", "has no 'Watch'.*nearest legal values: own_callbacks:Watches"),
        ("NeedsMore", r"cannot be made without arguments \(TypeError.*limit"),
        ("Misspelt", r"own_callbacks\.Misspelt has a hook that no run calls.*on_step"),
        ("Other", "is no instance of"),
    ],
)
def test_what_cannot_be_a_callback_is_refused_by_key(own_callbacks, name, match):
    with pytest.raises(JobError, match=match) as info:
        load_callbacks([f"own_callbacks:{name}"])
    assert info.value.where == "train.callbacks"
