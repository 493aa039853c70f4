"""Whether an outer launcher (torchrun, Slurm's srun) has started this process as one of many ranks.

No torch. torchrun says so in RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT; srun in variables of its own, which `Placed.adopt` turns into those.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from phalanx.engines.launch import LAUNCHER_VARIABLE, RESOLVER
from phalanx.errors import WorldError

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# srun sets the number of tasks of a step only for the tasks themselves, never for a batch script
_SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST")
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000  # below the ports that systems hand out themselves


@dataclass(frozen=True, kw_only=True)
class Placed:
    """This process among the ranks.

    Attributes:
        rank, num_ranks: of the job; local_rank, num_local_ranks: on this host.
        address, port: where rank 0 or its launcher keeps the store.
        restarts: how often the launcher has started all ranks anew after a failure.
    """

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int
    address: str
    port: int
    restarts: int = 0

    def adopt(self, environment: MutableMapping[str, str]) -> None:
        """Write torchrun's variables, for all that reads them."""
        values = (self.rank, self.num_ranks, self.local_rank, self.num_local_ranks)
        environment.update(zip(_TORCHRUN, map(str, (*values, self.address, self.port))))
        for name, value in RESOLVER.items():
            environment.setdefault(name, value)


def placed(environment: Mapping[str, str]) -> Placed | None:
    """Where an outer launcher has put this process; None where none has.

    Raises:
        WorldError: `world/unbound` for variables that contradict one another.
    """
    if LAUNCHER_VARIABLE in environment:
        return None
    try:
        if all(environment.get(name) for name in _TORCHRUN):
            found = _by_torchrun(environment)
        elif int(environment.get(_SLURM[0]) or 1) > 1 and all(map(environment.get, _SLURM)):
            found = _by_slurm(environment)
        else:
            return None
    except ValueError as error:
        rule = f"variables of torchrun or Slurm that are no numbers: {error}"
        raise WorldError("world/unbound", "environment", None, rule) from None
    if not 0 <= found.rank < found.num_ranks or not 0 <= found.local_rank < found.num_local_ranks:
        rule = f"RANK {found.rank} of WORLD_SIZE {found.num_ranks} cannot be"
        raise WorldError("world/unbound", "environment", None, rule)
    return found


def _by_torchrun(environment: Mapping[str, str]) -> Placed:
    rank, num_ranks, local_rank, num_local_ranks = (int(environment[n]) for n in _TORCHRUN[:4])
    return Placed(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=local_rank,
        num_local_ranks=num_local_ranks,
        address=environment["MASTER_ADDR"],
        port=int(environment["MASTER_PORT"]),
        restarts=int(environment.get("TORCHELASTIC_RESTART_COUNT") or 0),
    )


def _by_slurm(environment: Mapping[str, str]) -> Placed:
    num_ranks, rank, local_rank = (int(environment[name]) for name in _SLURM[:3])
    job = int(environment.get("SLURM_JOB_ID") or 0)
    # such as "4(x2),3": tasks of each host in turn
    counts = environment.get("SLURM_STEP_TASKS_PER_NODE", str(num_ranks))
    node = int(environment.get("SLURM_NODEID") or 0)
    return Placed(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=local_rank,
        num_local_ranks=_expanded(counts)[node],
        address=environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"]),
        port=int(environment.get("MASTER_PORT") or _FIRST_PORT + job % _NUM_PORTS),
        restarts=int(environment.get("SLURM_RESTART_COUNT") or 0),
    )


def _expanded(counts: str) -> list[int]:
    numbers: list[int] = []
    for part in counts.split(","):
        count, _, times = part.partition("(x")
        numbers += [int(count)] * int(times.rstrip(")") or 1)
    return numbers


def first_host(nodes: str) -> str:
    """The first of Slurm's list of hosts: "web[03-07,9],db1" -> "web03"."""
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])
