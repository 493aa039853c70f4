"""What a run found, as report.json, report.md, a picture and a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.engines.result import TrainResult
from phalanx.engines.whole.train_job import Trained
from phalanx.perfetto import write_perfetto
from phalanx.plan import locked_versions
from phalanx.report import Report
from phalanx.trace import Trace

# fp32 logits of the export against transformers on the real model.
_LOGIT_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Everything that a report is made of.

    Attributes:
        trained: the finished training.
        parity: from `parity.compare_logits`.
        load: of the load test, or None when the job asks for none.
        serving: the server's sentence on what it can hold.
        total_s: from the start of the run to its report.
    """

    trained: Trained
    parity: Mapping[str, Any]
    load: Report | None
    serving: str
    total_s: float


def write_report(summary: Summary) -> Report:
    """Assemble the report and write its files into the run folder."""
    trained, report = summary.trained, _report(summary)
    folder, train = trained.folder, trained.result
    report.save(folder / "report.json")
    write_perfetto(folder / "trace.perfetto.json", Trace.load(folder / train.trace))
    (folder / "environment.json").write_text(json.dumps(locked_versions(), indent=1) + "\n")
    picture = _draw_losses(train, folder)
    text = [report.to_markdown(), _samples(train), _next_commands(folder), _not_run()]
    if picture:
        text.insert(1, f"![held-out and training loss]({picture})\n")
    (folder / "report.md").write_text("\n".join(text), encoding="utf-8")
    return report


def _report(summary: Summary) -> Report:
    of_training = summary.trained.report
    report = replace(of_training, rows=list(of_training.rows))
    if summary.serving:
        report.notes["serving"] = summary.serving
    _parity_rows(report, summary.parity)
    if summary.load is not None:
        report.rows.extend(summary.load.rows)
    report.add("time/whole run", summary.total_s, "s", "measured")
    return report


def _parity_rows(report: Report, parity: Mapping[str, Any]) -> None:
    if "skipped" in parity:
        name, note = "export/largest logit difference", str(parity["skipped"])
        report.add(name, None, "1", "measured", note=note)
        return
    note = f"fp32, transformers {parity['transformers']}, {parity['num_positions']} positions"
    report.add(
        "export/largest logit difference",
        parity["max_abs_diff"],
        "1",
        "measured",
        note=note,
        target=0.0,
        tolerance=_LOGIT_TOLERANCE,
    )
    report.add("export/top-1 agreement", parity["top1_agreement"], "1", "measured", note=note)


def _samples(train: TrainResult) -> str:
    lines = ["## Before and after", ""]
    for sample in train.samples:
        lines += [f"**{sample['prompt'].strip()}**", ""]
        lines += [f"- before: {_flat(sample['before'])}", f"- after: {_flat(sample['after'])}", ""]
    return "\n".join(lines)


def _flat(text: str) -> str:
    return " ".join(text.split()) or "(nothing)"


def _next_commands(folder: Path) -> str:
    export = folder / "export"
    return "\n".join(
        [
            "## Serve it",
            "",
            f"    phalanx serve {export}",
            f"    vllm serve {export}",
            f"    python convert_hf_to_gguf.py {export}    # llama.cpp",
            "",
        ]
    )


def _not_run() -> str:
    return "\n".join(
        [
            "## Not run here",
            "",
            "vLLM and llama.cpp were not started. Nothing ran on CUDA or on several machines.",
            "",
        ]
    )


def _draw_losses(train: TrainResult, folder: Path) -> str:
    """loss.png, or "" where matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return ""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = (folder / train.metrics).read_text(encoding="utf-8").splitlines()
    steps = [entry for line in lines if (entry := json.loads(line))["kind"] == "step"]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([e["step"] for e in steps], [e["loss"] for e in steps], label="training", lw=1)
    axes.plot(*zip(*train.evaluations), "o-", label="held out")
    axes.set(xlabel="optimizer step", ylabel="loss, nats per counted token", ylim=(0, None))
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=120)
    pyplot.close(figure)
    return "loss.png"
