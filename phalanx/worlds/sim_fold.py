"""Which ranks are alike: one of them can stand for all, exactly.

Ranks start with the color of their list (and price class). A color is split while two ranks of it
differ in the colors that they meet: those of their group on an axis, or of a peer. What remains is
an equitable coloring; lists, prices and partners of equal color are equal, hence so are all times,
and by induction over the order of events one rank per color plays the whole program. Cost: a few
sorts of one integer per rank, whatever the lengths of the lists; programs whose ranks share lists
are therefore checked and folded in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import numpy as np

from phalanx.action import Action, Collective, Program, Recv, Send
from phalanx.errors import PlanError
from phalanx.mesh import Mesh
from phalanx.worlds.sim_match import group_classes, stride_of


def equitable_colors(
    program: Program, rank_class: Callable[[int], Hashable] | None = None
) -> np.ndarray:
    """Color of each rank [ranks]; ranks of one color behave alike.

    Args:
        program: what the ranks do.
        rank_class: price class of a rank (None: prices do not matter).

    Raises:
        PlanError: `plan/illegal` for a collective with listed members, which no symmetry covers.
    """
    mesh = program.mesh
    of_list = np.asarray(program.list_of_rank)
    colors = of_list
    if rank_class is not None:
        index: dict[Hashable, int] = {}
        classes = [index.setdefault(rank_class(rank), len(index)) for rank in range(mesh.size)]
        colors = _split(colors, np.asarray(classes))
    axes, peers = _partners(program)
    for axis in sorted({axis for axis, _ in peers}):
        talks = np.isin(of_list, [i for (a, _), lists in peers.items() if a == axis for i in lists])
        colors = _split(colors, np.where(talks, _coordinates(mesh, axis), -1))
    count = 0
    while colors.max() + 1 > count:
        count = colors.max() + 1
        for column in list(_meetings(mesh, colors, of_list, axes, peers)):
            colors = _split(colors, column)
    return colors


def _partners(program: Program) -> tuple[list[str], dict[tuple[str, int], set[int]]]:
    axes: dict[str, None] = {}
    peers: dict[tuple[str, int], set[int]] = {}
    for index, actions in enumerate(program.lists):
        for action in actions:
            if isinstance(action, Send | Recv):
                _require_on_mesh(program.mesh, action)
                peers.setdefault((action.axis, action.peer), set()).add(index)
            elif isinstance(action, Collective):
                _require_on_mesh(program.mesh, action)
                axes[action.axis] = None
    return list(axes), peers


def _require_on_mesh(mesh: Mesh, action: Action) -> None:
    where = f"axis of {action.label or action.operator}"
    if isinstance(action, Collective) and action.members:
        rule = "ranks cannot stand for one another where a collective lists its members"
        raise PlanError("plan/illegal", where, action.members, rule)
    if isinstance(action, Send | Recv):
        mesh.rank({action.axis: action.peer})
    elif isinstance(action, Collective):
        mesh.require_axis(action.axis, where)


def _coordinates(mesh: Mesh, axis: str) -> np.ndarray:
    return np.arange(mesh.size) // stride_of(mesh, axis) % mesh.degree(axis)


def _meetings(
    mesh: Mesh,
    colors: np.ndarray,
    of_list: np.ndarray,
    axes: list[str],
    peers: dict[tuple[str, int], set[int]],
) -> Iterator[np.ndarray]:
    for axis in axes:
        yield group_classes(mesh, axis, colors)[0]
    ranks = np.arange(mesh.size)
    for (axis, peer), lists in peers.items():
        partner = ranks + (peer - _coordinates(mesh, axis)) * stride_of(mesh, axis)
        yield np.where(np.isin(of_list, list(lists)), colors[partner], -1)


def _split(colors: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Colors that also tell apart what `column` tells apart, numbered from 0."""
    _, column = np.unique(column, return_inverse=True)
    _, joined = np.unique(colors * (int(column.max()) + 1) + column, return_inverse=True)
    return joined
