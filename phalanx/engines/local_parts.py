"""What a rank holds of a tensor, and a rank's part as the whole that it belongs to."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


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
