"""Play a planned step in virtual time and say what it costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.drive import drive
from phalanx.planner.make import Planned
from phalanx.planner.sized import limit_of
from phalanx.report import Report
from phalanx.trace import Trace
from phalanx.worlds.sim import SimWorld

# Larger meshes are folded: one rank is played for all that are alike.
_UNFOLDED_RANKS = 64


@dataclass(frozen=True)
class Simulated:
    """One simulated step.

    Attributes:
        trace: rows of the ranks played.
        report: step time, idle share, bytes, memory against the limit.
        peak_bytes: most bytes of a rank: what it keeps plus what lives within the step.
        limit_bytes: memory of one device, or the job's own limit.
    """

    trace: Trace
    report: Report
    peak_bytes: float
    limit_bytes: float

    @property
    def fits(self) -> bool:
        """Whether every rank stays within its limit."""
        return self.peak_bytes <= self.limit_bytes


def simulate(planned: Planned, limit_bytes: float = 0.0) -> Simulated:
    """Simulate the training step of a plan.

    Args:
        planned: from `make_plan`.
        limit_bytes: per device (0: what it leaves to tensors, as `phalanx plan` counts).
    """
    mesh = planned.program.mesh
    fold = mesh.size > _UNFOLDED_RANKS
    world = SimWorld(mesh, planned.cost, job=planned.plan.job, fold=fold)
    trace = drive(world, program=planned.program)
    again = planned.again_bytes
    within = {rank: num_bytes + again for rank, num_bytes in world.peak_bytes().items()}
    peaks = {rank: planned.held_bytes(rank) + within.get(rank, 0.0) for rank in world.ranks}
    fullest = max(peaks, key=lambda rank: peaks[rank])
    limit = limit_of(planned.cluster, limit_bytes)
    report = Report(f"{planned.plan.job} on {planned.cluster}")
    _time_rows(report, planned, trace, list(world.ranks))
    _byte_rows(report, trace, list(world.ranks))
    held, note = planned.held_bytes(fullest), f"rank {fullest}"
    report.add("memory kept, weights to optimizer", held, "bytes", "formula", note=note)
    report.add(
        "memory within the step, peak", within.get(fullest, 0.0), "bytes", "simulated", note=note
    )
    report.add("memory, peak", peaks[fullest], "bytes", "simulated", note=note)
    report.add(
        "memory, limit of a device", limit, "bytes", "formula", note=_limit_note(planned, limit)
    )
    return Simulated(trace, report, peaks[fullest], limit)


def _limit_note(planned: Planned, limit_bytes: float) -> str:
    machine = planned.cluster.machine
    if limit_bytes < machine.usable_bytes:
        return "as the job says"
    return f"{machine.usable_memory_frac.value:.0%} of it is usable; {machine.memory.source}"


def _time_rows(report: Report, planned: Planned, trace: Trace, ranks: list[int]) -> None:
    step_s = trace.end_s
    replicas = planned.program.mesh.degree("replicate") * planned.program.mesh.degree("shard")
    tokens = sum(planned.work.item_tokens) * replicas
    report.add("step time", step_s, "s", "simulated", note=planned.rates)
    if planned.priced_s is not None:
        note = "the formula of `phalanx plan` for this layout"
        report.add("step time, as priced", planned.priced_s, "s", "formula", note=note)
        report.add("played over priced", step_s / planned.priced_s, "1", "simulated")
    report.add("tokens of a step", tokens, "1", "formula")
    report.add("throughput", tokens / step_s if step_s else None, "tokens/s", "simulated")
    compute = trace.where(lane="compute")
    busy = [float(compute.where(rank=rank).columns["dur_s"].sum()) for rank in ranks]
    idle = 1.0 - np.asarray(busy) / step_s if step_s else np.zeros(len(ranks))
    report.add("idle share of compute, mean over ranks", float(idle.mean()), "1", "simulated")
    report.add("idle share of compute, worst rank", float(idle.max()), "1", "simulated")


def _byte_rows(report: Report, trace: Trace, ranks: list[int]) -> None:
    for axis in sorted(set(trace.column("axis").tolist()) - {""}):
        of_axis = trace.where(axis=axis)
        wire = [float(of_axis.where(rank=rank).columns["wire_bytes"].sum()) for rank in ranks]
        report.add(f"bytes sent on {axis}, busiest rank", max(wire), "bytes", "formula")
