"""`phalanx data`: the tokens that a job trains on, and the account of all others. No torch."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.app import group
from phalanx.cli.job import FLAGS, DataSource, ModelName, Words, one_job, resolve, split_words
from phalanx.cli.output import JsonFile, emit, progress, table, versioned, write
from phalanx.errors import JobError

if TYPE_CHECKING:
    from phalanx.data.batches import SampleStream
    from phalanx.data.prepare import Prepared
    from phalanx.data.samples import Sample, Samples
    from phalanx.data.tokenise import TextTokenizer
    from phalanx.job import Job

_COUNTED, _MASKED, _PLAIN = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    data = group(app, "data", "Look at what a job trains on.")
    data.command("show", context_settings=FLAGS)(show)
    data.command("stats", context_settings=FLAGS)(stats)


def show(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="N [JOB] [--section.key VALUE]...",
            help="Sample, counted from 0 in the order of training; a job file; keys of the job.",
        ),
    ] = None,
    model: ModelName = "",
    data: DataSource = "",
    rows: Annotated[int, typer.Option("--rows", min=1, help="So many samples.")] = 1,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Of the held-out samples, in order of evaluation.")
    ] = False,
    ids: Annotated[bool, typer.Option("--ids", help="A line for each token, with its id.")] = False,
    json_file: JsonFile = "",
) -> None:
    """Print samples as the model sees them: what is learnt in green, or [[in brackets]]."""
    from phalanx.data.batches import SampleStream

    names, flags = split_words(words)
    numbers = [name for name in names if name.lstrip("-").isdigit()]
    job = resolve(one_job([n for n in names if n not in numbers]), model, data, flags)
    first = _number(numbers)
    prepared, tokenizer = _prepared(job)
    part = "held_out" if held_out else "train"
    samples: Samples = getattr(prepared, part)
    stream = SampleStream(samples, job.train.seed)
    shown = [_document(prepared, part, stream, at, tokenizer) for at in range(first, first + rows)]
    document = versioned("data-samples", part=part, samples=shown, audit=asdict(prepared.audit))

    def lines() -> None:
        for each, counter in zip(shown, range(first, first + rows)):
            write(_heading(each))
            sample = samples[stream.index(counter)]
            write(_ids(sample, tokenizer) if ids else _coloured(sample, tokenizer))
        _show_account(prepared)

    emit(document, json_file, lines)


def stats(
    words: Words = None, model: ModelName = "", data: DataSource = "", json_file: JsonFile = ""
) -> None:
    """Print how long the samples are, what counts, and what was dropped and why."""
    from phalanx.data.batches import SampleStream, num_steps

    names, flags = split_words(words)
    job = resolve(one_job(names), model, data, flags)
    prepared, _ = _prepared(job)
    stream = SampleStream(prepared.train, job.train.seed)
    epoch_steps = num_steps(stream, 1.0, job.train.global_batch_tokens)
    parts = {part: _lengths(getattr(prepared, part)) for part in ("train", "held_out")}
    reasons = _reasons(prepared)
    document = versioned(
        "data-stats",
        **parts,
        audit=asdict(prepared.audit),
        dropped=[dict(zip(("part", "reason", "rows", "tokens"), each)) for each in reasons],
        dropped_file=str(prepared.path / "dropped.jsonl"),
        epoch_steps=epoch_steps,
    )

    def lines() -> None:
        rows = [
            [name, *(_figure(parts[part].get(name)) for part in parts)] for name in parts["train"]
        ]
        table(("samples", "train", "held out"), rows)
        batch = job.train.global_batch_tokens
        write(f"\nan epoch is {epoch_steps:,} steps of {batch:,} tokens\n\n")
        _show_account(prepared)

    emit(document, json_file, lines)


def _number(numbers: list[str]) -> int:
    if len(numbers) > 1 or any(number.startswith("-") for number in numbers):
        rule = "expected the number of one sample, counted from 0"
        raise JobError("job/syntax", "arguments", " ".join(numbers), rule)
    return int(numbers[0]) if numbers else 0


def _prepared(job: Job) -> tuple[Prepared, TextTokenizer]:
    from phalanx.data.prepare import prepare
    from phalanx.data.tokenise import TextTokenizer
    from phalanx.models.source import data_settings, model_source

    source = model_source(job, log=progress, weights=False)
    settings = data_settings(job, source.config)
    found = prepare(settings, source.tokenizer_folder)
    return found, TextTokenizer(source.tokenizer_folder, settings.chat_template)


def _document(
    prepared: Prepared, part: str, stream: SampleStream, counter: int, tokenizer: TextTokenizer
) -> dict[str, Any]:
    index = stream.index(counter)
    sample = stream.samples[index]
    return {
        "sample": counter,
        "epoch": counter // len(stream.samples),
        "where": prepared.where(part, index),
        "tokens": sample.tokens.tolist(),
        "counted": sample.counted.tolist(),
        "text": tokenizer.decode(sample.tokens.tolist(), skip_special=False),
    }


def _heading(each: dict[str, Any]) -> str:
    epoch = f" (epoch {each['epoch']})" if each["epoch"] else ""
    counts = f"{len(each['tokens'])} tokens, {sum(each['counted'])} counted"
    return f"---- sample {each['sample']}{epoch}: {each['where']}, {counts}\n"


def _runs(sample: Sample) -> Iterator[tuple[int, int, bool]]:
    """(start, end, counted) of neighbours of equal weight."""
    start = 0
    for at in range(1, len(sample.tokens) + 1):
        if at == len(sample.tokens) or sample.counted[at] != sample.counted[start]:
            yield start, at, bool(sample.counted[start])
            start = at


def _coloured(sample: Sample, tokenizer: TextTokenizer) -> str:
    in_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    tokens, done, out = sample.tokens.tolist(), "", ""
    for _, end, counted in _runs(sample):
        upto = tokenizer.decode(tokens[:end], skip_special=False)  # alone, a run may lose a space
        text, done = upto[len(done) :], upto
        if in_colour:
            out += f"{_COUNTED if counted else _MASKED}{_printable(text)}{_PLAIN}"
        else:
            out += f"[[{_printable(text)}]]" if counted else _printable(text)
    return out + "\n"


def _printable(text: str) -> str:
    """Lines stay lines; whatever else would steer a terminal is written out."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode()
        for each in text
    )


