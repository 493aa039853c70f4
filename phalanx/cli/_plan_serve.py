"""`phalanx plan --serve`: what clusters can serve of a model, asked, priced and printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import inf, isfinite
from typing import Any

import typer

from phalanx.cli._lockfile import put_lockfile
from phalanx.cli._plan_emit import written_files
from phalanx.cli._plan_file import file_table, show_file
from phalanx.cli._plan_serve_ask import require_positions, serve_question
from phalanx.cli._plan_serve_reuse import asked_words, reuse_table, reuse_words
from phalanx.cli._plan_serve_words import (
    bar_words,
    cut_words,
    engine_words,
    per_s,
    share_words,
    time_words,
)
from phalanx.cli.job import resolve
from phalanx.cli.output import emit, paragraph, table, versioned, write
from phalanx.errors import JobError
from phalanx.job import Job
from phalanx.planner.clusters import asked_clusters
from phalanx.planner.emitters import Site
from phalanx.planner.importers import ForeignPlan
from phalanx.planner.models import PricedModel, priced_model
from phalanx.planner.serve_given import (
    GivenServer,
    given_server,
    server_of,
    weight_precision,
)
from phalanx.planner.serve_lockfile import serve_lockfile
from phalanx.planner.serve_nearest import nearest_that_serve
from phalanx.planner.serve_plan import (
    Engines,
    ServeAnswer,
    ServeQuestion,
    serve_answer,
)
from phalanx.units import format_bytes, format_count

_HEADER = ("cluster", "verdict", "req/s", "of knee", "TTFT P99", "TPOT P99", "$/h", "$/M output")
_MANY_REASONS = 3


def plan_serving(
    model: str,
    on: str,
    words: Mapping[str, str],
    arguments: Sequence[str],
    json_file: str,
    given: ForeignPlan | None = None,
) -> None:
    """Answer for each cluster; exit 1 where none serves what is asked.

    Args:
        words: prompt, answer, rate, trace, shared-prefix, no-prefix-cache, ttft, tpot, precision,
            software, output as they were given.
        arguments: dotted flags.
        given: a server of another program's file, priced beside the best.

    Raises:
        JobError: for words that mean nothing; from `serve_lockfile`.
    """
    if words["output"] and words.get("emit"):
        rule = "write two plans: each is priced as its program serves; ask twice"
        raise JobError("job/syntax", "--output, --emit", None, rule)
    job = resolve("", model or (given.model or "" if given else ""), "", arguments)
    stored = weight_precision(given, job.model.name)
    question = serve_question({**words, "precision": words["precision"] or stored})
    served = priced_model(job)
    require_positions(served, question)
    shape = served.sizes
    asked = asked_clusters(on or job.plan.on)
    answers = [serve_answer(shape, each, question) for each in asked]
    servers = [
        given_server(given, shape, each, question, answer)
        for each, answer in zip(asked, answers)
        if given is not None
    ]
    fitting = [answer for answer in answers if answer.fits]
    nearest: list[str] = []
    if not fitting:
        nearest = [text for each in asked for text in nearest_that_serve(shape, each, question)][:3]
    written = _emitted(words.get("emit", ""), job.model.name, answers, question)
    if words["output"]:
        written = _locked(words["output"], job, served, answers, question)
    document = versioned(
        "serving plan",
        model=shape.name,
        parameters=shape.num_params,
        fits=bool(fitting),
        answers=[_to_dict(answer, question) for answer in answers],
        nearest=nearest,
        given=[_given_table(server, question) for server in servers],
    )
    if given is not None:
        document |= {"file": file_table(given)}

    def show() -> None:
        params, active = format_count(shape.num_params), format_count(shape.active_params)
        of_them = f", {active} of them active" if shape.expert_params else ""
        paragraph(f"{shape.name}: {params} parameters{of_them}, weights in {question.precision}")
        paragraph(_asked(question))
        write("\n")
        table(_HEADER, [_line(answer) for answer in answers])
        write("\n")
        for answer in answers:
            _show(answer, question)
        for each, server, answer in zip(asked, servers, answers):
            _show_given(each.text, server, answer)
        if given is not None:
            show_file(given)
        for line in written:
            paragraph(line, hang=2)
        if not fitting:
            near = "; ".join(nearest) or "none was found"
            paragraph(f"nearest that serve it: {near}", hang=2)

    emit(document, json_file, show)
    if not fitting:
        raise typer.Exit(1)


def _emitted(
    emit_to: str, model: str, answers: Sequence[ServeAnswer], question: ServeQuestion
) -> list[str]:
    """Write the best engines of the first cluster that serves it; what was written."""
    if not emit_to:
        return []
    answer = next((each for each in answers if each.fits), None)
    if answer is None:
        raise JobError("cli/file", "--emit", emit_to, "no cluster serves it: nothing to write")
    server = server_of(model, answer, question)
    assert answer.best is not None and server.devices
    per_node = min(answer.asked.cluster.machine.devices_per_domain, max(8, server.devices))
    site = Site(accelerator=answer.asked.cluster.machine.name.upper(), devices_per_node=per_node)
    lines = [written_files(emit_to, server, site, answer.asked.text)]
    times = answer.asked.cluster.num_devices // server.devices
    return lines + ([f"  start it {times} times: one engine is in it"] if times > 1 else [])


def _locked(
    output: str,
    job: Job,
    model: PricedModel,
    answers: Sequence[ServeAnswer],
    question: ServeQuestion,
) -> list[str]:
    """Write the lockfile of the first cluster that serves it; what was written."""
    answer = next((each for each in answers if each.fits), None)
    if answer is None:
        rule = "no cluster serves it, so there is no plan to write"
        raise JobError("cli/file", "--output", output, rule)
    plan, own = serve_lockfile(job, model, answer.asked, question)
    best = own.best
    assert best is not None
    return [
        put_lockfile(plan, output, answer.asked.text),
        f"  as `phalanx serve --plan` runs it: {engine_words(best)}, "
        f"{per_s(best.knee_per_s)} requests/s at most, TTFT {bar_words(best.ttft_s)}, TPOT "
        f"{bar_words(best.tpot_s)}; start it once for each engine"
        + ("; it reuses no prefixes yet" if question.names_prefixes else ""),
    ]


def _show_given(cluster: str, server: GivenServer, best: ServeAnswer) -> None:
    """The file's engine, and what to change of it for the best one."""
    answer, to = server.answer, "; ".join(server.changes)
    if answer is None:
        paragraph(f"{cluster}: the file's engine cannot be had here: {to}", hang=2)
        return
    if answer.best is None:
        paragraph(f"{cluster}: the file's engine has no room for a request's cache", hang=2)
    else:
        verdict = "serves it" if answer.fits else "is too slow"
        tails = answer.played.percentiles("ttft_s") if answer.played else (inf, inf)
        paragraph(
            f"{cluster}: the file's engine {verdict}: {engine_words(answer.best)}; "
            f"{per_s(_served(answer, answer.best))} requests/s, at most "
            f"{answer.best.max_running:,} at once on each, TTFT P99 {time_words(tails[1])}, TPOT "
            f"{bar_words(answer.best.tpot_s)}",
            hang=2,
        )
        if server.started < answer.best.replicas:
            words = f"{server.started:,} of these {answer.best.replicas:,} engines"
            paragraph(f"the file starts {words}; the others have a server of their own", *(2, 4))
    if to and best.best is not None:
        tails = best.played.percentiles("ttft_s") if best.played else (inf, inf)
        to += (
            f" ({per_s(_served(best, best.best))} requests/s, TTFT P99 {time_words(tails[1])}, "
            f"TPOT {bar_words(best.best.tpot_s)})"
        )
    paragraph(f"change: {to}" if to else "it is cut as the best one is", *(2, 4))
    if server.unpriced:
        paragraph(f"not in its price: {', '.join(server.unpriced)}", *(2, 4))


