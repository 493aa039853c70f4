"""The course of a training run: load, evaluate, steps, evaluate, export.

Host code reads the numbers of a step when the next one is already under way, so that a device is
never waited for. What decides the course (a stop, a best evaluation) is equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from phalanx.data.batches import step_batch
from phalanx.engines.callbacks import Callback, Callbacks, Run
from phalanx.engines.checkpoint import Progress, StopSignal, restore
from phalanx.engines.checkpoint.manifest import step_folder
from phalanx.engines.metrics import write_traces
from phalanx.engines.process import PeakMemory, Process
from phalanx.engines.result import TrainResult
from phalanx.engines.sinks import open_sinks
from phalanx.engines.trainer_export import export
from phalanx.engines.trainer_parts import Inputs, Parts
from phalanx.engines.trainer_report import Held, RunReport
from phalanx.engines.watch import Watch
from phalanx.errors import JobError, WorldError
from phalanx.models.spec import lora_warnings

BEST = "best"


class TrainRun:
    """The state of one call of `train`.

    Args:
        watch: told what this rank is at.
        notify: gets each event; does nothing on ranks that do not lead.
        baseline_bytes: resident memory of this process before the run.
    """

    def __init__(
        self,
        inputs: Inputs,
        process: Process,
        watch: Watch,
        notify: Callable[[Mapping[str, Any]], None],
        baseline_bytes: int,
    ) -> None:
        self.inputs, self.process, self.notify = inputs, process, notify
        self.watch = watch
        self.job, self.role, self.folder = inputs.job, inputs.role, inputs.folder
        self.seconds: dict[str, float] = {}
        self.memory = PeakMemory(process.device, baseline_bytes)
        self.progress = Progress(0)
        self.answers_before: list[list[int]] = []
        self._peak_bytes: int | None = None
        self._has_best = True  # unless it cannot be found where it was kept

    def go(self) -> TrainResult:
        """Model, evaluation, steps, evaluation, export."""
        with self._timed("load"):
            self.parts = Parts(self.inputs, self.process, self._saved, self._not_saved)
            goes_on = self._restore()
        self.memory.restart()
        try:
            self.report.callbacks.start()
            with StopSignal() as signal:
                self._begin(is_new=not goes_on)
                stopped = self._steps(signal)
                peak_bytes = self.process.sum(self._peak())
                written = self._end(stopped)
        except BaseException as error:
            self.report.callbacks.end(error)
            raise
        self.report.callbacks.end()
        return self._result(stopped, peak_bytes, written)

    # ---- before the first step -------------------------------------------------------------------

    def _restore(self) -> bool:
        """Go on from a checkpoint, where one is asked for."""
        damaged: list[JobError] = []
        found = self.parts.restore(damaged.append)
        if found is not None:
            self.progress = found
            self.parts.guard.restore(found.extra["guard"])
            self.answers_before = found.extra["answers"]
        self._open_report()
        for error in damaged:
            self._warn(f"{error}; an older one is used")
        return found is not None

    def _open_report(self) -> None:
        process = self.process
        run = Run(self.job, self.folder, process.rank, process.world_size, self.parts.model.decoder)
        sinks: list[Callback] = []
        if process.leads:
            name = f"{self.job.name}-{self.folder.resolve().name}"
            # the others wait meanwhile, and must not count as hung
            plan = self.job.plan
            wait_s = min(15.0, plan.hang_s / 2)
            sinks = open_sinks(plan.log_to, self.folder, name, self._warn, wait_s=wait_s)
        callbacks = Callbacks([*self.inputs.callbacks, *sinks], run)
        callbacks.resume(self.progress.step)
        self.report = RunReport(
            self.folder,
            self.job.name,
            process,
            self.memory,
            self.parts.guard,
            callbacks,
            self.notify,
            num_steps=self.parts.num_steps,
            done_steps=self.progress.step,
        )

    def _saved(self, progress: Progress, _name: str, path: Path) -> None:
        self.report.saved(progress.step, path)

    def _not_saved(self, error: WorldError) -> None:
        self._warn(str(error))

    def _warn(self, text: str) -> None:
        self.report.warn(text, self.progress.step)

    def _begin(self, *, is_new: bool) -> None:
        """Warnings; loss and answers before the first step."""
        model = self.parts.model
        for text in lora_warnings(model.decoder.config, model.lora) if model.lora else ():
            self._warn(text)
        if self.job.train.master_dtype == "bfloat16":
            lost = "updates below 1/256 of a weight are lost in it, and in its moments"
            self._warn(f"train.master_dtype = bfloat16: {lost}")
        self.parts.weights.run(self.progress.step)  # finds ranks that loaded other weights
        if is_new and self.parts.held_out:
            self._evaluate()
            with self._timed("sample"):
                self.answers_before = self.parts.answers()

    # ---- steps -----------------------------------------------------------------------------------

    def _steps(self, signal: StopSignal) -> str:
        """Until the last step or a reason to stop, which is returned ("" after the last step)."""
        for number in range(self.progress.step, self.parts.num_steps):
            try:
                self._step(number, signal)
            except WorldError:
                if self.report.last_good is not None:  # the weights are still those before it
                    self._save(self.report.last_good)
                    self.parts.checkpoints.wait()
                raise
            if reason := self._after_step():
                return reason
        return ""

    def _step(self, number: int, signal: StopSignal) -> None:
        train, before = self.job.train, self.progress
        self.watch.note(number, "step")
        batch = step_batch(
            self.parts.stream,
            before.next_sample,
            global_batch_tokens=train.global_batch_tokens,
            **self.parts.rows,
        )
        lr = self.parts.learning_rate(number)
        profiled = 0 < self.parts.num_steps - number <= self.job.plan.profile_steps
        if profiled and self._peak_bytes is None:
            self._peak_bytes = self._peak()  # what a profiler takes is none of the job's
        stops = (signal.requested, bool(self.report.callbacks.stop_reason))
        recorded = self.parts.fingerprints.step(number)
        profile = self.parts.profile.step(number, self.report.trace) if profiled else nullcontext()
        with recorded, profile:
            outcome = self.parts.stepper.run(batch, number, lr, stops)
        self.progress = replace(
            before,
            step=number + 1,
            next_sample=batch.next_sample,
            num_tokens=before.num_tokens + batch.num_tokens_global,
            num_counted=before.num_counted + batch.num_counted_global,
        )
        spans = self.parts.stepper.spans(number)
        self.report.hold(Held(number, batch, lr, outcome, spans, before))
        own_tokens = sum(len(row.tokens_S) for row in batch.micro_batches)
        self.parts.weights.clock.add(outcome.cpu_s, own_tokens)

    def _peak(self) -> int:
        return self.memory.peak_bytes() if self._peak_bytes is None else self._peak_bytes

    def _after_step(self) -> str:
        """What is due after a step; a reason to stop, the same on all ranks, or ""."""
        train, plan, done = self.job.train, self.job.plan, self.progress.step
        stop, is_last = self.report.stop_reason, done == self.parts.num_steps
        if stop == "signal":
            self._save(self.progress)
            return stop
        due = is_last or bool(stop) or (train.eval_every and done % train.eval_every == 0)
        if due and self.parts.held_out:
            self.report.read()
            self._evaluate()
        if plan.check_weights_every and done % plan.check_weights_every == 0:
            self._check_weights()
        if plan.checkpoint_every and done % plan.checkpoint_every == 0 and not is_last:
            self._save(self.progress)
        return "" if is_last else stop or self._without_improvement()

    def _check_weights(self) -> None:
        with self._timed("check weights"):
            line = self.parts.weights.run(self.progress.step)
        self.report.note(**line)
        if line["text"]:
            self._warn(line["text"])

    def _without_improvement(self) -> str:
        limit, progress = self.job.train.early_stop, self.progress
        since = sum(step > progress.best_step for step, _ in progress.evaluations)
        if not limit or since < limit:
            return ""
        return f"early stop: {since} evaluations since step {progress.best_step} were no better"

    def _evaluate(self) -> None:
        with self._timed("evaluate"):
            loss = self.parts.held_out.loss()
        progress, step = self.progress, self.progress.step
        self.progress = replace(progress, evaluations=[*progress.evaluations, [step, loss]])
        num_counted = self.parts.held_out.batch.num_counted_global
        self.report.evaluated(step, loss, self.parts.held_out.num_rows, num_counted)
        if loss < progress.best_loss:
            self.progress = replace(self.progress, best_loss=loss, best_step=step)
            if self.job.train.keep_best:
                self._save(self.progress, BEST)

    def _save(self, progress: Progress, name: str = "step") -> None:
        with self._timed("save"):
            self.report.read()
            extra = {"guard": self.parts.guard.state(), "answers": self.answers_before}
            self.parts.checkpoints.save(replace(progress, extra=extra), name)

    # ---- after the last step ---------------------------------------------------------------------

    def _end(self, stopped: str) -> dict[str, Any]:
        """Export, unless the run goes on later; names of what was written."""
        self.report.read()
        self._wait_for_checkpoints(stopped)
        written: dict[str, Any] = {}
        if stopped == "signal":
            path = step_folder(self.parts.checkpoints.folder, "step", self.progress.step)
            written["checkpoint"] = str(path.relative_to(self.folder))
            self.notify(
                {
                    "kind": "stopped",
                    "reason": stopped,
                    "step": self.progress.step,
                    "checkpoint": str(path),
                }
            )
        else:
            is_last = not self._load_best()
            with self._timed("sample"):
                after = self.parts.answers()
            with self._timed("export"):
                written = self._export(is_last)
            if self.process.leads:
                folder = self.inputs.source.tokenizer_folder
                written["samples"] = self.parts.held_out.as_text(folder, self.answers_before, after)
        self.parts.checkpoints.close()
        trace = self.report.trace.build()
        written["trace"] = write_traces(self.folder, trace, self.process)
        if not written["trace"]:
            self._warn(f"there was no room for the trace of the run in {self.folder}")
        self.report.metrics.close()
        return written

    def _wait_for_checkpoints(self, stopped: str) -> None:
        """Wait for the disk. Only a run that shall go on needs its last checkpoint."""
        with self._timed("save"):
            try:
                self.parts.checkpoints.wait()
            except WorldError as error:
                if stopped == "signal":
                    raise
                self._warn(str(error))

    def _load_best(self) -> bool:
        """The weights of the lowest held-out loss, where they are not those of the last step;
        whether they were loaded."""
        progress = self.progress
        if not self.job.train.keep_best or progress.best_step == progress.step:
            return False
        path = step_folder(self.parts.checkpoints.folder, BEST, progress.best_step)
        self._has_best = path.is_dir()
        if self._has_best:
            restore(path, self.parts.model, self.parts.optimizer, self.process, weights_only=True)
        else:
            lost = f"the weights of step {progress.best_step}, with the lowest loss, were not kept"
            self._warn(f"{lost}: those of the last step are exported")
        return self._has_best

    def _export(self, is_last: bool) -> dict[str, Any]:
        """Where a whole model finds no room, a checkpoint of what was trained may: then the run
        goes on from it to its export.

        Args:
            is_last: the weights are those of the last step.
        """
        try:
            source = self.inputs.source
            return export(self.parts.model, source, self.folder, self.process, self.job)
        except WorldError:
            if is_last:
                self._save(self.progress)
                with suppress(WorldError):  # the first reason is the one to tell
                    self.parts.checkpoints.wait()
            raise

    def _result(self, stopped: str, peak_bytes: float, written: Mapping[str, Any]) -> TrainResult:
        progress, report = self.progress, self.report
        losses = [loss for _, loss in progress.evaluations]
        best = self.job.train.keep_best and self._has_best
        self.seconds["train"] = train_s = sum(report.step_s)
        result = TrainResult(
            steps=progress.step,
            num_ranks=self.process.world_size,
            stopped=stopped,
            loss_before=losses[0] if losses else None,
            loss_after=(progress.best_loss if best else losses[-1]) if losses else None,
            evaluations=progress.evaluations,
            best_step=progress.best_step,
            num_tokens=progress.num_tokens,
            num_counted=progress.num_counted,
            num_skipped=int(self.parts.guard.state()["counts"][1]),
            step_s=median(report.step_s[1:] or report.step_s or [0.0]),
            tokens_per_s=report.num_tokens / train_s if train_s else 0.0,
            counted_per_s=report.num_counted / train_s if train_s else 0.0,
            peak_bytes=peak_bytes,
            baseline_bytes=self.process.sum(self.memory.baseline_bytes),
            seconds=self.seconds,
            audit=asdict(self.inputs.data.audit),
            metrics="metrics.jsonl",
            **written,
        )
        if self.process.leads:
            result.save(self.folder)
        self.notify({"kind": "done", **asdict(result)})
        return result

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start_s = perf_counter()
        self.watch.note(self.progress.step, what)
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + perf_counter() - start_s
