"""Speed of the core on one core: simulating, lowering and checking 4,096 ranks.

    python benchmarks/core.py --json FILE

An event is a start or an end of one action; a rate counts the events of all ranks over the CPU
seconds from loading the program to the finished trace, best of three. Exits with 1 when a gated row
misses. A new measurement is one function that adds rows to the report, listed in MEASUREMENTS.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import process_time

from gated import main
from reshard import add_rows as add_reshard_rows
from scheduler import add_rows as add_decision_rows

from phalanx.action import Compute, Program, Send
from phalanx.check import check_program
from phalanx.cost.base import CostModel
from phalanx.cost.table import TableCost
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.registry import build
from phalanx.report import Report
from phalanx.workload import toy_work
from phalanx.worlds.sim import SimWorld

MIN_EVENTS_PER_S = 300_000.0
MAX_LOWER_S = MAX_CHECK_S = 5.0
REPEATS = 3
MESH = Mesh(pp=16, shard=32, tp=8)
WHOLE_S = {"stage.F": 1.0, "stage.B": 2.0}


@dataclass(frozen=True)
class UnevenCost(TableCost):
    """Every rank has its own speed, so no two ranks share a moment."""

    def compute_s(self, action: Compute, rank: int) -> float:
        return super().compute_s(action, rank) * (1.0 + (rank * 7919 % 4099) / 4099)

    def transfer_s(self, action: Send, source: int, target: int) -> float:
        return 0.1 + (source * 31 % 97) / 970

    def rank_class(self, rank: int) -> int:
        return rank


def best_s(run: Callable[[], object]) -> float:
    """Least CPU seconds of a few runs: other processes only ever add to it."""
    seconds = []
    for _ in range(REPEATS):
        began = process_time()
        run()
        seconds.append(process_time() - began)
    return min(seconds)


def pipeline_step() -> Program:
    """1F1B with 16 stages and 32 micro-batches on 4,096 ranks, computes and transfers."""
    return lower(toy_work(16, [8] * 32), MESH, build("pipeline", "1f1b"), grain="stage")


def composed_step() -> Program:
    """The same with tensor parallelism inside and FSDP around, at operator grain."""
    specs = [build("tensor", "megatron"), build("data", "fsdp")]
    return lower(toy_work(16, [8] * 32), MESH, build("pipeline", "1f1b"), specs)


def play(program: Program, cost: CostModel, *, fold: bool = False) -> int:
    """Simulate from load to trace; the number of rows."""
    world = SimWorld(program.mesh, cost, fold=fold)
    world.load(program)
    while world.next_events():
        pass
    return len(world.close())


def measure_events(report: Report) -> None:
    """Events per second where ranks act in step, and where no two events share a moment."""
    program = pipeline_step()
    costs: dict[str, CostModel] = {
        "in step": TableCost(WHOLE_S, missing_s=0.0),
        "every rank at its own speed": UnevenCost(WHOLE_S, missing_s=0.0),
    }
    for name, cost in costs.items():
        seconds = best_s(lambda cost=cost: play(program, cost))
        note = f"{2 * len(program)} events of {MESH.size} ranks in {seconds:.2f} s"
        report.add(
            f"simulated events, ranks {name}",
            2 * len(program) / seconds,
            "1/s",
            "measured",
            note=note,
            target=MIN_EVENTS_PER_S,
            bound="above",
        )


def measure_folding(report: Report) -> None:
    """One rank per stage stands for all: the composed step on 4,096 ranks."""
    program = composed_step()
    cost = TableCost({}, missing_s=1.0)
    seconds = best_s(lambda: play(program, cost, fold=True))
    note = f"{len(program)} actions, {len(program.lists)} ranks played"
    report.add("simulating 4,096 ranks folded", seconds, "s", "measured", note=note)


def measure_lowering(report: Report) -> None:
    """From policies to the actions of 4,096 ranks."""
    seconds = best_s(composed_step)
    note = f"{sum(map(len, composed_step().lists))} actions in distinct lists"
    report.add(
        *("lowering 4,096 ranks", seconds, "s", "measured"),
        note=note,
        target=MAX_LOWER_S,
        bound="below",
    )


def measure_checking(report: Report) -> None:
    """All checks of a program of 4,096 ranks."""
    program = composed_step()
    seconds = best_s(lambda: check_program(program))
    note = f"{len(program)} actions"
    report.add(
        *("checking 4,096 ranks", seconds, "s", "measured"),
        note=note,
        target=MAX_CHECK_S,
        bound="below",
    )


MEASUREMENTS = (
    measure_events,
    measure_folding,
    measure_lowering,
    measure_checking,
    add_decision_rows,
    add_reshard_rows,
)


def run() -> Report:
    """All measurements."""
    report = Report("core", notes={"event": "a start or an end of one action"})
    for measure in MEASUREMENTS:
        measure(report)
    return report


if __name__ == "__main__":
    sys.exit(main(run, __doc__))
