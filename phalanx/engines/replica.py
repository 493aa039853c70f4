"""A replica that may leave and come back: its gradients, its state as bytes, its update.

Legend: N gradient elements of the whole replica, flat; Y bytes of its state, flat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from phalanx.action import Compute
from phalanx.errors import WorldError
from phalanx.mesh import Mesh
from phalanx.worlds.torch_tensors import Op, RankContext


class Replica:
    """The ops and handles that a recover policy's actions name.

    The gradients of a replica are the sum over its own samples divided by its own count; replicas
    count alike. The state is parameters and optimizer state, byte for byte; what else a replica
    needs to go on (learning-rate schedule, data position, random numbers) must follow from the
    number of the step.

    Args:
        params: canonical name -> parameter; the same order on all replicas.
        optimizer: over exactly these parameters. Its state must start as zeros (SGD, Adam, AdamW).
        compute_grad: leaves the gradients of this replica's batch of a step in `.grad`.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optimizer: Optimizer,
        compute_grad: Callable[[int], None],
    ) -> None:
        self.params, self.optimizer = list(params.values()), optimizer
        self._compute_grad = compute_grad
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._fill_state_with_zeros()
        numel = sum(p.numel() for p in self.params)
        self.grad_N = torch.zeros(numel, dtype=torch.float32, device=self.params[0].device)

    @property
    def ops(self) -> dict[str, Op]:
        """Op name -> function of the rank's context and the action."""
        return {
            "grad": self._grad,
            "grad.zero": self._zero_grad,
            "state.load": lambda context, action: self.load(context.get("state", "host")),
            "update": self._update,
        }

    def context(self, rank: int, mesh: Mesh) -> RankContext:
        """The tensors that a world works on: the gradients, and the state, packed when asked."""
        context = _ReplicaContext(self, rank, mesh, self.grad_N.device)
        context.tensors["grad"] = self.grad_N
        return context

    @property
    def facts(self) -> dict[str, int]:
        """What the policy's view must hold."""
        state_bytes = sum(tensor.nbytes for tensor in self._state_tensors())
        return {"grad_bytes": self.grad_N.nbytes, "state_bytes": state_bytes}

    def pack(self) -> Tensor:
        """The state as bytes [Y]: parameters, then optimizer state by parameter and name."""
        device = self.grad_N.device  # AdamW keeps its step counts on the host
        return torch.cat([_bytes_of(tensor).to(device) for tensor in self._state_tensors()])

    def load(self, state_Y: Tensor) -> None:
        """Take over the state of a peer, bit for bit.

        Raises:
            WorldError: `world/size` for the state of another model.
        """
        sizes = [tensor.nbytes for tensor in self._state_tensors()]
        if state_Y.numel() != sum(sizes):
            rule = f"the state of this replica has {sum(sizes)} bytes"
            raise WorldError("world/size", "state", state_Y.numel(), rule, legal=[sum(sizes)])
        with torch.no_grad():
            for tensor, piece in zip(self._state_tensors(), state_Y.split(sizes)):
                # clone: a slice of bytes may lie where no element of this dtype may
                tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))

    def digest(self) -> str:
        """SHA-256 of the state: equal on replicas that are equal bit for bit."""
        return hashlib.sha256(self.pack().cpu().numpy().tobytes()).hexdigest()

    def _grad(self, context: RankContext, action: Compute) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._compute_grad(action.item)
        for p, piece in zip(self.params, self.grad_N.split([p.numel() for p in self.params])):
            if p.grad is None:  # the batch had no use for it: an expert that got no token
                piece.zero_()
            else:
                piece.copy_(p.grad.reshape(-1))

    def _zero_grad(self, context: RankContext, action: Compute) -> None:
        self.grad_N.zero_()

    def _update(self, context: RankContext, action: Compute) -> None:
        """Apply sum / number of contributors with the step's learning rate."""
        mean_N = self.grad_N / action.batch["num_contributors"]
        for p, piece in zip(self.params, mean_N.split([p.numel() for p in self.params])):
            p.grad = piece.view(p.shape).to(p.dtype)
        for group, rate in zip(self.optimizer.param_groups, self._rates):
            group["lr"] = rate * action.batch["lr_factor"]
        self.optimizer.step()

    def _state_tensors(self) -> Iterator[Tensor]:
        yield from (p.detach() for p in self.params)
        for p in self.params:
            state = self.optimizer.state[p]
            yield from (state[name] for name in sorted(state))

    def _fill_state_with_zeros(self) -> None:
        """A step with zero gradients and rate zero moves nothing but makes the state's tensors."""
        for p in self.params:
            p.grad = torch.zeros_like(p)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(self.optimizer.param_groups, self._rates):
            group["lr"] = rate
        for p in self.params:
            for tensor in self.optimizer.state[p].values():
                tensor.zero_()


class _ReplicaContext(RankContext):
    """Hands out the state as it is at the moment; between steps nothing needs a second copy."""

    def __init__(self, replica: Replica, rank: int, mesh: Mesh, device: torch.device) -> None:
        super().__init__(rank, mesh, device)
        self._replica = replica

    def get(self, handle: str, memory: str = "device") -> Tensor:
        if (handle, memory) == ("state", "device"):
            return self._replica.pack()
        return super().get(handle, memory)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
