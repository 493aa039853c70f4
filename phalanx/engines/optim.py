"""AdamW on the shards that a rank holds, with clipping by the true global norm.

The optimizer sees plain tensors: the local parts of DTensors. AdamW is elementwise, so a shard is
updated as the whole would be, without DTensor's dispatch for each of thousands of operations.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import cos, pi

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard


def learning_rate(
    step: int, *, peak: float, warmup_steps: int, num_steps: int, floor_frac: float = 0.1
) -> float:
    """Linear warm-up, then half a cosine down to `floor_frac` of the peak.

    Args:
        step: from 0; step `warmup_steps` is the first at the peak.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    done_frac = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return peak * (floor_frac + (1.0 - floor_frac) * 0.5 * (1.0 + cos(pi * done_frac)))


class ShardedAdamW:
    """AdamW over the trainable parameters of a bound module.

    Args:
        parameters: plain or DTensor parameters that require gradients.
        weight_decay: decoupled; on matrices only.
        clip_norm: limit of the global norm; 0: none.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        weight_decay: float = 0.0,
        clip_norm: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        self.parameters = [each for each in parameters if each.requires_grad]
        self.clip_norm = clip_norm
        self._options = {"betas": betas, "eps": eps}
        self._weight_decay = weight_decay
        self._adamw: torch.optim.AdamW | None = None
        self._locals: list[Tensor] = []

    def step(self, lr: float) -> Tensor:
        """Clip, update, forget the gradients; returns the norm before clipping, as a tensor."""
        adamw = self._ready()
        norm = global_norm(self.parameters)
        grads = [_local(p.grad) for p in self.parameters]
        if self.clip_norm > 0.0:
            factor = torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0)
            torch._foreach_mul_(grads, factor.to(grads[0].dtype))
        for local, grad in zip(self._locals, grads):
            local.grad = grad
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        for parameter, local in zip(self.parameters, self._locals):
            parameter.grad = local.grad = None
        return norm

    def state_bytes(self) -> int:
        """Bytes of the moments on this rank."""
        states = self._adamw.state.values() if self._adamw else ()
        return sum(value.nbytes for state in states for value in state.values())

    def _ready(self) -> torch.optim.AdamW:
        """Built at the first step, because FSDP2 fixes the storage of its shards at first use."""
        if self._adamw is None:
            self._locals = [_local(parameter.detach()) for parameter in self.parameters]
            decayed, others = [], []
            for local in self._locals:
                if local.numel():  # a rank may hold no row of a small parameter
                    (decayed if local.dim() > 1 else others).append(local)
            groups = [
                {"params": decayed, "weight_decay": self._weight_decay},
                {"params": others, "weight_decay": 0.0},
            ]
            self._adamw = torch.optim.AdamW(
                [group for group in groups if group["params"]], lr=0.0, fused=True, **self._options
            )
        return self._adamw


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def global_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients together, equal on all ranks; no value leaves the device.

    Squares of shards are added over the mesh dims that shard them, once per set of such dims;
    gradients that every rank holds whole count once.
    """
    groups: dict[tuple, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        key: tuple = ()
        if isinstance(grad, DTensor):
            dims = [d for d, placed in enumerate(grad.placements) if isinstance(placed, Shard)]
            key = (grad.device_mesh, *dims) if dims else ()
        groups.setdefault(key, []).append(_local(grad))
    squares = []
    for key, grads in groups.items():
        square = torch.nn.utils.get_total_norm(grads).square()
        for dim in key[1:]:
            dist.all_reduce(square, group=key[0].get_group(dim))
        squares.append(square)
    return torch.stack(squares).sum().sqrt()
