"""The simulator's table as a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from phalanx.action import Action, Alloc, Collective, Compute, Move, Recv, Send
from phalanx.cost.collectives import wire_bytes
from phalanx.mesh import Mesh
from phalanx.trace import TEXT_COLUMNS, Trace
from phalanx.worlds.sim_engine import Engine
from phalanx.worlds.sim_match import stride_of
from phalanx.worlds.sim_table import NETWORK, NOTIFY, STEP

_TEXT_OF: dict[str, Callable[[Action], str]] = {
    "role": lambda action: "",
    "action_id": lambda action: action.label,
    "layer": lambda action: action.layer,
    "phase": lambda action: action.phase,
    "operator": lambda action: action.operator,
    "lane": lambda action: action.lane,
    "axis": lambda action: getattr(action, "axis", ""),
}


def build_trace(engine: Engine, job: str, notes: dict[str, Any]) -> Trace:
    """Rows of everything that started, by rank and in order of issue."""
    table = engine.table
    kind, start_s = np.asarray(table.kind), np.asarray(table.start_s, dtype=np.float64)
    rank = np.asarray(table.rank, dtype=np.int64)
    wanted = (start_s >= 0) & (kind != NOTIFY) & (kind != STEP) & (rank != NETWORK)
    chosen = np.flatnonzero(wanted)
    chosen = chosen[np.argsort(rank[chosen], kind="stable")]
    which = np.asarray(table.which, dtype=np.int64)[chosen]
    rank = rank[chosen]
    columns: dict[str, np.ndarray] = {
        "rank": rank,
        "step": np.asarray(table.step, dtype=np.int64)[chosen],
        "start_s": start_s[chosen],
        "dur_s": np.asarray(table.dur_s, dtype=np.float64)[chosen],
    }
    vocabulary: dict[str, Sequence[str]] = {}
    for name in TEXT_COLUMNS:
        codes, vocabulary[name] = _codes([_TEXT_OF[name](action) for action in table.actions])
        columns[name] = codes[which]
    of_action = _numbers(table.actions, engine.mesh)
    columns |= {name: values[which] for name, values in of_action.items()}
    columns["peer"] = _peers(table.actions, engine.mesh)(rank, which)
    if engine.freed_bytes:
        freed = np.zeros(len(table))
        freed[list(engine.freed_bytes)] = list(engine.freed_bytes.values())
        columns["payload_bytes"] += freed[chosen]
    return Trace("simulated", job, columns, vocabulary, notes)


def _codes(words: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    index: dict[str, int] = {}
    codes = [index.setdefault(word, len(index)) for word in words]
    return np.asarray(codes, dtype=np.int32), list(index)


def _numbers(actions: Sequence[Action], mesh: Mesh) -> dict[str, np.ndarray]:
    payload = np.zeros(len(actions))
    wire = np.zeros(len(actions))
    flops = np.zeros(len(actions))
    for index, action in enumerate(actions):
        if isinstance(action, Send | Recv | Collective | Move):
            payload[index] = action.payload_bytes
        if isinstance(action, Send):  # counted once, where it is sent
            wire[index] = action.payload_bytes
        elif isinstance(action, Collective):
            size = len(action.members) or mesh.degree(action.axis)
            wire[index] = wire_bytes(action.collective, action.payload_bytes, size)
        elif isinstance(action, Alloc):
            payload[index] = action.num_bytes
        elif isinstance(action, Compute):
            flops[index] = action.flops
    item = np.asarray([action.item for action in actions], dtype=np.int64)
    return {"payload_bytes": payload, "wire_bytes": wire, "flops": flops, "item": item}


def _peers(actions: Sequence[Action], mesh: Mesh) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Global peer from (rank, action); -1 where there is none."""
    at = np.full(len(actions), -1, dtype=np.int64)
    stride = np.ones(len(actions), dtype=np.int64)
    degree = np.ones(len(actions), dtype=np.int64)
    for index, action in enumerate(actions):
        if isinstance(action, Send | Recv):
            at[index], degree[index] = action.peer, mesh.degree(action.axis)
            stride[index] = stride_of(mesh, action.axis)

    def peers(rank: np.ndarray, which: np.ndarray) -> np.ndarray:
        coordinate = rank // stride[which] % degree[which]
        peer = rank + (at[which] - coordinate) * stride[which]
        return np.where(at[which] >= 0, peer, -1)

    return peers
