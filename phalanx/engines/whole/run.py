"""`phalanx run`: calibrate -> plan -> train -> export -> serve -> load test -> report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from phalanx.bench_load import load_test
from phalanx.data.prepare import Prepared
from phalanx.engines.serve.handle import start_server
from phalanx.engines.serve.settings import ServeSettings, require_lengths
from phalanx.engines.whole.forecast import Load, forecast_rows
from phalanx.engines.whole.processes import run_module
from phalanx.engines.whole.summary import Summary, write_report
from phalanx.engines.whole.train_job import Asked, Ready, begun, make_ready, train_ready, trained
from phalanx.errors import JobError
from phalanx.job import Job
from phalanx.planner.elsewhere import elsewhere
from phalanx.planner.timeline import step_forecast
from phalanx.report import Report, Row

_EXPORTED = "huggingface"
# Distance of a prediction from the measurement that `--check` accepts.
_SERVED_FRAC = {"serving/KV tokens": 0.0, "load/TTFT median": 0.35, "load/TPOT median": 0.25}
_WHOLE_FRAC = 0.25
_GATE = "gate: the prediction, made before step 1"


@dataclass(frozen=True)
class RunResult:
    """What a run left: its folder and its report."""

    folder: Path
    report: Report


def run_job(asked: Asked, say: Callable[[str], None], live: bool) -> RunResult:
    """Do the whole way on this machine.

    Args:
        asked: the job and its folder.
        say: progress, one line at a time.
        live: whether `say` goes to a terminal that redraws its last line.

    Returns:
        The report, also written to the folder; missed gates are its, not errors.

    Raises:
        PhalanxError: whatever stops the run; what was done before stays in the folder.
    """
    return _WholeWay(asked, say, live).go()


class _WholeWay:
    def __init__(self, asked: Asked, say: Callable[[str], None], live: bool) -> None:
        self.asked = replace(asked, job=_profiled(asked.job))
        self.job, self.folder = self.asked.job, asked.folder
        self.say, self.live = say, live
        self.start_s = perf_counter()
        self.seconds: dict[str, float] = {}

    def go(self) -> RunResult:
        """The stages in order; each writes into the run folder."""
        if _EXPORTED not in self.job.plan.exports:
            rule = "what is served and compared has to be exported"
            exports = list(self.job.plan.exports)
            raise JobError("job/bad-value", "plan.exports", exports, rule, legal=[_EXPORTED])
        self._require_room()
        # what would be refused after the last step is refused before the first
        settings = ServeSettings(folder=str(self.folder), **self._serve_options())
        require = partial(require_lengths, settings)
        with self._timed("data, calibration, plan"):
            ready = make_ready(self.asked, self.say, self._forecast, require)
        with begun(ready, self.say):
            return self._follow(ready)

    def _require_room(self) -> None:
        """Refuse answers that leave no token for a question."""
        serve = self.job.serve
        if serve.load_output_tokens >= serve.max_tokens:
            rule = f"leaves no token of serve.max_tokens = {serve.max_tokens} for a prompt"
            where, legal = "serve.load_output_tokens", [serve.max_tokens - 1]
            raise JobError("job/bad-value", where, serve.load_output_tokens, rule, legal=legal)

    def _follow(self, ready: Ready) -> RunResult:
        """What comes after the plan."""
        result = train_ready(ready, self.say, live=self.live)
        with self._timed("parity"):
            parity = self._parity(ready.data)
        with self._timed("serve"):
            load, sentence = self._serve(ready)
        done = trained(ready, result)
        for stage, seconds in self.seconds.items():
            done.report.add(f"time/{stage}", seconds, "s", "measured")
        total_s = perf_counter() - self.start_s
        predicted = {str(row["quantity"]): row["value"] for row in ready.plan.predictions}
        done.report.rows.append(_whole_run(total_s, predicted.get("time/whole run")))
        summary = Summary(
            trained=done,
            parity=parity,
            load=load,
            serving=sentence,
            elsewhere=elsewhere(self.job, ready.data),
            forecast=step_forecast(ready.plan, ready.source.config, ready.work),
            total_s=total_s,
        )
        return RunResult(self.folder, write_report(summary))

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start_s = perf_counter()
        yield
        self.seconds[stage] = perf_counter() - start_s

    def _forecast(self, ready: Ready) -> Sequence[Row]:
        """Predictions of serving and of the whole run, before the first step."""
        self.say("calibrating: a server's steps")
        load = Load(
            [len(prompt) for prompt in self._prompts(ready.data)],
            [len(prompt) for prompt in self._compared(ready.data)],
            self.job.serve.load_output_tokens,
        )
        return forecast_rows(ready, load, perf_counter() - self.start_s)

    def _parity(self, data: Prepared) -> Report:
        """Trained = served, on questions of held-out rows."""
        self.say("comparing what was trained with what is served")
        arguments, prompts = [str(self.folder)], self._compared(data)
        table = run_module("phalanx.engines.parity", arguments, json.dumps(prompts))
        return Report.from_dict(table)

    def _serve(self, ready: Ready) -> tuple[Report | None, str]:
        """The exported folder under load."""
        serve = self.job.serve
        if not serve.load_requests:
            return None, ""
        with start_server(str(self.folder / "export"), **self._serve_options()) as server:
            self.say(server.sentence)
            prompts = self._prompts(ready.data)
            load = load_test(server.url, prompts, output_tokens=serve.load_output_tokens)
            load.add("serving/KV tokens", server.engine["kv_tokens"], "1", "measured")
        predicted = {str(row["quantity"]): row["value"] for row in ready.plan.predictions}
        load.rows[:] = [_gated(row, predicted) for row in load.rows]
        return load, server.sentence

    def _serve_options(self) -> dict[str, Any]:
        """Fields of `ServeSettings`; its port is one that is free."""
        serve = self.job.serve
        return {
            "host": serve.host,
            "scheduler": self.job.plan.serve,
            "max_running": serve.max_running,
            "max_tokens": serve.max_tokens,
            "max_step_tokens": serve.max_step_tokens,
            "max_queued": serve.max_queued,
            "kv_tokens": serve.kv_tokens,
        }

    def _prompts(self, data: Prepared) -> list[list[int]]:
        """Of the load test: questions, repeated if there are fewer."""
        count = self.job.serve.load_requests
        found = self._questions(data, count) if count else []
        return [found[at % len(found)] for at in range(count)]

    def _compared(self, data: Prepared) -> list[list[int]]:
        """On which all forms of the model are compared."""
        return self._questions(data, self.job.serve.parity_prompts)

    def _questions(self, data: Prepared, count: int) -> list[list[int]]:
        """Questions that leave room for an answer."""
        serve = self.job.serve
        return questions(data, count, serve.max_tokens - serve.load_output_tokens)


def questions(data: Prepared, count: int, max_tokens: int) -> list[list[int]]:
    """What stands before the first counted token of held-out rows (of trained ones, where none are
    held out), cut to `max_tokens`."""
    source = data.held_out if len(data.held_out) else data.train
    rows = (source[at] for at in range(min(count, len(source))))
    return [row.tokens[: max(1, int(row.counted.argmax()))].tolist()[:max_tokens] for row in rows]


def _profiled(job: Job) -> Job:
    """One step's operators are recorded for the report, unless the job says how many."""
    if "plan.profile_steps" in job.origin:
        return job
    return replace(job, plan=replace(job.plan, profile_steps=1))


def _gated(row: Row, predicted: Mapping[str, float | None]) -> Row:
    """A measured row with its prediction as the gate, where one was made."""
    target = predicted.get(row.quantity)
    if row.quantity not in _SERVED_FRAC or target is None:
        return row
    note = "; ".join(filter(None, (row.note, _GATE)))
    return replace(row, note=note, target=target, tolerance_frac=_SERVED_FRAC[row.quantity])


def _whole_run(total_s: float, predicted: float | None) -> Row:
    gate = {"target": predicted, "tolerance_frac": _WHOLE_FRAC, "note": _GATE} if predicted else {}
    return Row(quantity="time/whole run", value=total_s, unit="s", source="measured", **gate)
