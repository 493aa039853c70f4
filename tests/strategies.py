"""Hypothesis strategies for meshes and layouts: small, awkward, all legal."""

from __future__ import annotations

from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.layout import Layout, Only, Placement, Shard
from phalanx.mesh import Mesh

AXES = ("replicate", "shard", "cp", "tp", "pp")


@st.composite
def meshes(draw, max_size: int = 12, axes: tuple[str, ...] = AXES) -> Mesh:
    """Meshes of 1 to `max_size` ranks with any subset of axes in any order."""
    names = draw(st.permutations(axes))[: draw(st.integers(0, len(axes)))]
    sizes: dict[str, int] = {}
    rest = max_size
    for name in names:
        sizes[name] = draw(st.integers(1, min(rest, 6)))
        rest //= sizes[name]
    return Mesh(sizes)


def shapes(max_dims: int = 3, max_size: int = 11) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 0 to `max_dims` dims; sizes of 0 and of less than a mesh's axis occur."""
    return st.lists(st.integers(0, max_size), max_size=max_dims).map(tuple)


@st.composite
def layouts(draw, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """Any legal layout of `shape` on `mesh`: axes cut jointly, in turn, confine or replicate."""
    placements: list[Placement] = []
    axes = list(draw(st.permutations(mesh.names)))
    while axes:
        axis = axes.pop()
        what = draw(st.sampled_from(("replicate", "only", "shard", "shard")))
        if what == "only":
            degree = mesh.degree(axis)
            at = draw(st.sets(st.integers(0, degree - 1), min_size=1, max_size=degree))
            placements.append(Only(axis, *at))
        elif what == "shard" and shape:
            joint = [axis]
            while axes and draw(st.booleans()):
                joint.append(axes.pop())
            options = draw(st.lists(shards(shape, tuple(joint)), min_size=1, max_size=3))
            legal = [s for s in options if _is_legal(shape, mesh, [*placements, s])]
            placements += legal[:1]
    return Layout(shape, mesh, *placements)


@st.composite
def shards(draw, shape: tuple[int, ...], axes: tuple[str, ...]) -> Shard:
    """Cuts of any dim by any rule; not every one is legal for every shape and degree."""
    dim = draw(st.integers(0, len(shape) - 1))
    units = draw(st.sampled_from([None, *(n for n in range(1, 12) if shape[dim] % n == 0)]))
    return Shard(dim, *axes, units=units, rule=draw(st.sampled_from(("ceil", "even", "repeat"))))


def _is_legal(shape: tuple[int, ...], mesh: Mesh, placements: list[Placement]) -> bool:
    try:
        Layout(shape, mesh, *placements)
    except PlanError:
        return False
    return True
