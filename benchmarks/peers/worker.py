"""One process of one peer, driven line by line: a step for each "step N", what it took as JSON.

    python benchmarks/peers/worker.py MODULE CASE

Where other programs share the cores, processor time says more than wall time; both are printed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from time import perf_counter, process_time

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main(arguments: list[str]) -> int:
    """Build the peer, then obey."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    from peers.case import Case
    from phalanx.engines.memory import process_bytes, restart_peak

    module = importlib.import_module(f"peers.{arguments[0]}")
    case = Case.load(Path(arguments[1]))
    import torch

    torch.set_num_threads(int(os.environ["PEER_THREADS"]))
    baseline = process_bytes()
    step = module.build(case)
    torch.set_num_threads(int(os.environ["PEER_THREADS"]))

    def answer(**values: object) -> None:
        print(json.dumps(values), file=answers, flush=True)

    restart_peak()
    answer(ready=True, baseline_bytes=baseline.pss)
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        if word == "end":
            break
        if word == "profile":
            answer(parts=module.profiled(step, int(number)))
            continue
        start_s, start_cpu_s = perf_counter(), process_time()
        step(int(number))
        work = getattr(step, "work", lambda number: (None, None))(int(number))
        spent = {"step_s": perf_counter() - start_s, "cpu_s": process_time() - start_cpu_s}
        answer(
            **spent,
            tokens=work[0],
            counted=work[1],
            peak_bytes=process_bytes().peak_pss - baseline.pss,
        )
    answers.flush()
    os._exit(0)  # libraries' process groups may wait for each other


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
