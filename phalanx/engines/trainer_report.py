"""What a training run says of itself: numbers of steps and evaluations, spans, warnings.

The numbers of a step leave the device behind the step (`hold`) and are read when the next one is
under way (`read`); on the CPU, where nothing is waited for, at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.data.batches import StepBatch
from phalanx.engines.callbacks import Callbacks
from phalanx.engines.checkpoint import Progress
from phalanx.engines.coming import Coming
from phalanx.engines.guard import Guard
from phalanx.engines.metrics import MetricsFile, StepTrace, rows_of_rank
from phalanx.engines.process import PeakMemory, Process
from phalanx.engines.trainer_step import StepOutcome, StepSpans

Notify = Callable[[Mapping[str, Any]], None]


class Held(NamedTuple):
    """A step whose numbers are still on the device.

    Attributes:
        before: where the run was before it.
    """

    number: int
    batch: StepBatch
    lr: float
    outcome: StepOutcome
    spans: StepSpans
    before: Progress


class RunReport:
    """Collects numbers, writes `metrics.jsonl`, tells callbacks and whoever listens.

    Args:
        folder: run folder; only rank 0 writes metrics.
        num_steps: of the whole run.
        done_steps: taken before this call.
        notify: gets each event; does nothing on ranks that do not lead.

    Attributes:
        stop_reason: "" | "signal" | what a callback said; equal on all ranks.
        last_good: progress to resume from when the guard has ended the run.
        step_s: seconds of each step read so far.
    """

    def __init__(
        self,
        folder: Path,
        job_name: str,
        process: Process,
        memory: PeakMemory,
        guard: Guard,
        callbacks: Callbacks,
        notify: Notify,
        *,
        num_steps: int,
        done_steps: int = 0,
    ) -> None:
        self.process, self.memory, self.guard = process, memory, guard
        self.callbacks, self.notify, self.num_steps = callbacks, notify, num_steps
        path = folder / "metrics.jsonl" if process.leads else None
        self.metrics = MetricsFile(path, done_steps, self._unwritten)
        self.trace = StepTrace(process.rank, job_name, rows_of_rank(process.world_size))
        self.stop_reason = ""
        self.last_good: Progress | None = None
        self.step_s: list[float] = []
        self.num_tokens = self.num_counted = 0
        self._held: tuple[Held, Coming] | None = None
        self._reads_at_once = process.device.type == "cpu"

    def hold(self, held: Held) -> None:
        """The step has been issued; read the one before."""
        coming = Coming([held.outcome.sums, held.outcome.grad_norm])
        self.read()
        self._held = held, coming
        if self._reads_at_once:
            self.read()

    def read(self) -> None:
        """The numbers of the step that is held, if there is one.

        Raises:
            WorldError: from the guard or a callback; `last_good` then says where to go on from.
        """
        if self._held is None:
            return
        (held, coming), self._held = self._held, None
        sums, grad_norm = coming.arrived()
        loss, signals, requests = sums.tolist()
        values = self._values(held, loss, float(grad_norm))
        self.metrics.write(**values)
        self.notify(values)
        self.last_good = held.before
        first, end = held.before.next_sample, held.batch.next_sample
        warning = self.guard.hear(held.number, loss, grad_norm, range(first, end))
        if warning:
            self.warn(warning, step=held.number + 1)
        self.last_good = None
        self.callbacks.step(values)
        if signals:
            self.stop_reason = "signal"
        elif requests and not self.stop_reason:
            self.stop_reason = self.callbacks.stop_reason or "a callback of another rank"

    def _values(self, held: Held, loss: float, grad_norm: float) -> dict[str, Any]:
        batch, step_s = held.batch, self.trace.add_step(held.number, held.spans)
        self.step_s.append(step_s)
        self.num_tokens += batch.num_tokens_global
        self.num_counted += batch.num_counted_global
        return {
            "kind": "step",
            "step": held.number + 1,
            "num_steps": self.num_steps,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": held.lr,
            "tokens": batch.num_tokens_global,
            "counted_tokens": batch.num_counted_global,
            "first_sample": held.before.next_sample,
            "micro_batches": len(batch.micro_batches),
            "step_s": step_s,
            "cpu_s": held.outcome.cpu_s,
            "tokens_per_s": batch.num_tokens_global / step_s,
            "counted_tokens_per_s": batch.num_counted_global / step_s,
            "memory_bytes": self.memory.peak_so_far(),
        }

    def evaluated(self, step: int, loss: float, num_rows: int, num_counted: int) -> None:
        """The held-out loss after so many steps."""
        values = {"kind": "evaluate", "step": step, "loss": loss, "rows": num_rows}
        self.metrics.write(**values, counted_tokens=num_counted)
        self.notify(values)
        self.callbacks.evaluate(values)

    def saved(self, step: int, path: Path) -> None:
        """A checkpoint is complete."""
        values = {"kind": "checkpoint", "step": step, "path": str(path)}
        self.metrics.write(**values)
        self.notify(values)
        self.callbacks.save(path)

    def warn(self, text: str, step: int) -> None:
        """Something that does not end the run."""
        values = {"kind": "warning", "step": step, "text": text}
        self.metrics.write(**values)
        self.notify(values)

    def _unwritten(self, text: str) -> None:
        self.notify({"kind": "warning", "text": f"{text}; lines are kept until they can be"})

    def note(self, kind: str, **values: Any) -> None:
        """A line of another kind, in the metrics only."""
        self.metrics.write(kind=kind, **values)
