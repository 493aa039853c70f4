"""Files of other programs, written where the user says: `--emit TARGET[:FOLDER]`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from phalanx.cli.output import write_file
from phalanx.errors import JobError
from phalanx.planner.emitters import Site, emit
from phalanx.planner.importers import ForeignPlan


def written_files(emit_to: str, plan: ForeignPlan, site: Site, cluster: str) -> str:
    """Write a plan for another program; what was written, in a line.

    Args:
        emit_to: target, and a folder behind a colon.
        cluster: that the plan is of, as the user called it.

    Raises:
        JobError: `registry/unknown`, `cli/file`. PlanError: `emit/impossible`.
    """
    target, _, folder = emit_to.partition(":")
    return put(emit(target, plan, site), target, folder, cluster)


def put(files: Mapping[str, str], target: str, folder: str, cluster: str) -> str:
    """Write files into a folder ("": the current one), which is made; what was written, in a line.

    Raises:
        JobError: `cli/file` where the folder or a file cannot be made.
    """
    try:
        Path(folder or ".").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise JobError("cli/file", "--emit", folder, f"cannot be made: {reason}") from error
    paths = [f"{folder or '.'}/{name}" for name in files]
    for path, content in zip(paths, files.values()):
        write_file(path, content, "--emit")
    return f"{target} of {cluster}: {', '.join(paths)}"
