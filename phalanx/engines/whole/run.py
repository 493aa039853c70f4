"""`phalanx run`: calibrate -> plan -> train -> export -> serve -> load test -> report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from phalanx.bench_load import load_test
from phalanx.data.prepare import Prepared, prepare
from phalanx.engines.calibrate import calibrate, workload
from phalanx.engines.result import TrainResult
from phalanx.engines.run_folder import write_job
from phalanx.engines.serve.handle import start_server
from phalanx.engines.whole.live import Progress
from phalanx.engines.whole.processes import launch_training, run_module
from phalanx.engines.whole.summary import Summary, write_report
from phalanx.errors import PlanError
from phalanx.job import Job
from phalanx.models.source import ModelSource, data_settings, model_source
from phalanx.plan import Plan
from phalanx.planner.here import hardware_here, num_ranks_here, plan_here
from phalanx.report import Report

_BUSY_FRAC = 0.8
_PARITY_ROWS, _PARITY_TOKENS = 4, 128


@dataclass(frozen=True)
class RunResult:
    """What a run left: its folder and its report."""

    folder: Path
    report: Report


def run_job(
    job: Job, folder: str | Path, say: Callable[[str], None], live: bool, plan_file: str = ""
) -> RunResult:
    """Do the whole way on this machine.

    Args:
        job: what is asked; `plan.on` must be "here".
        folder: run folder, new or empty.
        say: progress, one line at a time.
        live: whether `say` goes to a terminal that redraws its last line.
        plan_file: a lockfile made here for this job, instead of planning anew.

    Returns:
        The report, also written to the folder; missed gates are its, not errors.

    Raises:
        PhalanxError: whatever stops the run; what was done before stays in the folder.
    """
    return _WholeWay(job, Path(folder), say, live, plan_file).go()


class _WholeWay:
    def __init__(
        self, job: Job, folder: Path, say: Callable[[str], None], live: bool, plan_file: str
    ) -> None:
        if job.plan.on != "here":
            rule = "`phalanx run` runs on this machine; `phalanx plan` prices other clusters"
            raise PlanError("plan/illegal", "plan.on", job.plan.on, rule, legal=["here"])
        self.job, self.folder, self.say = job, folder, say
        self.progress = Progress(say, job.train.steps, live)
        self.start_s = perf_counter()
        self.num_ranks = num_ranks_here(job)
        self.given = Plan.load(plan_file) if plan_file else None
        if self.given is not None:
            self.given.require_here(hardware_here(self.num_ranks), job.result_key)

    def go(self) -> RunResult:
        """The stages in order; each writes into the run folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        source = model_source(self.job, self.say)
        data = self._data(source)
        plan = self._plan(source, data)
        train = self._train()
        parity = self._parity(data)
        load, sentence = self._serve(data)
        summary = Summary(
            job=self.job,
            plan=plan,
            train=train,
            parity=parity,
            load=load,
            serving=sentence,
            total_s=perf_counter() - self.start_s,
        )
        return RunResult(self.folder, write_report(summary, self.folder))

    def _data(self, source: ModelSource) -> Prepared:
        prepared = prepare(data_settings(self.job), source.tokenizer_folder)
        audit = asdict(prepared.audit)
        self.say("data: " + ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in audit.items()))
        return prepared

    def _plan(self, source: ModelSource, data: Prepared) -> Plan:
        write_job(self.job, self.folder)
        plan = self.given or self._planned(source, data)
        plan.save(self.folder / "plan.json")
        for row in plan.predictions:
            self.say(f"predicted: {row['quantity']} = {row['value']:.4g} {row['unit']}")
        return plan

    def _planned(self, source: ModelSource, data: Prepared) -> Plan:
        work = workload(self.job, source.config, data, self.num_ranks)
        self.say(f"calibrating: {self.num_ranks} processes measure this machine (once per job)")
        rates = calibrate(source.config, work, num_processes=self.num_ranks)
        if rates["cores_frac"] < _BUSY_FRAC:
            share = f"{rates['cores_frac']:.0%}"
            self.say(f"note: other programs compete; this job got {share} of its cores")
        return plan_here(self.job, source.config, work, rates, self.num_ranks)

    def _train(self) -> TrainResult:
        self.say(f"training on {self.num_ranks} processes")
        launch_training(self.folder, self.num_ranks, self.progress.hear)
        self.progress.close()
        return TrainResult.load(self.folder)

    def _held_out(self, data: Prepared, count: int) -> list[list[int]]:
        return [data.held_out[at].tokens.tolist() for at in range(min(count, len(data.held_out)))]

    def _parity(self, data: Prepared) -> Mapping[str, Any]:
        self.say("comparing the exported folder with transformers")
        rows = [row[:_PARITY_TOKENS] for row in self._held_out(data, _PARITY_ROWS)]
        export = str(self.folder / "export")
        return run_module("phalanx.engines.whole.parity", [export], json.dumps(rows))

    def _serve(self, data: Prepared) -> tuple[Report | None, str]:
        serve = self.job.serve
        if not serve.load_requests:
            return None, ""
        with start_server(
            str(self.folder / "export"),
            host=serve.host,
            scheduler=self.job.plan.serve,
            max_running=serve.max_running,
            max_tokens=serve.max_tokens,
        ) as server:
            self.say(f"serving on {server.url}: {server.sentence}")
            load = load_test(
                server.url,
                self._prompts(data, serve.load_requests),
                output_tokens=serve.load_output_tokens,
            )
            return load, server.sentence

    def _prompts(self, data: Prepared, count: int) -> Sequence[Sequence[int]]:
        """Questions of held-out rows, repeated if there are fewer."""
        room = self.job.serve.max_tokens - self.job.serve.load_output_tokens
        prompts = []
        for at in range(min(count, len(data.held_out))):
            row = data.held_out[at]
            prompts.append(row.tokens[: max(1, int(row.counted.argmax()))].tolist()[:room])
        return [prompts[at % len(prompts)] for at in range(count)]
