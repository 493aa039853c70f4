"""Where actions of different ranks meet: the k-th collective of a group, messages of a channel.

A meeting is one integer key, computed for all ranks of a list at once. Ranks may be folded: with
`colors`, ranks of one color are played by the lowest of them, and a group by the distinct colors in
it (`sim_fold` finds colors for which that is exact). Without folding every rank has its own color.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from phalanx.action import Collective, Recv, Send
from phalanx.errors import JobError, PlanError
from phalanx.mesh import Mesh
from phalanx.worlds.sim_table import COLLECTIVE, RECV, SEND, Template

MAX_RANKS = 1 << 20  # keys hold two ranks and a tensor number in 63 bits
_TENSOR_BITS, _SEQUENCE_BITS = 22, 32

GroupName = tuple[str, tuple[int, ...], int]  # axis, members, epoch


def stride_of(mesh: Mesh, axis: str) -> int:
    """How far two ranks lie apart that are neighbours on `axis`."""
    return prod(mesh.sizes[mesh.names.index(axis) + 1 :])


def group_classes(mesh: Mesh, axis: str, colors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Classes of an axis' groups: two groups are alike when their members' colors are.

    Returns:
        class of each rank's group [ranks], and the number of distinct colors in a class [classes].
    """
    grid = colors.reshape(mesh.sizes)
    dims = [mesh.names.index(part) for part in mesh.parts(axis)]
    last = list(range(-len(dims), 0))
    rows = np.sort(np.moveaxis(grid, dims, last).reshape(-1, mesh.degree(axis)), axis=1)
    distinct, of_row = np.unique(rows, axis=0, return_inverse=True)
    sizes = 1 + (np.diff(distinct, axis=1) != 0).sum(axis=1)
    rest = [size for i, size in enumerate(mesh.sizes) if i not in dims]
    own = [mesh.sizes[dim] for dim in dims]
    spread = np.broadcast_to(of_row.reshape(*rest, *([1] * len(own))), (*rest, *own))
    return np.moveaxis(spread, last, dims).reshape(-1), sizes


class Matcher:
    """Keys and sizes of meetings.

    Args:
        mesh: the grid.
        colors: color of each rank; ranks of one color are alike (None: all differ).
    """

    def __init__(self, mesh: Mesh, colors: np.ndarray | None = None) -> None:
        if mesh.size > MAX_RANKS:
            rule = f"the simulator numbers up to {MAX_RANKS} ranks"
            raise PlanError("plan/illegal", "mesh", mesh, rule, legal=[MAX_RANKS])
        self.mesh = mesh
        self.colors = np.arange(mesh.size) if colors is None else colors
        _, first, inverse = np.unique(self.colors, return_index=True, return_inverse=True)
        self.player = first[inverse]
        self.sizes: list[int] = []
        self._group_of_axis: dict[str, list[int]] = {}
        self._group_of_members: dict[GroupName, int] = {}
        self._issued: dict[tuple[GroupName, int], int] = {}
        self._tensors: dict[tuple[str, str], int] = {}
        self._members: dict[tuple[str, int], tuple[int, ...]] = {}  # axis and first rank

    def size(self, key: int) -> int:
        """How many entries meet at a collective's key."""
        return self.sizes[key >> _SEQUENCE_BITS]

    def members(self, action: Collective, rank: int) -> tuple[int, ...]:
        """Global ranks of the collective that `rank` takes part in.

        Raises:
            JobError: `mesh/axis` for an axis that is neither in the mesh nor given by members.
        """
        if action.members:
            return action.members
        self.mesh.require_axis(action.axis, f"axis of {action.label or action.operator}")
        first = rank
        for part in self.mesh.parts(action.axis):
            stride = stride_of(self.mesh, part)
            first -= rank // stride % self.mesh.degree(part) * stride
        if (action.axis, first) not in self._members:
            self._members[action.axis, first] = self.mesh.group(rank, action.axis)
        return self._members[action.axis, first]

    def ends(self, key: int) -> tuple[int, int]:
        """Source and target of a channel (those that play them)."""
        return divmod(key >> _TENSOR_BITS, MAX_RANKS)

    def keys(self, template: Template, ranks: Sequence[int]) -> list[list[int]]:
        """The keys of all entries, one list per rank; 0 for entries that meet nobody.

        Raises:
            JobError: `mesh/axis`, `mesh/rank` for an axis or a peer that the mesh does not have.
        """
        who = np.asarray(ranks)
        keys = np.zeros((len(who), len(template.which)), dtype=np.int64)
        groups: dict[GroupName, list[int]] = {}
        for at, (kind, index) in enumerate(zip(template.kind, template.which)):
            action = template.actions[index]
            if kind in (SEND, RECV) and isinstance(action, Send | Recv):
                keys[:, at] = self._channel(action, who)
            elif kind == COLLECTIVE and isinstance(action, Collective):
                name = (action.axis, action.members, action.epoch)
                groups.setdefault(name, []).append(at)
        for name, entries in groups.items():
            first = [self._reserve(name, rank, len(entries)) for rank in ranks]
            keys[:, entries] = np.asarray(first)[:, None] + np.arange(len(entries))
        return keys.tolist()

    def _channel(self, action: Send | Recv, who: np.ndarray) -> np.ndarray:
        self.mesh.require_axis(action.axis, f"axis of {action.label or action.operator}")
        degree, stride = self.mesh.degree(action.axis), stride_of(self.mesh, action.axis)
        if not 0 <= action.peer < degree:
            where = f"peer of {action.label or action.operator}"
            raise JobError("mesh/rank", where, action.peer, f"must lie in 0..{degree - 1}")
        peers = self.player[who + (action.peer - who // stride % degree) * stride]
        players = self.player[who]
        source, target = (players, peers) if isinstance(action, Send) else (peers, players)
        name = (action.axis, action.tensor)
        tensor = self._tensors.setdefault(name, len(self._tensors))
        return ((source * MAX_RANKS + target) << _TENSOR_BITS) + tensor

    def _reserve(self, name: GroupName, rank: int, count: int) -> int:
        """The key of the next of `count` collectives of a rank in a group."""
        group = self._group(name, rank)
        before = self._issued.get((name, rank), 0)
        self._issued[name, rank] = before + count
        return (group << _SEQUENCE_BITS) + before

    def _group(self, name: GroupName, rank: int) -> int:
        axis, members, _ = name
        if members:
            if name not in self._group_of_members:
                self._group_of_members[name] = len(self.sizes)
                self.sizes.append(len(members))
            return self._group_of_members[name]
        if axis not in self._group_of_axis:
            self.mesh.require_axis(axis, "axis of a collective")
            classes, sizes = group_classes(self.mesh, axis, self.colors)
            self._group_of_axis[axis] = (classes + len(self.sizes)).tolist()
            self.sizes.extend(sizes.tolist())
        return self._group_of_axis[axis][rank]
