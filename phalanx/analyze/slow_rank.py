"""Which rank the others wait for: a search from the outermost axis to the innermost.

A rank that is late makes its whole group late, and that group's members then look late to groups of
other axes. So the shortest wait alone does not name the culprit: with cp 2 and tp 4, a slow rank 6
makes its context peer 2 late, and inside the tensor group of rank 2 nobody waits less than rank 2.
The search first asks which half of the cp axis is waited for, and only then who in it.

Source: Chu et al., "Scaling Llama 3 Training with Efficient Parallelism Strategies", ISCA 2025,
section 6.1. Differences: what is compared is waiting, not the duration of collectives, which where
they overlap with compute are as long on the late rank; a level that does not stand out keeps all
its ranks; steps vote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.analyze.waiting import Waiting, waiting
from phalanx.mesh import Mesh
from phalanx.trace import Trace

TOP_DOWN = ("replicate", "shard", "pp", "cp", "tp")  # from the rarest exchanges to the most
LEAST_FRAC = 0.01  # of a step that others must wait
LEAST_VOTES = 0.6  # of the steps


@dataclass(frozen=True)
class Level:
    """What one axis says.

    Attributes:
        axis: whose coordinates are compared.
        waits_s: of each coordinate: mean seconds that a rank waits in a step, along this axis,
            among the ranks that are still suspected.
        late: the coordinate that waits least; -1: none stands out.
        lead_s: how much less it waits than any other.
        votes: share of the steps in which it waited least.
    """

    axis: str
    waits_s: tuple[float, ...]
    late: int
    lead_s: float
    votes: float


@dataclass(frozen=True)
class SlowSearch:
    """The levels of a search, outermost first, and what is left.

    Attributes:
        suspects: ranks that are late at all levels that stand out; () where none does.
        step_s: median seconds of a step.
        num_steps: steps that were looked at.
    """

    levels: tuple[Level, ...]
    suspects: tuple[int, ...]
    step_s: float
    num_steps: int

    @property
    def cost_s(self) -> float:
        """Seconds per step that the others wait for the suspects."""
        return max((level.lead_s for level in self.levels if level.late >= 0), default=0.0)


def find_slow(trace: Trace, mesh: Mesh, axes: Sequence[str] = ()) -> SlowSearch:
    """Search a trace from outer axes to inner ones.

    Args:
        trace: of all ranks of `mesh`, simulated or measured with profiled steps.
        axes: order of the search; empty: data, pipeline, context, tensor, then others of the mesh.

    Raises:
        PlanError: `trace/rows` from `waiting`.
        JobError: `mesh/axis` for an axis that the mesh does not have.
    """
    for axis in axes:
        mesh.require_axis(axis, "--axes")
    found = waiting(trace, mesh)
    known = [axis for axis in TOP_DOWN if axis in mesh.names]
    order = dict.fromkeys(axes or [*known, *mesh.names])
    suspects, levels = tuple(range(mesh.size)), []
    step_s = float(np.median(found.steps_s))
    for axis in order:
        if axis not in found.axes:
            continue
        level = _level(found, mesh, axis, suspects, step_s)
        levels.append(level)
        if level.late >= 0:
            suspects = tuple(r for r in suspects if mesh.coordinate(r, axis) == level.late)
    stands_out = any(level.late >= 0 for level in levels)
    return SlowSearch(tuple(levels), suspects if stands_out else (), step_s, len(found.steps))


def least_waiting(trace: Trace, mesh: Mesh, axis: str, rank: int) -> int:
    """The rank that waits least in one group: what looking at a single group names."""
    found, members = waiting(trace, mesh), mesh.group(rank, axis)
    waits_s = found.waits_s[:, found.axes.index(axis), list(members)].sum(axis=0)
    return members[int(waits_s.argmin())]


def _level(found: Waiting, mesh: Mesh, axis: str, suspects: Sequence[int], step_s: float) -> Level:
    of_rank = found.waits_s[:, found.axes.index(axis)]
    columns = [
        of_rank[:, [r for r in suspects if mesh.coordinate(r, axis) == at]].mean(axis=1)
        for at in range(mesh.degree(axis))
    ]
    waits = np.stack(columns, axis=1)  # [steps, coordinates]
    mean_s = waits.mean(axis=0)
    first, second = np.argsort(mean_s, kind="stable")[:2]
    lead_s = float(mean_s[second] - mean_s[first])
    votes = float((waits.argmin(axis=1) == first).mean())
    stands_out = lead_s > LEAST_FRAC * step_s and votes >= LEAST_VOTES
    return Level(axis, tuple(mean_s.tolist()), int(first) if stands_out else -1, lead_s, votes)
