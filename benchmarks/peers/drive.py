"""Processes of peers, driven step by step so that all of them meet the same machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WORKER = Path(__file__).with_name("worker.py")
_TAIL_BYTES = 2000


@dataclass
class Measured:
    """What the steps of a peer took.

    Attributes:
        step_s: wall time of each step, of the slowest process; cpu_s: processor time of all.
        peak_bytes: PSS of all processes above what their imports take.
        tokens, counted: of each step, where they are not the case's.
    """

    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    peak_bytes: float = 0.0
    tokens: list[int | None] = field(default_factory=list)
    counted: list[int | None] = field(default_factory=list)


class Peer:
    """A peer's processes, started and waiting.

    Args:
        module: its file in `peers`.
        num_processes, num_threads: of each process.
        case: file of the work.
    """

    def __init__(self, module: str, num_processes: int, num_threads: int, case: Path) -> None:
        self.module, self.measured = module, Measured()
        port = _free_port()
        self._errors = [case.with_name(f"{module}.{rank}.log") for rank in range(num_processes)]
        self._processes = []
        for rank in range(num_processes):
            world = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
            world |= {"WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes}
            world |= {"MASTER_PORT": port, "PEER_THREADS": num_threads}
            world |= {"OMP_NUM_THREADS": num_threads, "TRANSFORMERS_VERBOSITY": "error"}
            with self._errors[rank].open("w") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, str(_WORKER), module, str(case)],
                        env=os.environ | {name: str(value) for name, value in world.items()},
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                    )
                )

    def ready(self) -> None:
        """Wait until the model is built."""
        self._answers()

    def step(self, number: int, *, counts: bool = True) -> None:
        """One step of all processes."""
        answers = self._ask(f"step {number}")
        measured = self.measured
        if counts:
            measured.step_s.append(max(each["step_s"] for each in answers))
            measured.cpu_s.append(sum(each["cpu_s"] for each in answers))
            measured.tokens.append(answers[0]["tokens"])
            measured.counted.append(answers[0]["counted"])
        measured.peak_bytes = float(sum(each["peak_bytes"] for each in answers))

    def parts(self, number: int) -> dict[str, float]:
        """Seconds of the parts of a step of rank 0, where the peer can say."""
        return self._ask(f"profile {number}")[0]["parts"]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _ask(self, line: str) -> list[dict[str, Any]]:
        for process in self._processes:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        found = []
        for process, log in zip(self._processes, self._errors):
            line = process.stdout.readline()
            if not line:
                self.close()
                raise RuntimeError(f"{self.module}: {log.read_text()[-_TAIL_BYTES:]}")
            found.append(json.loads(line))
        return found


def interleave(peers: Sequence[Peer], num_rounds: int, num_warm: int = 1) -> None:
    """Steps of all peers in turns; every round begins with another peer."""
    for number in range(num_warm + num_rounds):
        first = number % len(peers)
        for peer in (*peers[first:], *peers[:first]):
            peer.step(number, counts=number >= num_warm)


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]
