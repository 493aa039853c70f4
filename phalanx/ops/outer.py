"""Outer optimisation of replicas that train apart: delta, Nesterov step, blend.

Legend: N elements of one fragment, flat. Outer parameters, momentum and delta share one dtype
(float32 unless a test says otherwise); local parameters may be narrower.

Source: DiLoCo, arXiv 2311.08105, Algorithm 1; Streaming DiLoCo, arXiv 2501.18512, Algorithm 2.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def outer_delta_(delta_N: Tensor, outer_N: Tensor, local_N: Tensor) -> Tensor:
    """Outer gradient of one replica, old minus new, so that it acts like a gradient.

    Args:
        delta_N: receives the result, in the dtype of `outer_N`.
        outer_N: outer parameters of the previous synchronisation.
        local_N: parameters after the inner steps, in any floating dtype.
    """
    return torch.sub(outer_N, local_N, out=delta_N)


@torch.no_grad()
def nesterov_step_(
    outer_N: Tensor, momentum_N: Tensor, delta_N: Tensor, lr: float, momentum: float
) -> Tensor:
    """buf = mu * buf + delta; outer -= eta * (delta + mu * buf), all in place.

    The same arithmetic, bit for bit, as torch.optim.SGD(nesterov=True, dampening=0) whose buffer
    starts at zero. `momentum` 0 is plain SGD; with `lr` 1 that averages the replicas.

    Args:
        outer_N: outer parameters, updated.
        momentum_N: momentum buffer, updated; zeros before the first step.
        delta_N: mean outer gradient over the contributors; overwritten.
    """
    momentum_N.mul_(momentum).add_(delta_N)
    return outer_N.add_(delta_N.add_(momentum_N, alpha=momentum), alpha=-lr)


@torch.no_grad()
def blend_(local_N: Tensor, outer_N: Tensor, local_weight: float) -> Tensor:
    """local = alpha * local + (1 - alpha) * outer, in place and in the dtype of `outer_N`.

    Args:
        local_weight: alpha; 0 copies `outer_N` exactly, 1 leaves `local_N` exactly as it is.
    """
    if local_N.dtype == outer_N.dtype:
        return local_N.lerp_(outer_N, 1.0 - local_weight)
    return local_N.copy_(torch.lerp(local_N.to(outer_N.dtype), outer_N, 1.0 - local_weight))
