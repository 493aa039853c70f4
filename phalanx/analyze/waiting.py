"""How long each rank stood idle for the others, by axis and step.

Measured traces say it themselves: a row "wait" is the time for which a rank was held up by an
exchange (`comm_log`). What an exchange takes of its own is in it too, so of each collective the
least wait in the group is taken off all. In a simulated trace an exchange begins when all have
arrived; the wait is the time before it in which the rank did nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.action import COLLECTIVES
from phalanx.errors import PlanError
from phalanx.mesh import Mesh
from phalanx.trace import Trace

WAIT, P2P = "wait", ("send", "recv")


@dataclass(frozen=True)
class Waiting:
    """Seconds of waiting.

    Attributes:
        axes: axes along which anything was exchanged, in the order of the mesh; what was exchanged
            along several at once (a gradient over "shard_cp") counts for each of them.
        steps: numbers of the steps.
        waits_s: [steps, axes, ranks].
        steps_s: seconds of each step, from the first start to the last end.
    """

    axes: tuple[str, ...]
    steps: tuple[int, ...]
    waits_s: np.ndarray
    steps_s: np.ndarray


def waiting(trace: Trace, mesh: Mesh) -> Waiting:
    """Waits of all ranks of a trace.

    Args:
        mesh: whose ranks the trace holds.

    Raises:
        PlanError: `trace/rows` for a trace without exchanges along an axis of the mesh, or with
            ranks outside of it.
    """
    highest = int(trace.columns["rank"].max(initial=-1))
    if highest >= mesh.size:
        rule = f"the trace has rank {highest}"
        raise PlanError("trace/rows", "mesh", mesh, rule, legal=[f"a mesh of {highest + 1} ranks"])
    rows, waits_s = _measured(trace) if trace.source == "measured" else _simulated(trace)
    axis_R = trace.column("axis")[rows]
    parts = {name: _parts(mesh, name) for name in np.unique(axis_R).tolist()}
    axes = tuple(name for name in mesh.names if any(name in each for each in parts.values()))
    if not axes:
        rule = "has no exchange along an axis of the mesh; steps must be profiled to have them"
        raise PlanError("trace/rows", "trace", trace.job, rule, legal=["--plan.profile_steps 5"])
    steps = tuple(np.unique(trace.columns["step"][rows]).tolist())
    found = np.zeros((len(steps), len(axes), mesh.size))
    for name, joined in parts.items():
        mine, own_s = rows[axis_R == name], waits_s[axis_R == name]
        if joined and trace.source == "measured":
            own_s = own_s - _least_of_group(trace, mesh, joined, mine, own_s)
        place = np.searchsorted(steps, trace.columns["step"][mine])
        for axis in joined:
            np.add.at(found, (place, axes.index(axis), trace.columns["rank"][mine]), own_s)
    return Waiting(axes, steps, found, _lengths_s(trace, steps))


def _parts(mesh: Mesh, axis: str) -> tuple[str, ...]:
    """The axes that an exchange goes along: of a joint axis ("shard_cp") several."""
    return tuple(part for part in mesh.parts(axis) if mesh.degree(part) > 1)


def _measured(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    rows = np.flatnonzero(trace.column("operator") == WAIT)
    return rows, trace.columns["dur_s"][rows]


def _simulated(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Idle time of a rank just before an exchange began, and behind its last message of a step.

    Of several exchanges that began at once the first has it. Without the second part the last stage
    of a pipeline, which is done before the others, would always seem to be the late one.
    """
    operators = trace.column("operator")
    is_message, lasts = np.isin(operators, P2P), trace.columns["dur_s"] > 0.0
    is_exchange = is_message | np.isin(operators, COLLECTIVES)
    step_ends = _step_ends(trace)
    rows, waits_s = [], []
    for rank in np.unique(trace.columns["rank"]):
        mine = np.flatnonzero((trace.columns["rank"] == rank) & (is_exchange | lasts))
        mine = mine[np.lexsort((~is_exchange[mine], trace.columns["start_s"][mine]))]
        start_s, step = trace.columns["start_s"][mine], trace.columns["step"][mine]
        ends_s = np.maximum.accumulate(start_s + trace.columns["dur_s"][mine])
        earlier = np.searchsorted(start_s, start_s, side="left")  # rows that began before
        begun_s = np.asarray([step_ends.get(number - 1, 0.0) for number in step.tolist()])
        before_s = np.where(earlier > 0, ends_s[np.maximum(earlier - 1, 0)], 0.0)
        is_first = np.diff(start_s, prepend=-np.inf) != 0.0
        gaps_s = np.maximum(start_s - np.maximum(before_s, begun_s), 0.0) * is_first
        for number, end_s in step_ends.items():
            messages = np.flatnonzero(is_message[mine] & (step == number))
            if len(messages):
                gaps_s[messages[-1]] += end_s - ends_s[step == number][-1]
        rows.append(mine[is_exchange[mine]])
        waits_s.append(gaps_s[is_exchange[mine]])
    if not rows:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    return np.concatenate(rows), np.concatenate(waits_s)


