"""`python -m phalanx.engines.parity RUN_FOLDER [NUM_NEW] < prompts.json` prints a report as JSON.

A process of its own, so that no model stays in the memory of a run.
"""

from __future__ import annotations

import json
import os
import sys

from phalanx.errors import PhalanxError

# Read when torch is imported. Threads that spin at barriers make this several times slower where
# other programs have the cores; large products lose nothing by sleeping.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main(arguments: list[str]) -> int:
    """Compare the run's forms on the prompts of standard input, a list of lists of token ids."""
    from phalanx.engines.parity.proof import prove

    try:
        report = prove(arguments[0], json.load(sys.stdin), *map(int, arguments[1:2]))
    except PhalanxError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(report.to_dict()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