def _given_table(server: GivenServer, question: ServeQuestion) -> dict[str, Any]:
    priced = _to_dict(server.answer, question) if server.answer else None
    return {"answer": priced, "changes": server.changes, "not_priced": server.unpriced}


def _asked(question: ServeQuestion) -> str:
    if question.requests is not None:
        said = f"{question.requests.source}, on average "
    else:
        said = "requests of "
    said += f"{question.prompt_tokens:,.0f} tokens of prompt and {question.output_tokens:,.0f} "
    said += "of answer" + asked_words(question)
    if question.asked_per_s:
        said += f", {per_s(question.asked_per_s)} a second"
    promised = [
        f"{name} within {time_words(seconds)}"
        for name, seconds in (("TTFT", question.ttft_s), ("TPOT", question.tpot_s))
        if isfinite(seconds)
    ]
    return said + (f"; promised to 99 of 100: {', '.join(promised)}" if promised else "")


def _line(answer: ServeAnswer) -> tuple[str, ...]:
    best = answer.best
    if best is None:
        return (answer.asked.text, "does not fit", *[""] * (len(_HEADER) - 2))
    played = answer.played
    tails = [played.percentiles(name)[1] if played else inf for name in ("ttft_s", "tpot_s")]
    return (
        answer.asked.text,
        "serves it" if answer.fits else "too slow",
        per_s(_served(answer, best)),
        share_words(answer.played_per_s / best.knee_per_s),
        *map(time_words, tails),
        f"{answer.usd_per_h:,.2f}" if isfinite(answer.usd_per_h) else "unknown",
        per_s(answer.usd_per_million_output) if isfinite(answer.usd_per_h) else "unknown",
    )


def _served(answer: ServeAnswer, best: Engines) -> float:
    """Requests a second: within the promises where there are any."""
    return answer.kept_per_s if answer.kept_per_s is not None else best.most_per_s