def _step_ends(trace: Trace) -> dict[int, float]:
    """When the last rank is done with each step."""
    ends_s = trace.columns["start_s"] + trace.columns["dur_s"]
    numbers, which = np.unique(trace.columns["step"], return_inverse=True)
    latest_s = np.full(len(numbers), -np.inf)
    np.maximum.at(latest_s, which.reshape(-1), ends_s)
    return dict(zip(numbers.tolist(), latest_s.tolist()))


def _least_of_group(
    trace: Trace, mesh: Mesh, axes: Sequence[str], rows: np.ndarray, waits_s: np.ndarray
) -> np.ndarray:
    """Of each row of a collective the least wait among its members; 0 for messages.

    A collective has one name on all ranks of its group; a rank that never waited for it has no row.
    """
    ranks, steps = trace.columns["rank"][rows], trace.columns["step"][rows]
    names, lanes = trace.columns["action_id"][rows], trace.column("lane")[rows]
    is_message = np.asarray([lane.startswith(P2P) for lane in lanes], dtype=bool)
    group_of = {rank: members[0] for members in mesh.groups(axes) for rank in members}
    groups = np.asarray([group_of[r] for r in ranks.tolist()])
    number = _numbered(np.stack([ranks, steps, names], axis=1))  # of waits without a name
    keys = np.stack([groups, steps, names, number], axis=1)
    _, which = np.unique(keys, axis=0, return_inverse=True)
    which = which.reshape(-1)
    least = np.full(which.max(initial=-1) + 1, np.inf)
    np.minimum.at(least, which[~is_message], waits_s[~is_message])
    return np.where(is_message, 0.0, least[which]) if len(rows) else waits_s


def _numbered(keys: np.ndarray) -> np.ndarray:
    """How many rows with the same key came before each."""
    _, which = np.unique(keys, axis=0, return_inverse=True)
    which = which.reshape(-1)
    order = np.argsort(which, kind="stable")
    firsts = np.searchsorted(which[order], which[order], side="left")
    number = np.empty(len(which), dtype=np.int64)
    number[order] = np.arange(len(which)) - firsts
    return number


def _lengths_s(trace: Trace, steps: tuple[int, ...]) -> np.ndarray:
    """Longest time of a rank in each step: ranks may count from moments of their own."""
    lengths = np.zeros(len(steps))
    for at, step in enumerate(steps):
        of_step = trace.columns["step"] == step
        for rank in np.unique(trace.columns["rank"][of_step]):
            mine = of_step & (trace.columns["rank"] == rank)
            start_s, dur_s = trace.columns["start_s"][mine], trace.columns["dur_s"][mine]
            lengths[at] = max(lengths[at], float((start_s + dur_s).max() - start_s.min()))
    return lengths
