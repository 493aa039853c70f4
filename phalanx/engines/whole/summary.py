"""What a run found, as report.json, pages, pictures and a trace for Perfetto."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import numpy as np

from phalanx.engines.whole.environment import environment
from phalanx.engines.whole.train_job import Trained
from phalanx.pages import Curves, MemoryStack, RunPage, Timeline, write_pages
from phalanx.pages.content import WHOLE_RUN, parity_sentence
from phalanx.pages.shown import shown
from phalanx.pages.strips import has_operators, one_step
from phalanx.perfetto import write_perfetto
from phalanx.planner.here import memory_of_rank
from phalanx.planner.timeline import StepForecast
from phalanx.report import Report, Row
from phalanx.trace import Trace

# Distance of a time from its prediction that a gate allows.
_TIME_FRAC = 0.15


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Everything that a report is made of.

    Attributes:
        trained: the finished training.
        parity: the forms of the model compared.
        load: of the load test, or None when the job asks for none.
        serving: the server's sentence on what it can hold.
        total_s: from the start of the run to its report.
        elsewhere: the job priced on other machines.
        forecast: the step as predicted and simulated, before it ran.
    """

    trained: Trained
    parity: Report | None
    load: Report | None
    serving: str
    total_s: float
    elsewhere: Report | None = None
    forecast: StepForecast | None = None


