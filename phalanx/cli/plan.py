"""`phalanx plan`: what a job takes on clusters, in hours, dollars and memory; and the lockfile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.job import FLAGS, DataSource, ModelName, resolve
from phalanx.cli.output import JsonFile, emit, paragraph, show_report, versioned, write
from phalanx.errors import JobError

if TYPE_CHECKING:
    from phalanx.job import Job
    from phalanx.planner.importers import ForeignPlan
    from phalanx.planner.question import Question

Target = Annotated[
    str,
    typer.Argument(
        metavar="[JOB | MODEL]",
        help="Job file (TOML), or a model: preset, folder, config.json, Hub name.",
    ),
]
On = Annotated[
    str,
    typer.Option("--on", help="Clusters, e.g. 2xH100,8xH100,v5p-8; instead of plan.on."),
]
Lora = Annotated[
    int | None, typer.Option("--lora", metavar="RANK", help="Train adapters of this rank.")
]
Full = Annotated[bool, typer.Option("--full", help="Train all weights.")]
Output = Annotated[str, typer.Option("-o", "--output", help="Write the lockfile here.")]
Explain = Annotated[bool, typer.Option("--explain", help="Show terms, and where values come from.")]
Seq = Annotated[
    str, typer.Option("--seq", metavar="TOKENS", help="Rows of this length, instead of a data file")
]
GlobalTokens = Annotated[
    str, typer.Option("--global-tokens", metavar="TOKENS", help="Of a step, e.g. 16M (M is 1024^2)")
]
Tokens = Annotated[
    str, typer.Option("--tokens", metavar="TOKENS", help="Of the whole run with --seq, e.g. 15T")
]
Deadline = Annotated[
    str, typer.Option("--deadline", metavar="TIME", help="E.g. 12h: how many devices meet it?")
]
Budget = Annotated[
    str, typer.Option("--budget", metavar="USD", help="E.g. 300: how many devices keep to it?")
]
LargestOf = Annotated[
    str, typer.Option("--largest", metavar="WHAT", help="Largest 'context' or 'micro-batch'.")
]
Precision = Annotated[
    str, typer.Option("--precision", help="Of matrix products: bf16 (default), fp16, fp8, fp4.")
]
BaseBits = Annotated[int, typer.Option("--base-bits", help="Of frozen weights: 8 or 4 (QLoRA).")]
Imbalance = Annotated[
    float, typer.Option("--expert-imbalance", help="Tokens of the busiest expert rank over mean.")
]
Software = Annotated[
    str, typer.Option("--software", help="Whose efficiency is assumed, e.g. megatron, torch:2.6.")
]


From = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Configuration of accelerate, axolotl, TRL, torchtitan or Megatron: price its plan.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("plan", context_settings=FLAGS)(plan)


def plan(
    context: typer.Context,
    target: Target = "",
    model: ModelName = "",
    data: DataSource = "",
    lora: Lora = None,
    full: Full = False,
    on: On = "",
    seq: Seq = "",
    global_tokens: GlobalTokens = "",
    tokens: Tokens = "",
    deadline: Deadline = "",
    budget: Budget = "",
    largest: LargestOf = "",
    precision: Precision = "",
    base_bits: BaseBits = 0,
    expert_imbalance: Imbalance = 1.0,
    software: Software = "",
    foreign_file: From = "",
    output: Output = "",
    explain: Explain = False,
    json_file: JsonFile = "",
) -> None:
    """Plan a job: does it fit, how long, for how much; --section.key VALUE sets a key of the job.

    Exit 0: some cluster does it. 1: none does; the nearest jobs that fit are named.
    """
    from phalanx.planner.price import is_simulated
    from phalanx.planner.question import Question, dollars_of, row_count, total_count

    is_file = target.endswith(".toml")
    if target and model and not is_file:
        rule = f"the model is named twice: --model says {model}"
        raise JobError("job/syntax", "arguments", target, rule)
    if seq and data:
        rule = f"contradict each other: rows come from {data}, or all have one length"
        raise JobError("job/syntax", "--seq, --data", seq, rule)
    others = _method(lora, full, is_pretraining=bool(seq and not is_file))
    if global_tokens:
        others["train.global_batch_tokens"] = row_count(global_tokens, "--global-tokens")
    others |= {"limits.time_s": deadline, "model.name": model if is_file else model or target}
    others |= {"data.source": data}
    foreign = _read_foreign(foreign_file, on, others, context.args) if foreign_file else None
    rows = foreign.row_tokens or 0 if foreign is not None and not others["data.source"] else 0
    question = Question(
        on=on,
        whole_epoch=not is_file,
        seq_tokens=row_count(seq, "--seq") if seq else rows,
        total_tokens=total_count(tokens) if tokens else 0.0,
        budget_usd=dollars_of(budget) if budget else 0.0,
        sizes=bool(deadline or budget),
        largest=largest,
        precision=precision or (foreign.precision if foreign else "") or "bf16",
        base_bits=base_bits or (foreign.base_bits if foreign else 0) or 16,
        expert_imbalance=expert_imbalance,
        software=software or (foreign.software if foreign else ""),
        foreign=foreign,
    )
    job = resolve(target if is_file else "", "", "", context.args, others)
    if is_simulated(job):
        _simulate(job, on, output, explain, json_file)
    else:
        _price(job, question, output, explain, json_file)


def _read_foreign(path: str, on: str, others: dict[str, Any], arguments: list[str]) -> ForeignPlan:
    """Another program's configuration; what it states of the job is added to `others`, unless the
    user's own flags say it."""
    from phalanx.job import parse_flags
    from phalanx.planner.clusters import asked_clusters
    from phalanx.planner.importers import job_keys, read_foreign

    foreign = read_foreign(path)
    if foreign.role != "train":
        rule = "is the configuration of a server; a training plan was asked for"
        raise JobError("job/bad-value", "--from", path, rule)
    number = asked_clusters(on)[0].cluster.num_devices if on else 0
    own = {*parse_flags(arguments), *(key for key, value in others.items() if value)}
    for key, value in job_keys(foreign, number).items():
        is_elsewhere = key == "data.source" and not Path(str(value)).exists()
        if key not in own and not is_elsewhere:
            others[key] = value
    return foreign


