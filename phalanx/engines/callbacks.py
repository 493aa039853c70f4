"""Code of a user's own that a training run calls: log, watch, stop.

    class StopWhenGood(Callback):
        def on_evaluate(self, run):
            if run.evaluation["loss"] < 1.5:
                run.request_stop("good enough")

    train(job, plan, folder, callbacks=[StopWhenGood()])

or in the job, with ./mine.py beside it: `train.callbacks = ["mine:StopWhenGood"]`.

Every rank calls its own callbacks at the same places of the run, so a callback may communicate;
what must happen once asks for `run.leads`. An exception in a callback ends the run and names it.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from phalanx.engines.user_code import load_named
from phalanx.errors import JobError, PhalanxError, WorldError, nearest_names, shown

if TYPE_CHECKING:
    from torch import nn

    from phalanx.job import Job

_WHERE = "train.callbacks"
HOOKS = ("on_start", "on_step", "on_evaluate", "on_save", "on_end")


class Run:
    """What a callback sees of the run. Reading it costs nothing and waits for nobody.

    Attributes:
        job: resolved.
        folder: run folder.
        rank, num_ranks: this process and how many there are.
        model: the decoder in training, with its sharded parameters. A step's hook runs while the
            next step is under way, so weights may be one step ahead of the numbers. Do not change
            them: checkpoints are written from them, behind the steps.
        step: optimizer steps whose numbers are known.
        metrics: numbers of the latest of them, as in `metrics.jsonl`; empty before the first.
        evaluation: numbers of the latest evaluation, likewise.
        stop_reason: why this rank wants to stop; "" while it does not.
        error: what ended the run, in `on_end`; None when nothing went wrong.
    """

    def __init__(self, job: Job, folder: Path, rank: int, num_ranks: int, model: nn.Module) -> None:
        self._fixed = {"job": job, "folder": folder, "rank": rank, "num_ranks": num_ranks}
        self._fixed["model"] = model
        self._now: dict[str, Any] = {"step": 0, "stop_reason": "", "error": None}
        self._now |= {"metrics": MappingProxyType({}), "evaluation": MappingProxyType({})}

    def __getattr__(self, name: str) -> Any:
        for table in (self.__dict__.get("_now", {}), self.__dict__.get("_fixed", {})):
            if name in table:
                return table[name]
        raise AttributeError(f"a run has no {name!r}")

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def request_stop(self, reason: str) -> None:
        """End the run as if these had been its steps: it evaluates, saves and exports.

        One rank is enough; all stop after the same step, one or two later. The first reason stays.
        """
        if not reason:
            raise ValueError("a reason to stop must say something")
        self._now["stop_reason"] = self._now["stop_reason"] or reason


class Callback:
    """Override what you need; every hook does nothing by itself."""

    def on_start(self, run: Run) -> None:
        """The model is loaded; nothing is trained or evaluated yet."""

    def on_step(self, run: Run) -> None:
        """`run.metrics` has the numbers of another step."""

    def on_evaluate(self, run: Run) -> None:
        """`run.evaluation` has the numbers of another evaluation; the first is before step 1."""

    def on_save(self, run: Run, path: Path) -> None:
        """A checkpoint of the run is complete at `path`."""

    def on_end(self, run: Run) -> None:
        """The run is over, whatever the reason (`run.error`, `run.stop_reason`). Close files here.

        It is called wherever `on_start` was.
        """


def load_callbacks(specs: Sequence[str]) -> list[Callback]:
    """Callbacks that a job names.

    Args:
        specs: "module:Class" each, made without arguments, or "module:name" of a callback that the
            module has made; modules are looked for in the working folder too.

    Raises:
        JobError: `job/bad-value` for what cannot be imported or made, or is no callback.
    """
    callbacks = []
    for spec in specs:
        found = load_named(spec, _WHERE, inspect.isclass)
        if isinstance(found, type) and issubclass(found, Callback):
            try:
                found = found()
            except Exception as error:  # whatever foreign code raises
                rule = f"cannot be made without arguments ({type(error).__name__}: {error})"
                raise JobError("job/bad-value", _WHERE, spec, rule) from error
        _require_callback(found, _WHERE)
        callbacks.append(found)
    return callbacks


class Callbacks:
    """Calls the hooks of several callbacks in their order.

    Args:
        callbacks: instances of `Callback`.
        run: what they see.

    Raises:
        JobError: `job/bad-value` for what is no callback, or has a hook that is never called.
    """

    def __init__(self, callbacks: Sequence[Callback], run: Run) -> None:
        for at, each in enumerate(callbacks):
            _require_callback(each, f"callbacks[{at}]")
        self._callbacks, self.run = tuple(callbacks), run
        self._started: list[Callback] = []

    @property
    def stop_reason(self) -> str:
        """Why a callback of this rank wants the run to stop; "" while none does."""
        return self.run.stop_reason

    def start(self) -> None:
        """Before the first evaluation."""
        for each in self._callbacks:
            self._started.append(each)
            self._call(each, "on_start")

    def step(self, metrics: Mapping[str, Any]) -> None:
        """The numbers of a step are known."""
        self.run._now |= {"metrics": MappingProxyType(dict(metrics)), "step": self.run.step + 1}
        self._call_all("on_step")

    def evaluate(self, metrics: Mapping[str, Any]) -> None:
        """The numbers of an evaluation are known."""
        self.run._now["evaluation"] = MappingProxyType(dict(metrics))
        self._call_all("on_evaluate")

    def save(self, path: Path) -> None:
        """A checkpoint is complete."""
        self._call_all("on_save", path)

    def resume(self, step: int) -> None:
        """The run goes on after so many steps."""
        self.run._now["step"] = step

    def end(self, error: BaseException | None = None) -> None:
        """The run is over. All hooks are called, also after one that fails; the first error counts.

        Args:
            error: what ended the run; it stays the one that is reported.
        """
        self.run._now["error"] = error
        started, self._started = self._started, []
        failed: WorldError | None = None
        for each in started:
            try:
                self._call(each, "on_end")
            except WorldError as problem:
                failed = failed or problem
        if failed is not None and error is None:
            raise failed

    def _call_all(self, hook: str, *args: Any) -> None:
        for each in self._callbacks:
            self._call(each, hook, *args)

    def _call(self, callback: Callback, hook: str, *args: Any) -> None:
        call(getattr(callback, hook), f"{name_of(callback)}.{hook}", self.run, *args)


def call(function: Callable[..., Any], name: str, *args: Any) -> Any:
    """The result of a user's function; what it raises ends the run under the function's name.

    Raises:
        WorldError: `train/callback`; errors of our own pass as they are.
    """
    try:
        return function(*args)
    except PhalanxError:
        raise
    except Exception as error:  # whatever foreign code raises
        value = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        lines = traceback.format_exception(error.with_traceback(_below(error)))
        text = "".join(lines).rstrip()
        raise WorldError("train/callback", name, value, "failed", detail=text) from error


def _below(error: Exception) -> Any:
    """The traceback without our own frame."""
    trace = error.__traceback__
    return trace.tb_next if trace is not None else None


def name_of(callback: Callback) -> str:
    """Module and class of a callback."""
    return f"{type(callback).__module__}.{type(callback).__qualname__}"


def _require_callback(value: object, where: str) -> None:
    if not isinstance(value, Callback):
        rule = "is no instance of phalanx.engines.callbacks.Callback"
        if isinstance(value, type) and issubclass(value, Callback):
            rule = "is a class; give an instance of it"
        raise JobError("job/bad-value", where, shown(value), rule)
    for name in dir(value):
        if name.startswith("on_") and name not in HOOKS:
            rule = f"{name_of(value)} has a hook that no run calls"
            raise JobError("job/bad-value", where, name, rule, legal=nearest_names(name, HOOKS))
