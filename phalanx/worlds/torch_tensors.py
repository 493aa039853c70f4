"""The tensors of one rank, by handle, and what every real world checks before it moves one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from phalanx.action import Collective, Compute, Free, Move, Recv, Send
from phalanx.errors import WorldError, nearest_names
from phalanx.mesh import Mesh

IN_PLACE = ("all_reduce", "broadcast")  # without `into` they write to the tensor itself
Op = Callable[["RankContext", Compute], Mapping[str, Any] | None]


class RankContext:
    """What an op may use.

    Attributes:
        rank: global rank.
        mesh: the grid.
        device: where its tensors live.
        dtype: of messages whose tensor was never here, read once from the plan.
        tensors: handle -> tensor in device memory.
        host: handle -> tensor in host memory, as `Move` leaves it.
    """

    def __init__(
        self,
        rank: int,
        mesh: Mesh,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.rank, self.mesh = rank, mesh
        self.device, self.dtype = torch.device(device), dtype
        self.tensors: dict[str, torch.Tensor] = {}
        self.host: dict[str, torch.Tensor] = {}

    def coordinate(self, axis: str) -> int:
        """Where this rank stands on an axis."""
        return self.mesh.coordinate(self.rank, axis)

    def get(self, handle: str, memory: str = "device") -> torch.Tensor:
        """The tensor of a handle.

        Raises:
            WorldError: `world/unbound` if there is none.
        """
        held = self._memory(memory, handle)
        if handle not in held:
            rule = f"no tensor of this name in {memory} memory"
            legal = nearest_names(handle, held)
            raise WorldError("world/unbound", f"rank {self.rank}", handle, rule, legal=legal)
        return held[handle]

    def move(self, action: Move) -> None:
        """Copy between device and host memory."""
        source = self.get(action.tensor, action.source)
        self.require_size(action, source.nbytes)
        target = self._memory(action.target, action.tensor)
        device = self.device if action.target == "device" else torch.device("cpu")
        target[action.tensor] = source.to(device, copy=True)

    def free(self, action: Free) -> None:
        """Drop a handle; one that no op has filled is nothing to drop."""
        self._memory(action.memory, action.tensor).pop(action.tensor, None)

    def require_size(self, action: Move | Send | Recv | Collective, num_bytes: int) -> None:
        """Compare a tensor with the plan before it travels; gloo ends the process on a mismatch.

        Raises:
            WorldError: `world/size`.
        """
        if num_bytes != action.payload_bytes:
            name = action.label or action.operator
            where, rule = f"rank {self.rank}: {name}", f"{action.tensor} differs from the plan"
            value, legal = f"{num_bytes} bytes", [f"{action.payload_bytes:.0f} bytes"]
            raise WorldError("world/size", where, value, rule, legal=legal)

    def arrival(self, action: Recv) -> torch.Tensor:
        """Where a message goes: like the tensor that has its handle, else flat.

        Raises:
            WorldError: `world/size` if the plan does not fit it.
        """
        known = self.tensors.get(action.tensor)
        if known is not None and known.nbytes == action.payload_bytes:
            return torch.empty_like(known)
        num_elements = int(action.payload_bytes) // self.dtype.itemsize
        flat = torch.empty(num_elements, dtype=self.dtype, device=self.device)
        self.require_size(action, flat.nbytes)
        return flat

    def require_payload(self, action: Collective, size: int) -> torch.Tensor | None:
        """The input of a collective of `size` ranks, checked; None for a barrier.

        Raises:
            WorldError: `world/unbound` without a tensor, `world/size` if it differs from the plan
                or its first dimension cannot be split.
        """
        if action.collective == "barrier":
            return None
        tensor = self.get(action.tensor)
        whole = tensor.nbytes * (size if action.collective == "all_gather" else 1)
        self.require_size(action, whole)
        parts = {"reduce_scatter": size, "all_to_all": size, "all_gather": 1}
        divisor = parts.get(action.collective, 0)
        if divisor and (tensor.ndim == 0 or tensor.shape[0] % divisor):
            where = f"rank {self.rank}: {action.label or action.operator}"
            rule = f"the first dimension of {action.tensor} must be a multiple of {divisor}"
            raise WorldError("world/size", where, tuple(tensor.shape), rule)
        return tensor

    def _memory(self, memory: str, handle: str) -> dict[str, torch.Tensor]:
        held = {"device": self.tensors, "host": self.host}.get(memory)
        if held is None:
            where, rule = f"rank {self.rank}: {handle}", "this world has no such memory"
            legal = ["device", "host"]
            raise WorldError("world/unbound", where, repr(memory), rule, legal=legal)
        return held