def _show(answer: ServeAnswer, question: ServeQuestion) -> None:
    best, cluster = answer.best, answer.asked.cluster
    write(f"{answer.asked.text}\n")
    if answer.asked.note:
        paragraph(answer.asked.note, indent=2, hang=2)
    if best is None:
        rule = "no engine leaves room for the cache of one request"
        paragraph(f"all of {_ways(answer.counted)} too large: {rule}", indent=2, hang=2)
        return
    room = cluster.machine.usable_bytes - best.weight_bytes
    held = f"{format_bytes(best.weight_bytes)} of weights a device"
    paragraph(
        f"{engine_words(best)}: {held}, {best.kv_tokens:,.0f} KV tokens an engine "
        f"({format_bytes(max(room, 0.0))} a device left), at most {best.max_running:,} at once",
        *(2, 2),
    )
    means = ", ".join(
        f"{name} {bar_words(getattr(best, key))}"
        for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("latency", "latency_s"))
    )
    at = f"steady load of {per_s(best.loaded)} requests/s"
    paragraph(f"{at} (formula, 90 % bars): {means}", *(2, 2))
    if answer.played is not None:
        tails = ", ".join(
            f"{name} {time_words(p50)} / {time_words(p99)}"
            for name, (p50, p99) in (
                ("TTFT", answer.played.percentiles("ttft_s")),
                ("TPOT", answer.played.percentiles("tpot_s")),
            )
        )
        dropped = f"; {answer.played.preempted} caches dropped" if answer.played.preempted else ""
        paragraph(
            f"{len(answer.played.ttft_s):,} requests played at {per_s(answer.played_per_s)} a "
            f"second (simulated, P50 / P99): {tails}{dropped}",
            *(2, 2),
        )
    knee = f"{per_s(best.knee_per_s)} requests/s is all it can do (the knee)"
    share = answer.played_per_s / best.knee_per_s
    kept = answer.kept_per_s
    promise = f"; {per_s(kept)} requests/s keep the promises" if kept is not None else ""
    paragraph(f"{knee}: at {share_words(share)} of it{promise}; bound by {best.bound_by}", *(2, 2))
    if reuse := reuse_words(answer, question):
        paragraph(reuse, *(2, 2))
    if answer.split is not None and answer.split_degrees is not None:
        split, better = answer.split, answer.split.most_per_s / best.most_per_s - 1
        paragraph(
            f"divided into {split.for_prompts:,} for prompts and {split.for_answers:,} for answers "
            f"({cut_words(answer.split_degrees)}): {per_s(split.most_per_s)} requests/s keep the "
            f"promises in the mean (formula), {100 * better:+.0f} % against engines that do both",
            *(2, 2),
        )
    counted = f"{_ways(answer.counted)} priced, {answer.too_large} too large"
    reasons = [f"{count} {why}" for why, count in answer.illegal.most_common(_MANY_REASONS)]
    paragraph("; ".join([counted, *reasons]), *(2, 2))
    paragraph("; ".join(answer.source), *(2, 2))


def _ways(count: int) -> str:
    return f"{count} way{'' if count == 1 else 's'} to cut engines"


def _to_dict(answer: ServeAnswer, question: ServeQuestion) -> dict[str, Any]:
    """Plain tables; unknown numbers are null."""
    best, played = answer.best, answer.played
    found: dict[str, Any] = {
        "cluster": answer.asked.text,
        "fits": answer.fits,
        "ways": answer.counted,
        "too_large": answer.too_large,
        "illegal": dict(answer.illegal),
    }
    if best is None:
        return found
    found |= {
        "engine": dict(best.degrees) | {"replicas": best.replicas, "idle_devices": best.idle},
        "kv_tokens": best.kv_tokens,
        "weight_bytes": best.weight_bytes,
        "max_running": best.max_running,
        "steady": {
            name: dict(zip(("value", "low", "high"), getattr(best, name)))
            for name in ("ttft_s", "tpot_s", "latency_s")
        },
        "steady_per_s": best.loaded,
        "knee_per_s": best.knee_per_s,
        "kept_per_s": answer.kept_per_s,
        "bound_by": best.bound_by,
        "usd_per_h": _known(answer.usd_per_h),
        "usd_per_million_output": _known(answer.usd_per_million_output),
        "source": list(answer.source),
    }
    reuse = reuse_table(answer, question)
    if reuse is not None:
        found["prefix_reuse"] = reuse
    if answer.split is not None:
        found["divided"] = asdict(answer.split) | {"engine": dict(answer.split_degrees or {})}
    if played is not None:
        found["played"] = {"requests": len(played.ttft_s), "per_s": answer.played_per_s} | {
            name: dict(zip(("p50", "p99"), map(_known, played.percentiles(name))))
            for name in ("ttft_s", "tpot_s", "latency_s")
        }
    return found


def _known(value: float) -> float | None:
    return value if isfinite(value) else None