def _ids(sample: Sample, tokenizer: TextTokenizer) -> str:
    lines = []
    for at, (token, counted) in enumerate(zip(sample.tokens.tolist(), sample.counted.tolist())):
        text = tokenizer.decode([token], skip_special=False)
        lines.append(f"{at:6d} {token:8d} {'counted' if counted else '-':7s} {text!r}\n")
    return "".join(lines)


def _lengths(samples: Samples) -> dict[str, float]:
    import numpy as np

    if not len(samples):
        return {"samples": 0, "tokens": 0}
    lengths = samples.lengths
    return {
        "samples": len(samples),
        "tokens": samples.num_tokens,
        "mean tokens": float(lengths.mean()),
        "p50 tokens": float(np.quantile(lengths, 0.5)),
        "p99 tokens": float(np.quantile(lengths, 0.99)),
        "longest tokens": int(lengths.max()),
        "counted share": samples.num_counted / samples.num_tokens,
    }


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if value > 1 else f"{100 * value:.1f} %"


def _reasons(prepared: Prepared) -> list[tuple[str, str, int, int]]:
    """(part, reason, rows, tokens) of everything dropped or cut, most tokens first."""
    rows, tokens = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for each in prepared.dropped():
        what = (each["part"], each["reason"])
        rows[what] += 1
        tokens[what] += each["dropped_tokens"]
    ordered = sorted(rows, key=lambda what: (-tokens[what], what))
    return [(*what, rows[what], tokens[what]) for what in ordered]


def _show_account(prepared: Prepared) -> None:
    audit = prepared.audit
    lines: list[tuple[str, int | str, int | str]] = [
        ("in", audit.rows_in, audit.tokens_in),
        ("trained (counted)", "", audit.tokens_trained),
        ("masked (context)", "", audit.tokens_masked),
        ("dropped", audit.rows_dropped, audit.tokens_dropped),
        ("held out", audit.rows_held_out, audit.tokens_held_out),
    ]
    optional: list[tuple[str, int | str, int | str]] = [
        ("held out, dropped", "", audit.tokens_held_out_dropped),
        ("beyond data.max_rows", audit.rows_beyond_max, ""),
    ]
    lines += [each for each in optional if any(each[1:])]
    cells = [[name, *(f"{n:,}" if n != "" else "" for n in numbers)] for name, *numbers in lines]
    table(("account", "rows", "tokens"), cells)
    reasons = _reasons(prepared)
    if reasons:
        listed = [[part, why, f"{rows:,}", f"{tokens:,}"] for part, why, rows, tokens in reasons]
        write("\n")
        table(("part", "dropped or cut because", "rows", "tokens dropped"), listed)
        write(f"\neach row: {prepared.path / 'dropped.jsonl'}\n")
