"""A rank that steps through collectives under a watch, and misbehaves as its arguments say.

    python -m tests.engines.watched_rank RUN_FOLDER DEED HANG_S

At step 3 rank 1 does its DEED, once its newest sign says that it is there.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.engines.checkpoint import StopSignal
from phalanx.engines.process import start_process
from phalanx.engines.signs import read_sign
from phalanx.engines.watch import Watch
from phalanx.errors import JobError, PhalanxError
from phalanx.mesh import Mesh

STEP, SLOW_S = 3, 3.5


def compute(seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        torch.ones(64, 64) @ torch.ones(64, 64)


def await_sign(folder: Path, rank: int) -> None:
    while (sign := read_sign(folder, rank)) is None or sign.step < STEP:
        time.sleep(0.01)


DEEDS = {
    "nothing": lambda: None,
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(1000),
    "compute": lambda: compute(SLOW_S),
}


def step(number: int, rank: int, deed: str, folder: str) -> None:
    compute(0.1)
    if rank == 1 and number == STEP:
        await_sign(Path(folder), rank)
        (Path(folder) / "deed").write_text(str(time.monotonic()))
        if deed == "linger":
            atexit.register(time.sleep, 100.0)
        if deed in ("raise", "linger"):
            raise RuntimeError("no such thing")
        if deed == "refuse":
            raise JobError("data/row", "rows.jsonl:3", None, "is a row of no known form")
        DEEDS[deed]()
    dist.all_reduce(torch.ones(1000))


def main(folder: str, deed: str, hang_s: str) -> None:
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # as training does: torchrun tells the others to stop as soon as one has died
    with StopSignal(), Watch(folder, rank, num_ranks, hang_s=float(hang_s)) as watch:
        if deed == "prepare" and rank == 0:
            compute(SLOW_S)
        elif deed == "prepare":
            time.sleep(SLOW_S)  # as those do who wait for a lock
        with start_process("cpu", Mesh(shard=num_ranks), watch=watch):
            for number in range(6):
                watch.note(number, "step")
                step(number, rank, "nothing" if deed == "prepare" else deed, folder)
                if rank == 0:
                    print(number, flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except PhalanxError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
