"""Finds the verbs, builds the parser, and turns errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, Any

import typer

import phalanx
from phalanx import cli
from phalanx.errors import PhalanxError

# The help page reads in the order of the work; a verb that is not named here comes last.
_ORDER = (
    *("plan", "simulate", "data", "train", "serve", "run"),
    *("job", "init", "bench", "trace", "doctor", "systems", "policies", "lab"),
)
_NOT_VERBS = ("app", "output")
_INTERRUPTED, _BUG = 130, 70
# Usage errors share this ancestor, which older releases of typer take from click.
_UsageError: type[Exception] = next(
    cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException"
)


def verbs() -> list[str]:
    """Names of the modules that hold a verb, in the order of the help page; imports none."""
    found = [m.name for m in iter_modules(cli.__path__) if not m.name.startswith("_")]
    rank = {verb: index for index, verb in enumerate(_ORDER)}
    verbs = [name.replace("_", "-") for name in found if name not in _NOT_VERBS]
    return sorted(verbs, key=lambda verb: (rank.get(verb, len(rank)), verb))


def build(argv: Sequence[str]) -> typer.Typer:
    """The parser for these arguments: with the verb that they name, or with all verbs."""
    app = typer.Typer(
        name="phalanx",
        help="Parallel strategies for large models: plan, simulate, run.",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        no_args_is_help=False,
        invoke_without_command=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    known = verbs()
    named = next((word for word in argv if not word.startswith("-")), None)
    for verb in [named] if named in known else known:
        import_module(f"phalanx.cli.{verb.replace('-', '_')}").register(app)
    return app


def group(app: typer.Typer, name: str, help_text: str) -> typer.Typer:
    """A verb with verbs of its own, which prints its help page when called alone."""

    def alone(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    made = typer.Typer(help=help_text, invoke_without_command=True, callback=alone)
    app.add_typer(made, name=name)
    return made


def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error was raised; legal after any verb.")
    ] = False,
) -> None:
    if version:
        typer.echo(f"phalanx {phalanx.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(argv: Sequence[str] | None = None) -> int:
    """Parse, call the verb, and report what went wrong in one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        command = typer.main.get_command(build(words))
        code = command.main(args=words, prog_name="phalanx", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except PhalanxError as error:
        if debug:
            traceback.print_exc()
        _say(f"error[{error.code}]: {error.sentence()}")
        return error.exit_code
    except _UsageError as error:
        _say(f"error[cli/usage]: {_usage_sentence(error, words)}")
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except Exception:  # shown whole, but never with the exit code of "does not fit"
        traceback.print_exc()
        _say("this is a mistake in Phalanx, not in what you asked; please report it")
        return _BUG


def _usage_sentence(error: Any, words: Sequence[str]) -> str:
    message = error.format_message().rstrip(".")
    if "--json" in message and "argument" in message:
        message += "; it needs a file name, '-' for standard output"
    context = getattr(error, "ctx", None)
    verb = [word for word in words[:1] if word in verbs()]
    command = context.command_path if context is not None else " ".join(["phalanx", *verb])
    return f"{message}; see `{command} --help`"


def _say(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:  # nobody reads any more; the exit code still tells
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
