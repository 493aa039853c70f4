"""The command line: parsing and printing only.

One module per verb, found by its name and imported only when that verb (or the help page) is
asked for. A verb's module holds `register(app)`, which adds its command or group, and imports what
it needs inside its commands, so that `phalanx --help` stays fast.

Conventions of all verbs: stdout is the result, stderr the progress; `--json FILE` writes the
versioned JSON form, "-" meaning standard output, which then holds nothing else. Exit 0: done or
fits; 1: does not fit or a gate missed; 2: bad input or cannot say; 130: interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: arguments without the program's name; None: those of this process.
    """
    from phalanx.cli.app import run

    return run(argv)
