"""What a rank holds of a tensor, and a rank's part as the whole that it belongs to.

The one file that touches what is private in torch's DTensor (2.13): its spec, strided shards.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def local_of(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, without history."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def placed_as(parameter: Tensor, local: Tensor) -> Tensor:
    """A value of this rank's part as the whole that the parameter is."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def placed_on_host(parameter: Tensor, local: Tensor) -> Tensor:
    """As `placed_as` for a part that stays on the host and may have another dtype; shares its
    memory, where `DTensor.from_local` would copy it to the mesh's device."""
    if not isinstance(parameter, DTensor):
        return local
    spec = parameter._spec
    meta = spec.tensor_meta._replace(dtype=local.dtype)
    return DTensor(local, type(spec)(spec.mesh, spec.placements, meta), requires_grad=False)


def rows_placement(cut_before: int) -> Placement:
    """Rows of a tensor whose rows another axis has cut into so many parts before (1: none has)."""
    return Shard(0) if cut_before == 1 else _StridedShard(0, split_factor=cut_before)