def _method(lora: int | None, full: bool, *, is_pretraining: bool) -> dict[str, Any]:
    if lora is not None and full:
        rule = "contradict each other: train adapters, or all weights"
        raise JobError("job/syntax", "--lora, --full", None, rule)
    if lora is not None:
        return {"train.method": "lora", "train.lora_rank": lora}
    if full:
        return {"train.method": "full"}
    return {"train.method": "pretrain"} if is_pretraining else {}


def _price(job: Job, question: Question, output: str, explain: bool, json_file: str) -> None:
    from phalanx.cli import _plan_text as text
    from phalanx.planner.lockfile import lockfile
    from phalanx.planner.price import price_job

    priced = price_job(job, question)
    chosen = priced.best
    if output:
        if chosen is None:
            rule = "no cluster fits, so there is no plan to write"
            raise JobError("cli/file", "--output", output, rule)
        lockfile(priced, chosen).save(output)

    def show() -> None:
        text.show(priced)
        if explain:
            text.explain(priced)
        if output and chosen is not None:
            write(f"lockfile of {chosen.asked.text}: {output}\n")

    emit(versioned("plan", **priced.to_dict()), json_file, show)
    if not priced.fits:
        raise typer.Exit(1)


def _simulate(job: Job, on: str, output: str, explain: bool, json_file: str) -> None:
    """A toy or a schedule: one step is played on one cluster."""
    from phalanx.planner.jobs import simulate_job
    from phalanx.planner.make import plan_table

    planned, simulated = simulate_job(job, on)
    if output:
        planned.plan.save(output)
    document = versioned(
        "plan",
        fits=simulated.fits,
        plan=plan_table(planned.plan),
        report=simulated.report.to_dict(),
    )

    def show() -> None:
        show_report(simulated.report)
        write(f"\n{verdict(simulated)}\n")
        if explain:
            _explain(job, planned)

    emit(document, json_file, show)
    if not simulated.fits:
        raise typer.Exit(1)


def verdict(simulated: Any) -> str:
    """One sentence."""
    from phalanx.units import format_bytes

    peak, limit = format_bytes(simulated.peak_bytes), format_bytes(simulated.limit_bytes)
    if simulated.fits:
        return f"fits: {peak} of {limit} on the fullest device"
    return f"does not fit: the fullest device needs {peak} and has {limit}"


def _explain(job: Any, planned: Any) -> None:
    from phalanx.units import format_count

    write("\nmachine\n")
    for name, figure in planned.cluster.machine.figures().items():
        origin = f"{figure.kind}, {figure.source}, {figure.date}"
        paragraph(f"{name} = {figure.value:.4g}  ({origin})", indent=2, hang=4)
    write("job, where not a default\n")
    for key, value, origin in job.values():
        if origin != "default":
            paragraph(f"{key} = {value}  ({origin})", indent=2, hang=4)
    params = sum(unit.num_params for unit in planned.work.units)
    write(f"model\n  {len(planned.work.units)} units, {format_count(params)} parameters\n")
