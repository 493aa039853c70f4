"""The command line that all benchmarks share: print the report, exit 1 on a miss.

`--json FILE` saves the report, `--record SYSTEM` keeps its measured rows for that system's page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from phalanx.errors import GateError
from phalanx.report import Report
from phalanx.systems import record


def main(make_report: Callable[[], Report], doc: str | None) -> int:
    """Measure, print, and return the exit code.

    Args:
        make_report: does the measuring.
        doc: of the benchmark; its first line describes the command.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the versioned report there")
    parser.add_argument(
        "--record",
        metavar="SYSTEM",
        action="append",
        default=[],
        help="keep what was measured for `phalanx systems reproduce SYSTEM`",
    )
    options = parser.parse_args()
    report = make_report()
    for slug in options.record:
        note = f"{report.notes['machine']}, benchmarks/{Path(sys.argv[0]).name}"
        record(slug, report.rows, note)
    return finish(report, options.json)


def finish(report: Report, json_file: str | None) -> int:
    """Print, save where asked, and return the exit code: 1 on a missed gate."""
    print(report.to_markdown())
    if json_file:
        report.save(json_file)
    try:
        report.require_gates()
    except GateError as error:
        print(f"error[{error.code}]: {error}", file=sys.stderr)
        return error.exit_code
    return 0