def write_report(summary: Summary) -> Report:
    """Assemble the report and write its files into the run folder: report.json, report.html,
    report.md with its pictures, trace.perfetto.json, environment.json."""
    trained, folder = summary.trained, summary.trained.folder
    facts = environment(trained.plan.program("train").device)
    (folder / "environment.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    measured = Trace.load(folder / trained.result.trace)
    page = _page(summary, measured, facts)
    page.report.save(folder / "report.json")
    write_pages(page, folder)
    write_perfetto(folder / "trace.perfetto.json", _together(measured, summary.forecast))
    return page.report


def _page(summary: Summary, measured: Trace, facts: Mapping[str, str]) -> RunPage:
    trained = summary.trained
    page = RunPage(
        title=trained.job.name,
        report=_report(summary),
        facts=_facts(summary, facts),
        parity=summary.parity,
        elsewhere=summary.elsewhere,
        curves=_curves(summary),
        memory=_memory(summary),
        timeline=_timeline(summary, measured),
        serving=summary.serving,
        samples=trained.result.samples,
        commands=_commands(trained),
        not_run=_not_run(summary),
        environment=facts,
    )
    page.report.notes |= {
        "date": facts["date"],
        "parity": parity_sentence(summary.parity),
        "serving": summary.serving,
        "samples": list(page.samples),
        "elsewhere": summary.elsewhere.title if summary.elsewhere is not None else "",
        "commands": [list(each) for each in page.commands],
        "not run": list(page.not_run),
    }
    return page


# ---- rows ----------------------------------------------------------------------------------------


def _report(summary: Summary) -> Report:
    of_training = summary.trained.report
    report = replace(of_training, rows=list(of_training.rows), notes=dict(of_training.notes))
    _total_row(report, summary.trained)
    if summary.forecast is not None:
        _forecast_rows(report, summary.forecast)
    for more in (summary.load, summary.parity, summary.elsewhere):
        report.rows += more.rows if more is not None else []
    if not any((r.quantity, r.source) == (WHOLE_RUN, "measured") for r in report.rows):
        report.add(WHOLE_RUN, summary.total_s, "s", "measured")
    return report


def _total_row(report: Report, trained: Trained) -> None:
    """Time of all steps beside its prediction; no gate for a run that ended early or went on."""
    result, quantity = trained.result, "training/all steps"
    if not result.tokens_per_s:
        return
    said = next((row.value for row in report.rows if row.quantity == quantity), None)
    note = "tokens of the steps over tokens per second"
    gate = {"target": said, "tolerance_frac": _TIME_FRAC} if said and not result.stopped else {}
    seconds = result.num_tokens / result.tokens_per_s
    report.add(quantity, seconds, "s", "measured", note=note, **gate)


def _forecast_rows(report: Report, forecast: StepForecast) -> None:
    note = forecast.why or "the same rates, action by action in virtual time"
    report.add("training/step time", forecast.trace.end_s, "s", "simulated", note=note)
    for row in forecast.prediction.rows()[2:]:  # the totals stand there already
        report.rows.append(Row(**row))


# ---- what the pages show -------------------------------------------------------------------------


def _facts(summary: Summary, facts: Mapping[str, str]) -> list[str]:
    job, result = summary.trained.job, summary.trained.result
    plan = summary.trained.plan
    method = f"LoRA rank {job.train.lora_rank}" if job.train.method == "lora" else job.train.method
    device = plan.program("train").device.upper()
    processes = "process" if result.num_ranks == 1 else "processes"
    return [
        f"{job.model.name}, {method}, {job.model.dtype}",
        f"{result.steps} steps, {result.num_tokens:,} tokens",
        f"{result.num_ranks} {processes} on {device}: {plan.hardware['machine']}, "
        f"{plan.hardware['cores']} cores",
        f"Phalanx {facts.get('phalanx-parallel', 'not installed')}, "
        f"PyTorch {facts.get('torch', 'not installed')}, Python {facts['python']}",
        facts["date"],
        f"took {shown(summary.total_s, 's')}",
    ]


def _curves(summary: Summary) -> Curves:
    trained = summary.trained
    lines = (trained.folder / trained.result.metrics).read_text(encoding="utf-8").splitlines()
    steps = [entry for line in lines if (entry := json.loads(line))["kind"] == "step"]
    said = next((row["value"] for row in trained.plan.predictions if _is_step_time(row)), None)
    speed = mean(each["tokens"] for each in steps) / said if steps and said else None
    return Curves(
        steps=[each["step"] for each in steps],
        losses=[each["loss"] for each in steps],
        tokens_per_s=[each["tokens_per_s"] for each in steps],
        held_out=trained.result.evaluations,
        predicted_tokens_per_s=speed,
    )


def _is_step_time(row: Mapping[str, Any]) -> bool:
    return row["quantity"] == "training/step time" and bool(row["value"])


def _memory(summary: Summary) -> MemoryStack | None:
    result, job = summary.trained.result, summary.trained.job
    if summary.forecast is None:
        return None
    limit, name = job.limits.memory_bytes, "limit of the job"
    if not limit:
        limit = memory_of_rank(result.num_ranks)
        on_gpu = summary.trained.plan.program("train").device != "cpu"
        name = "device" if on_gpu else "memory that each process can have here"
    return MemoryStack(
        terms=summary.forecast.prediction.terms,
        measured_bytes=result.peak_bytes / result.num_ranks,
        limit_bytes=limit,
        limit_name=name,
    )


def _timeline(summary: Summary, measured: Trace) -> Timeline:
    trained, forecast, step = summary.trained, summary.forecast, one_step(measured)
    notes = []
    if forecast is not None:
        alike = (
            "micro-batches" if trained.plan.program("train").order else "micro-batches and ranks"
        )
        notes.append(f"Simulated: a typical step, its {alike} alike.")
        if not forecast.trace.notes["overlaps"]:
            notes.append(
                "In it collectives take turns with computing, as both need the processor's cores."
            )
        if forecast.why:
            notes.append(f"{forecast.why[0].upper()}{forecast.why[1:]}.")
    if step is not None:
        number, recorded = int(step.columns["step"][0]) + 1, has_operators(step)
        told = f"Measured: step {number}"
        if recorded:
            usual = shown(_usual_s(measured), "s")
            told += f", of which every operator was recorded (the median step took {usual})"
        notes.append(f"{told}.")
        if not recorded:
            notes.append("Operators were not recorded; plan.profile_steps = 1 does it.")
    return Timeline(simulated=forecast.trace if forecast else None, measured=step, notes=notes)


def _usual_s(measured: Trace) -> float:
    return median(measured.where(lane="step").columns["dur_s"].tolist())


def _together(measured: Trace, forecast: StepForecast | None) -> list[Trace]:
    """The measured trace, and the simulated step where its measured one begins."""
    step = one_step(measured)
    if forecast is None or step is None:
        return [measured]
    number = int(step.columns["step"][0])
    begin_s = float(measured.where(lane="step", step=number).columns["start_s"].min())
    columns = dict(forecast.trace.columns)
    columns["start_s"] = np.asarray(columns["start_s"]) + begin_s
    simulated = forecast.trace
    moved = Trace(simulated.source, simulated.job, columns, simulated.vocabulary, simulated.notes)
    return [moved, measured]


def _commands(trained: Trained) -> list[tuple[str, str]]:
    """How to serve what was trained."""
    result, folder = trained.result, trained.folder
    commands: list[tuple[str, str]] = []
    if result.export:
        export = shlex.quote(str(folder / result.export))
        commands += [("Phalanx", f"phalanx serve {export}"), ("vLLM", f"vllm serve {export}")]
    if result.gguf:
        gguf = shlex.quote(str(folder / result.gguf))
        commands.append(("llama.cpp", f"llama-server -m {gguf}"))
    elif result.export:
        gguf = shlex.quote(str(folder / "model.gguf"))
        convert = f"python convert_hf_to_gguf.py {export} --outfile {gguf}"
        commands.append(("llama.cpp", f"{convert}\nllama-server -m {gguf}"))
    return commands


def _not_run(summary: Summary) -> list[str]:
    """What a reader might think had happened here, and did not."""
    rows = summary.parity.rows if summary.parity is not None else []
    compared = " ".join(row.quantity.lower() for row in rows if row.value is not None)
    lines = []
    if others := [name for name in ("vLLM", "llama.cpp") if name.lower() not in compared]:
        lines.append(f"{' and '.join(others)}: the commands above were not tried here.")
    if summary.trained.plan.program("train").device == "cpu":
        lines.append("Nothing ran on a GPU.")
    lines.append("Nothing ran on several machines.")
    if summary.load is None:
        lines.append("No server was started: serve.load_requests is 0.")
    if summary.elsewhere is not None:
        lines.append("The machines under “What it would cost elsewhere” were priced, not used.")
    left_out = [row for row in rows if row.value is None]
    return lines + [f"{row.quantity}: {row.note or 'no reason given'}." for row in left_out]
