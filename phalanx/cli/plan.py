"""`phalanx plan`: what a job takes on clusters, in hours, dollars and memory; and the lockfile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from phalanx.cli import _plan_options as opt
from phalanx.cli.job import FLAGS, DataSource, ModelName, split_words
from phalanx.cli.output import JsonFile, emit, paragraph, versioned
from phalanx.errors import JobError, nearest_names

if TYPE_CHECKING:
    from phalanx.job import Job
    from phalanx.planner.importers import ForeignPlan
    from phalanx.planner.priced_job import PricedJob
    from phalanx.planner.question import Question


_OF_ALL = frozenset({"words", "model", "on", "precision", "json_file"})
_OF_SERVE = frozenset({
    "serve", "prompt", "answer", "rate", "requests", "ttft", "tpot", "software", "output",
    "emit_to", "foreign_file", "shared_prefix", "no_prefix_cache",
})  # fmt: skip
_OF_RL = frozenset({"rl", "prompt", "answer", "explain"})


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("plan", context_settings=FLAGS)(plan)


def plan(
    context: typer.Context,
    words: opt.Words = None,
    model: ModelName = "",
    data: DataSource = "",
    lora: opt.Lora = None,
    full: opt.Full = False,
    on: opt.On = "",
    seq: opt.Seq = "",
    global_tokens: opt.GlobalTokens = "",
    tokens: opt.Tokens = "",
    deadline: opt.Deadline = "",
    budget: opt.Budget = "",
    largest: opt.LargestOf = "",
    precision: opt.Precision = "",
    base_bits: opt.BaseBits = 0,
    expert_imbalance: opt.Imbalance = 1.0,
    software: opt.Software = "",
    foreign_file: opt.From = "",
    emit_to: opt.Emit = "",
    output: opt.Output = "",
    explain: opt.Explain = False,
    serve: opt.Serve = False,
    prompt: opt.PromptTokens = "",
    answer: opt.AnswerTokens = "",
    rate: opt.Rate = "",
    requests: opt.RequestFile = "",
    shared_prefix: opt.SharedPrefix = "",
    no_prefix_cache: opt.NoPrefixCache = False,
    ttft: opt.FirstToken = "",
    tpot: opt.EachToken = "",
    rl: opt.Rl = "",
    measured: opt.Measured = "",
    json_file: JsonFile = "",
) -> None:
    """Plan a job: does it fit, how long, for how much; --section.key VALUE sets a key of the job.

    Exit 0: some cluster does it. 1: none does; the nearest jobs that fit are named.
    """
    target, keys = _target_of(context, words)
    serving = {"prompt": prompt, "answer": answer, "rate": rate, "trace": requests,
               "shared-prefix": shared_prefix, "ttft": ttft, "tpot": tpot,
               "no-prefix-cache": "on" if no_prefix_cache else ""}  # fmt: skip
    server = _server_of(foreign_file, must_serve=serve)
    if serve or server:
        _refuse_others(context, "--serve" if serve else f"the server of {foreign_file}", _OF_SERVE)
        from phalanx.cli._plan_serve import plan_serving

        asks = serving | {"precision": precision, "software": software, "output": output}
        asks["emit"] = emit_to
        plan_serving(target or model, on, asks, keys, json_file, server)
        return
    if rl:
        _refuse_others(context, "--rl", _OF_RL)
        from phalanx.cli._plan_rl import plan_rl

        asks = {"precision": precision, "prompt": prompt, "answer": answer}
        plan_rl(target or model, on, rl, asks, keys, explain, json_file)
        return
    _refuse_serving(serving)
    from phalanx.cli._plan_ask import Asked

    asked = Asked(target, model, data, on, keys, emit_to)
    asked.method(lora, full, "" if foreign_file else seq)
    asked.limits(deadline, budget)
    asked.rows(seq, global_tokens, tokens)
    if foreign_file:
        asked.read(foreign_file)
    question = asked.question(
        largest=largest,
        precision=precision,
        base_bits=base_bits,
        expert_imbalance=expert_imbalance,
        software=software,
        measured=measured,
    )
    _answer(asked.job(), question, on, output, emit_to, explain, json_file)


def _target_of(context: typer.Context, words: Sequence[str] | None) -> tuple[str, list[str]]:
    """The job file or the model among the words, "" for neither; and the keys of the job."""
    names, keys = split_words(words)
    options = [option for each in context.command.params for option in each.opts]
    for word in keys:
        if word.startswith("--") and "." not in word:
            rule = "is no option and no --section.key of a job"
            raise JobError("job/syntax", word, None, rule, legal=nearest_names(word, options))
    if len(names) > 1:
        rule = "expected one job file or model; a key of the job is written --section.key VALUE"
        raise JobError("job/syntax", "arguments", " ".join(names), rule)
    return (names[0] if names else ""), keys


def _refuse_others(context: typer.Context, question: str, read: frozenset[str]) -> None:
    """Refuse options that a question would leave unread."""
    for parameter in context.command.params:
        name, source = str(parameter.name), context.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE" and name not in read | _OF_ALL:
            flag, value = max(parameter.opts, key=len), context.params[name]
            shown = None if isinstance(value, bool) else value
            raise JobError("job/syntax", flag, shown, f"means nothing beside {question}")


def _refuse_serving(words: dict[str, str]) -> None:
    """Refuse options of a server where training is planned."""
    for name, given in words.items():
        if given:
            at = "--serve and --rl" if name in ("prompt", "answer") else "--serve"
            raise JobError("job/syntax", f"--{name}", given, f"is an option of {at}")


def _server_of(path: str, *, must_serve: bool) -> ForeignPlan | None:
    """The plan of a file that starts a server; None for one that trains, and for none.

    Raises:
        JobError: from `read_foreign`; `job/bad-value` for one that trains where a server must be.
    """
    if not path:
        return None
    from phalanx.planner.importers import read_foreign

    foreign = read_foreign(path)
    if must_serve and foreign.role != "serve":
        rule = "configures training; --serve reads a script with `vllm serve`"
        raise JobError("job/bad-value", "--from", path, rule)
    return foreign if foreign.role == "serve" else None


def _answer(
    job: Job, question: Question, on: str, output: str, emit_to: str, explain: bool, json_file: str
) -> None:
    from phalanx.planner.price import is_simulated

    if is_simulated(job):
        from phalanx.cli._plan_toy import simulate

        simulate(job, on, output, explain, json_file)
        return
    _price(job, question, output, emit_to, explain, json_file)


def _price(
    job: Job, question: Question, output: str, emit_to: str, explain: bool, json_file: str
) -> None:
    if output and emit_to:
        rule = "contradict each other: each is priced as its own program runs; ask twice"
        raise JobError("job/syntax", "--output, --emit", None, rule)
    from phalanx.cli import _plan_text as text
    from phalanx.cli._plan_file import file_table, show_file
    from phalanx.planner.price import price_job

    priced = price_job(job, question)
    written = [_lock(priced, output)] if output else []
    written += _emit_files(priced, emit_to) if emit_to else []

    def show() -> None:
        text.show(priced)
        if question.foreign is not None:
            show_file(question.foreign, explain=explain)
        if explain:
            from phalanx.cli._plan_explain import explain as show_sources

            show_sources(priced)
        for line in written:
            paragraph(line, hang=2)

    document = priced.to_dict()
    if question.foreign is not None:
        document |= {"file": file_table(question.foreign)}
    emit(versioned("plan", **document), json_file, show)
    if not priced.fits:
        raise typer.Exit(1 if priced.can_say else 2)


def _lock(priced: PricedJob, output: str) -> str:
    """Write the lockfile of the best cluster, and say so."""
    from phalanx.cli._lockfile import put_lockfile
    from phalanx.planner.lockfile import lockfile

    if priced.best is None:
        rule = "no cluster fits, so there is no plan to write"
        raise JobError("cli/file", "--output", output, rule)
    return put_lockfile(lockfile(priced, priced.best), output, priced.best.asked.text)


def _emit_files(priced: PricedJob, emit_to: str) -> list[str]:
    """Write the best plan for another program, and say what was written."""
    from phalanx.cli._plan_emit import put
    from phalanx.planner.lockfile import foreign_files

    target, _, folder = emit_to.partition(":")
    if priced.best is None:
        rule = "no cluster fits, so there is no plan to write"
        raise JobError("cli/file", "--emit", emit_to, rule)
    plan, files = foreign_files(priced, priced.best, target)
    lines = [put(files, target, folder, priced.best.asked.text)]
    best = priced.best.best
    if best is not None and plan is not best:
        peak = f"{plan.sized.peak_bytes / 2**30:.1f} GiB"
        lines.append(f"  the best plan that {target} runs: {plan.sized.describe()}; {peak}")
    if software := priced.training.software:
        lines.append(f"  all of it priced as {software} runs it (--software)")
    return lines
