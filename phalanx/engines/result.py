"""What a training run leaves behind, readable without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.whole_file import write_whole

FILE_NAME = "train.json"
NUM_SAMPLES, SAMPLE_TOKENS = 3, 40  # greedy answers before and after, and their length at most


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """All numbers are measured; losses are in nats per counted token, on held-out rows.

    Attributes:
        steps: optimizer steps taken; num_ranks: processes that trained.
        stopped: why it ended before its last step: "signal", or what a callback or the early stop
            said; "" otherwise. After a signal nothing is exported: resume from `checkpoint`.
        loss_before, loss_after: held-out loss before the first and after the last step, of the
            weights that were exported; None where no rows were held out.
        evaluations: (step, held-out loss), the two above included.
        best_step: step with the lowest held-out loss.
        num_tokens, num_counted: tokens of all steps; targets among them.
        num_skipped: steps whose update the guard left out.
        step_s: median wall time of a step, the first one left out.
        tokens_per_s, counted_per_s: tokens and targets over the time of the steps that this call
            took (evaluation and loading left out).
        peak_bytes: sum over processes of the peak resident memory (on CUDA: allocated) while
            training, above what the process held once its libraries were imported.
        baseline_bytes: that level, summed over processes; 0 on CUDA.
        seconds: where the time of rank 0 went: "data", "load", "evaluate", "sample", "train",
            "export".
        samples: {"prompt", "before", "after"}: greedy answers to held-out prompts.
        audit: what became of the rows and tokens of the source.
        export, adapter, gguf, metrics, trace, checkpoint: paths, below the run folder ("" where
            there is none).
    """

    steps: int
    num_ranks: int
    loss_before: float | None
    loss_after: float | None
    evaluations: Sequence[Sequence[float]]
    num_tokens: int
    num_counted: int
    step_s: float
    tokens_per_s: float
    counted_per_s: float = 0.0
    num_skipped: int = 0
    best_step: int = 0
    stopped: str = ""
    peak_bytes: float = 0.0
    baseline_bytes: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[Mapping[str, str]] = ()
    audit: Mapping[str, int] = field(default_factory=dict)
    export: str = ""
    adapter: str = ""
    gguf: str = ""
    checkpoint: str = ""
    metrics: str = ""
    trace: str = ""

    def save(self, folder: str | Path) -> None:
        """Write `train.json` into the run folder."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        write_whole(Path(folder) / FILE_NAME, text + "\n")

    @staticmethod
    def load(folder: str | Path) -> TrainResult:
        """Read what `save` wrote."""
        table: dict[str, Any] = json.loads((Path(folder) / FILE_NAME).read_text(encoding="utf-8"))
        return TrainResult(**table)
