"""Plans written to a file: `--output`. Imports no numpy, so that every verb may."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.cli.output import write_file

if TYPE_CHECKING:
    from phalanx.plan import Plan


def put_lockfile(plan: Plan, output: str, cluster: str) -> str:
    """Write a lockfile; what to say of it.

    Raises:
        JobError: `cli/file`.
    """
    write_file(output, plan.to_text(), "--output")
    return f"lockfile of {cluster}: {output}"
