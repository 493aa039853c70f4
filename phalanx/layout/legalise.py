"""Axes asked for each dim of a tensor, made legal: right rank, divisible, no axis twice.

A spec names, dim by dim, the mesh axes that cut it, in the order in which they cut. Specs are often
inherited (an adapter's from its matrix, a moment's from its parameter, a rule's from a pattern that
matches tensors of other shapes); what cannot be cut so is replicated, and each loss is told.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.layout.layout import Layout
from phalanx.layout.placement import Shard
from phalanx.mesh import Mesh

AxisSpec = tuple[tuple[str, ...], ...]


def legalise(
    shape: Sequence[int], spec: Sequence[Sequence[str]], mesh: Mesh
) -> tuple[AxisSpec, tuple[str, ...]]:
    """The largest part of `spec` that a tensor of `shape` can have, and why the rest is gone.

    A legal spec comes back unchanged. The moments of an optimizer have their parameter's legalised
    spec, never a spec legalised anew.

    Source: Kishnani et al., arXiv 2605.25645, which gives a spec of wrong rank up and checks each
    dim; here an axis may also stand twice, or share a dim with others.
    """
    if len(spec) != len(shape):
        told = f"names {len(spec)} dims of a tensor that has {len(shape)}: replicated"
        return ((),) * len(shape), (told,)
    legal: list[tuple[str, ...]] = []
    dropped: list[str] = []
    used: set[str] = set()
    for dim, (size, axes) in enumerate(zip(shape, spec)):
        kept: list[str] = []
        parts = 1
        for axis in axes:
            reason = _reason(axis, size, parts, used, mesh)
            if reason:
                dropped.append(f"dim {dim} over {axis}: {reason}")
                continue
            kept.append(axis)
            used.add(axis)
            parts *= mesh.degree(axis)
        legal.append(tuple(kept))
    return tuple(legal), tuple(dropped)


def _reason(axis: str, size: int, parts: int, used: set[str], mesh: Mesh) -> str:
    if axis not in mesh.names:
        return f"the mesh has only {', '.join(mesh.names) or 'no axis'}"
    if axis in used:
        return "the axis cuts already"
    if size % (parts * mesh.degree(axis)):
        return f"{size} cannot be cut into {parts * mesh.degree(axis)} equal parts"
    return ""


def adapter_specs(weight: AxisSpec) -> tuple[AxisSpec, AxisSpec]:
    """Specs of A [rank, in] and B [out, rank] from that of their matrix [out, in]."""
    outputs, inputs = weight
    return ((), inputs), (outputs, ())


def layout_of(shape: Sequence[int], spec: AxisSpec, mesh: Mesh) -> Layout:
    """The layout that a legal spec means."""
    cuts = [Shard(dim, axis, rule="even") for dim, axes in enumerate(spec) for axis in axes]
    return Layout(shape, mesh, *cuts)
