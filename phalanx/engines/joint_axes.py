"""Several axes of a mesh as one: ranks that share parameters although they compute other tokens.

The one file that joins dims of a DeviceMesh, which torch 2.13 offers in private.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import DeviceMesh


def joint_mesh(mesh: DeviceMesh, axes: Sequence[str]) -> DeviceMesh:
    """The one-dimensional mesh along several axes; all ranks of the default group call it.

    Ranks come in the order of the mesh, its last axis fastest. Axes of size 1 join nothing, so that
    a single other one stays what it is; several have a group of their own, which the log calls by
    their names ("shard_cp").

    Args:
        mesh: the whole mesh.
        axes: some of its dims, at least one.
    """
    names = [name for name in mesh.mesh_dim_names if name in axes]
    long = [name for name in names if mesh[name].size() > 1]
    if len(long) <= 1:
        return mesh[(long or names)[0]]
    name = "_".join(long)
    joint = mesh[tuple(long)]._flatten(name)
    if joint.get_group().group_desc == f"mesh_{name}":
        return joint
    # torch takes the default group where the axes are the whole mesh, which hides their names
    for ranks in joint._layout.remap_to_tensor(joint._rank_map).tolist():
        group = dist.new_group(ranks, group_desc=f"mesh_{name}")
        if dist.get_rank() in ranks:
            joint._dim_group_names = [group.group_name]
    return joint


def side_by_side(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the dims of these parts of a mesh, in this order."""
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(list(meshes))
