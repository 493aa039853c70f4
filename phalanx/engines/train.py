"""Training: LoRA, full fine-tuning or from scratch, the same code on every device and world size.

    torchrun --nproc-per-node 2 -m phalanx.engines.train RUN_FOLDER

The run folder holds `job.json` (sections of the resolved job) and `plan.json`. The run adds
`metrics.jsonl`, `trace.npz`, `train.json` (`TrainResult`), `adapter/` (PEFT) and `export/` (a
Hugging Face folder, adapters merged).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from phalanx.cost.training import counted_weight, row_multiple
from phalanx.data.batches import SampleStream, StepBatch, step_batch, whole_pass
from phalanx.data.prepare import Prepared, prepare
from phalanx.data.samples import Sample
from phalanx.data.tokenise import TextTokenizer
from phalanx.engines.evaluate import greedy, held_out_loss
from phalanx.engines.metrics import MetricsFile, StepTrace, write_traces
from phalanx.engines.operator_profile import OperatorProfile
from phalanx.engines.optim import ShardedAdamW, learning_rate
from phalanx.engines.process import PeakMemory, Process, resident_bytes, start_process
from phalanx.engines.result import TrainResult
from phalanx.engines.run_folder import read_run
from phalanx.engines.trainer_export import export
from phalanx.engines.trainer_model import build_model
from phalanx.engines.trainer_step import StepOutcome, TrainStep
from phalanx.errors import JobError, PhalanxError, WorldError
from phalanx.job import Job
from phalanx.models.source import ModelSource, data_settings, model_source
from phalanx.plan import Plan, RoleProgram
from phalanx.planner.here import hardware_here

NUM_SAMPLES, SAMPLE_TOKENS = 2, 40


def train(
    job: Job,
    plan: Plan,
    folder: str | Path,
    on_event: Callable[[Mapping[str, Any]], None] | None = None,
) -> TrainResult:
    """Train what `job` asks as `plan.programs["train"]` says; every process of the role calls it.

    Of the role it reads: `mesh`, `specs` of the data family, `device`, `dtypes` ("master" of what
    is trained, "compute", "reduce"), `batch["row_tokens"]` (tokens of a packed row, i.e. of a
    micro-batch; default `data.max_tokens`) and `batch["row_multiple"]` (rows are filled up to a
    multiple of it; default `cost.training.row_multiple`).

    Args:
        job: resolved job; the global batch, the learning rate and the data are its.
        plan: made for this machine.
        folder: run folder, shared by all processes; rank 0 writes.
        on_event: called on rank 0 with {"kind": "log" | "evaluate" | "step" | "done", ...}; numbers
            as in `metrics.jsonl`.

    Returns:
        The result, the same on every rank but for `samples`, which rank 0 has; it also writes
        `train.json`.

    Raises:
        WorldError: `world/failed` when the loss is no longer finite.
        JobError, PlanError: from the data, the model or the plan, before the first step.
    """
    baseline_bytes = resident_bytes()
    role = plan.program("train")
    with start_process(role.device, role.grid()) as process:
        return _Run(job, role, Path(folder), process, on_event, baseline_bytes).go()


class _Run:
    """The state of one call of `train`."""

    def __init__(
        self,
        job: Job,
        role: RoleProgram,
        folder: Path,
        process: Process,
        on_event: Callable[[Mapping[str, Any]], None] | None,
        baseline_bytes: int,
    ) -> None:
        self.job, self.role, self.folder, self.process = job, role, folder, process
        self._notify = on_event if process.leads and on_event else lambda event: None
        self.seconds: dict[str, float] = {}
        self.memory = PeakMemory(process.device, baseline_bytes)
        self.evaluations: list[list[float]] = []  # step, loss; lists, as JSON reads them back
        self.metrics = MetricsFile(folder / "metrics.jsonl" if process.leads else None)

    def go(self) -> TrainResult:
        """Data, model, evaluation, steps, evaluation, export."""
        with self._timed("data"):
            self.source, self.data = self._prepare()
        with self._timed("load"):
            self.model = build_model(self.job, self.role, self.source, self.process)
        self._prepare_steps()
        self.memory.restart()
        self._evaluate(0)
        before = self._samples()
        self._train()
        peak_bytes = self.process.sum(self.memory.peak_bytes())
        after = self._samples()
        with self._timed("export"):
            exported = export(self.model, self.source, self.folder, self.process, self.job)
            trace = write_traces(
                self.folder,
                self.trace.build(),
                self.process.rank,
                self.process.world_size,
                self.process.barrier,
            )
        self.metrics.close()
        result = TrainResult(
            steps=self.job.train.steps,
            num_ranks=self.process.world_size,
            loss_before=self.evaluations[0][1],
            loss_after=self.evaluations[-1][1],
            evaluations=self.evaluations,
            num_tokens=self.num_tokens,
            num_counted=self.num_counted,
            step_s=median(self.step_s[1:] or self.step_s),
            tokens_per_s=self.num_tokens / sum(self.step_s),
            peak_bytes=peak_bytes,
            baseline_bytes=self.process.sum(self.memory.baseline_bytes),
            seconds=self.seconds,
            samples=self._as_text(before, after) if self.process.leads else (),
            audit=asdict(self.data.audit),
            metrics="metrics.jsonl",
            trace=trace.name,
            **exported,
        )
        if self.process.leads:
            result.save(self.folder)
        self._notify({"kind": "done", **asdict(result)})
        return result

    @contextmanager
    def _timed(self, what: str):
        start_s = perf_counter()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + perf_counter() - start_s

    def _prepare(self) -> tuple[ModelSource, Prepared]:
        def make() -> tuple[ModelSource, Prepared]:
            source = model_source(self.job, log=self._log)
            return source, prepare(data_settings(self.job), source.tokenizer_folder)

        return self.process.leader_first(make)

    def _log(self, text: str) -> None:
        self._notify({"kind": "log", "text": text})

    def _prepare_steps(self) -> None:
        train, seed = self.job.train, self.job.train.seed
        self.stream = SampleStream(self.data.train, seed)
        if not len(self.data.held_out):
            rule = "no row fell into the held-out part, so nothing can be evaluated"
            where, value = "data.held_out_frac", self.job.data.held_out_frac
            raise JobError("data/empty", where, value, rule, legal=[0.05])
        self.held_out = SampleStream(self.data.held_out, seed)
        self.optimizer = ShardedAdamW(
            self.model.decoder.parameters(),
            weight_decay=train.weight_decay,
            clip_norm=train.clip_norm,
        )
        self.stepper = TrainStep(self.model, self.optimizer, self.process.device, seed)
        self.trace = StepTrace(self.process.rank, self.job.name)
        units = {unit.name: unit.module for unit in self.model.data.units if unit.name}
        self.profile = OperatorProfile(self.process.rank, units, self.process.device)
        self._pending: tuple[int, StepBatch, float, StepOutcome] | None = None
        self.step_s: list[float] = []
        self.num_tokens = self.num_counted = 0
        batch = self.role.batch
        self.rows = {
            "row_tokens": int(batch.get("row_tokens", self.job.data.max_tokens)),
            "num_ranks": self.model.data.num_ranks,
            "rank": self.model.data.rank,
            "counted_weight": counted_weight(self.source.config),
            "row_multiple": int(batch.get("row_multiple", row_multiple(self.role.device))),
        }

    def _train(self) -> None:
        train, next_sample = self.job.train, 0
        for number in range(train.steps):
            batch = step_batch(
                self.stream,
                next_sample,
                global_batch_tokens=train.global_batch_tokens,
                **self.rows,
            )
            next_sample = batch.next_sample
            lr = learning_rate(
                number, peak=train.lr, warmup_steps=train.warmup_steps, num_steps=train.steps
            )
            profiled = 0 < number <= self.job.plan.profile_steps  # the first step warms up
            with self.profile.step(number, self.trace) if profiled else nullcontext():
                outcome = self.stepper.run(batch, number, lr)
            self._report_pending()
            self._pending = (number, batch, lr, outcome)
            done = number + 1
            if done == train.steps or (train.eval_every and done % train.eval_every == 0):
                self._report_pending()
                self._evaluate(done)

    def _report_pending(self) -> None:
        """Read the numbers of the step before, when the next one is already under way."""
        if self._pending is None:
            return
        (number, batch, lr, outcome), self._pending = self._pending, None
        step_s = self.trace.add_step(number, self.stepper.spans(number))
        loss, grad_norm = float(outcome.loss), float(outcome.grad_norm)
        self.step_s.append(step_s)
        self.num_tokens += batch.num_tokens_global
        self.num_counted += batch.num_counted_global
        values = {
            "kind": "step",
            "step": number + 1,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": batch.num_tokens_global,
            "counted_tokens": batch.num_counted_global,
            "micro_batches": len(batch.micro_batches),
            "step_s": step_s,
            "cpu_s": outcome.cpu_s,
            "tokens_per_s": batch.num_tokens_global / step_s,
        }
        self.metrics.write(**values)
        self._notify(values)
        self.seconds["train"] = sum(self.step_s)
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            rule = "is not finite any more; lower train.lr or look at the rows of this step"
            value = f"{loss} (gradient norm {grad_norm})"
            raise WorldError("world/failed", f"loss of step {number + 1}", value, rule)

    def _evaluate(self, step: int) -> None:
        with self._timed("evaluate"):
            num_rows = min(self.job.train.eval_rows, len(self.data.held_out))
            batch = whole_pass(self.held_out, num_rows, **self.rows)
            loss = float(held_out_loss(self.model, batch, self.process.device))
        self.evaluations.append([step, loss])
        values = {"kind": "evaluate", "step": step, "loss": loss, "rows": num_rows}
        self.metrics.write(**values, counted_tokens=batch.num_counted_global)
        self._notify(values)

    def _samples(self) -> list[list[int]]:
        """Greedy answers to some held-out prompts, as tokens."""
        with self._timed("sample"):
            chats = self._chats()
            # the last target of a conversation ends a turn
            ends = {int(each.tokens[each.counted][-1]) for each in chats}
            return greedy(
                self.model,
                [each.tokens[: each.counted.argmax()].tolist() for each in chats],
                max_new_tokens=SAMPLE_TOKENS,
                end_tokens=[*self.source.config.eos_tokens, *ends],
                device=self.process.device,
            )

    def _chats(self) -> list[Sample]:
        """The first held-out rows that begin with something to answer."""
        held_out = (self.data.held_out[at] for at in range(len(self.data.held_out)))
        chats = (each for each in held_out if each.counted[1:].argmax() > 0)
        return list(islice(chats, NUM_SAMPLES))

    def _as_text(self, before: list[list[int]], after: list[list[int]]) -> list[dict[str, str]]:
        """Samples as text. Only now is the tokenizer built: it takes hundreds of megabytes."""
        decode = TextTokenizer(self.source.tokenizer_folder).decode
        return [
            {
                "prompt": decode(chat.tokens[: chat.counted.argmax()].tolist()),
                "before": decode(old),
                "after": decode(new),
            }
            for chat, old, new in zip(self._chats(), before, after)
        ]


def _print_event(event: Mapping[str, Any]) -> None:
    print(json.dumps(event, ensure_ascii=False), flush=True)


def main(arguments: list[str]) -> int:
    """Entry of a training process: the run folder is its only argument."""
    try:
        job, plan = read_run(arguments[0])
        num_ranks = plan.program("train").grid().size
        plan.require_here(hardware_here(num_ranks), job.result_key)
        train(job, plan, arguments[0], _print_event)
    except PhalanxError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
