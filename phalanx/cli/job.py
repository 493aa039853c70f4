"""`phalanx job show|keys`: a job with every value and its origin; what can be asked for at all.

Also how other verbs read a job from the words of a command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.output import JsonFile, emit, table, versioned, write
from phalanx.errors import JobError

if TYPE_CHECKING:
    from phalanx.job import Job

JobFile = Annotated[str, typer.Argument(metavar="JOB", help="Job file (TOML).")]
# A verb whose job file may be left out takes all its words: a job file (and, for some verbs, more),
# and --section.key VALUE in any order. `split_words` tells them apart.
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB] [--section.key VALUE]...", help="Job file (TOML), keys of the job."
    ),
]
ModelName = Annotated[str, typer.Option("--model", help="Folder, Hub name or built-in model.")]
DataSource = Annotated[str, typer.Option("--data", help="File, folder, Hub name or 'python-docs'.")]
FLAGS = {"ignore_unknown_options": True, "allow_extra_args": True}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    group = typer.Typer(
        help="Job files, and every key of a job with its meaning.", rich_markup_mode=None
    )
    group.command("show", context_settings=FLAGS)(show)
    group.command("keys")(keys)
    app.add_typer(group, name="job")


def show(context: typer.Context, job: JobFile, json_file: JsonFile = "") -> None:
    """Print each value of a job with its origin; --section.key VALUE overrides."""
    from phalanx.job import load_job, parse_flags

    resolved = load_job(job, parse_flags(context.args))
    values = [
        {"key": key, "value": value, "origin": origin} for key, value, origin in resolved.values()
    ]
    document = versioned("job", name=resolved.name, result_key=resolved.result_key, values=values)

    def lines() -> None:
        rows = [[str(v["key"]), _text(v["value"]), str(v["origin"])] for v in values]
        table(("key", "value", "from"), rows)

    emit(document, json_file, lines)


def keys(
    section: Annotated[str, typer.Argument(help="Only this section, or this key.")] = "",
    json_file: JsonFile = "",
) -> None:
    """List the keys of a job; each is a flag of the verbs that take a job: --section.key VALUE."""
    from phalanx.job.keys import describe_keys

    found = describe_keys(section)
    document = versioned("keys", keys=[asdict(each) for each in found])

    def lines() -> None:
        for name in dict.fromkeys(each.section for each in found):
            chosen = [each for each in found if each.section == name]
            rows = [[f"--{each.key}", each.default, each.meaning] for each in chosen]
            table(("key", "default", "meaning"), rows, f"[{name}] {chosen[0].section_meaning}")
            write("\n")

    emit(document, json_file, lines)


def split_words(words: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """Words of a command line as (names, dotted flags with their values), whatever their order.

    A flag without "=" takes the word behind it.
    """
    names: list[str] = []
    flags: list[str] = []
    rest = list(words or ())
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            names.append(word)
            continue
        flags.append(word)
        if "=" not in word and rest:
            flags.append(rest.pop(0))
    return names, flags


def one_job(names: Sequence[str]) -> str:
    """The job file among the words of a verb; "" when there is none.

    Raises:
        JobError: `job/syntax` for more than one.
    """
    if len(names) > 1:
        rule = "expected one job file at most; a key of the job is written --section.key VALUE"
        raise JobError("job/syntax", "arguments", " ".join(names), rule)
    return names[0] if names else ""


def resolve(
    job: str,
    model: str,
    data: str,
    arguments: Sequence[str],
    others: Mapping[str, Any] | None = None,
) -> Job:
    """The job of a verb: its file, then its dotted flags, then its short flags.

    Args:
        job: job file; "" for none.
        model, data: what `--model` and `--data` gave; "" when they were not.
        arguments: dotted flags, as `split_words` returns them.
        others: more short flags of the verb: dotted key -> value ("" or None: not given).

    Raises:
        JobError: from the job; `job/syntax` when a short and a dotted flag give a key differently.
    """
    from phalanx.job import load_job, parse_flags

    flags: dict[str, Any] = dict(parse_flags(arguments))
    short = {"model.name": model, "data.source": data} | dict(others or {})
    for dotted, value in short.items():
        if value is None or value == "":
            continue
        if str(flags.get(dotted, value)) != str(value):
            rule = f"is given twice: a short flag says {value}"
            raise JobError("job/syntax", f"--{dotted}", flags[dotted], rule)
        flags[dotted] = value
    return load_job(job or None, flags)


def _text(value: object) -> str:
    return '""' if value == "" else str(value)
