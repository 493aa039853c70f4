"""AdamW on the shards that a rank holds, with clipping by the true global norm.

The optimizer sees plain tensors: the local parts of DTensors. AdamW is elementwise, so a shard is
updated as the whole would be, without DTensor's dispatch for each of thousands of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from phalanx.engines.local_parts import local_of, placed_as

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """AdamW over the trainable parameters of a bound module.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", algorithm 2, with torch's fused
    kernel. Moments have the dtype of their parameter, which is the master copy: with FSDP2 the
    compute dtype is another one.

    Args:
        named_parameters: (canonical name, plain or DTensor parameter); those that require gradients
            are trained. The objects are kept, because FSDP2 puts others in their place meanwhile.
        weight_decay: decoupled; on matrices only.
        clip_norm: limit of the global norm; 0: none.
        group: ranks that hold other parameters, the stages of a pipeline; None: nobody does.
        counted_elsewhere: names here whose gradient another rank of `group` counts in the norm (an
            embedding that is the head of another stage too).

    Attributes:
        before_change: called each time before weights, moments and counts change.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        weight_decay: float = 0.0,
        clip_norm: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        group: dist.ProcessGroup | None = None,
        counted_elsewhere: Collection[str] = (),
    ) -> None:
        every = dict(named_parameters)
        self.named_parameters = {n: each for n, each in every.items() if each.requires_grad}
        self.parameters = list(self.named_parameters.values())
        self.clip_norm = clip_norm
        self._group, self._elsewhere = group, frozenset(counted_elsewhere)
        self._device = next((each.device for each in every.values()), torch.device("cpu"))
        self._betas, self._eps = betas, eps
        self._weight_decay = weight_decay
        self._state: dict[str, list[Tensor]] = {}
        self.before_change: list[Callable[[], None]] = []

    def norm(self) -> Tensor:
        """Global norm of the gradients as they are; all ranks call it."""
        for parameter in self.parameters:
            _place_gradient(parameter)
        mine = self.named_parameters.items()
        counted = [each for name, each in mine if name not in self._elsewhere]
        return global_norm(counted, group=self._group, device=self._device)

    @torch.no_grad()
    def step(self, lr: float, skip: Tensor | None = None, norm: Tensor | None = None) -> Tensor:
        """Clip, update, forget the gradients; returns the norm before clipping, as a tensor.

        Args:
            lr: learning rate.
            skip: scalar on the parameters' device, equal on all ranks; not 0: this step changes
                nothing, neither weights nor moments nor the number of updates.
            norm: what `norm` just said; None: it is asked.
        """
        self._create_state()
        norm = self.norm() if norm is None else norm
        grads = [p.grad if p.grad is None else local_of(p.grad) for p in self.parameters]
        if self.clip_norm > 0.0:
            _scale(grads, torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0))
        found_inf = None if skip is None else (skip != 0).float()
        self.about_to_change()
        for is_matrix, decay in ((True, self._weight_decay), (False, 0.0)):
            self._update(grads, is_matrix, lr, decay, found_inf)
        for parameter in self.parameters:
            parameter.grad = None
        return norm

    def about_to_change(self) -> None:
        """Tell those who read the state from another thread."""
        for tell in self.before_change:
            tell()

    @torch.no_grad()
    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Of each kind (exp_avg, exp_avg_sq, step) the tensors by canonical name.

        Moments are DTensors placed as their parameter, or plain where it is; steps are scalars. All
        share memory with the optimizer: what is copied into them is its state.
        """
        self._create_state()
        names = self.named_parameters
        found = {
            kind: {
                name: placed_as(parameter, local)
                for (name, parameter), local in zip(names.items(), self._state.get(kind, []))
            }
            for kind in MOMENTS
        }
        return found | {"step": dict(zip(names, self._state.get("step", [])))}

    def state_bytes(self) -> int:
        """Bytes of the moments and counts on this rank."""
        return sum(each.nbytes for tensors in self._state.values() for each in tensors)

    def state_element_bytes(self, parameter: Tensor) -> int:
        """Bytes of state per element of a trained parameter, once there is any."""
        return len(MOMENTS) * parameter.element_size()

    def take_weights(self) -> None:
        """Weights were set from outside, without states: start the next update from them."""

    def _create_state(self) -> None:
        if self._state or not self.parameters:
            return
        locals_ = [local_of(parameter) for parameter in self.parameters]
        for kind in MOMENTS:
            self._state[kind] = [torch.zeros_like(local) for local in locals_]
        counts = torch.zeros(len(locals_), device=locals_[0].device)
        self._state["step"] = list(counts.unbind())

    def _update(
        self,
        grads: list[Tensor | None],
        is_matrix: bool,
        lr: float,
        weight_decay: float,
        found_inf: Tensor | None,
    ) -> None:
        """Update the matrices or all others."""
        rows = []
        for at, (parameter, grad) in enumerate(zip(self.parameters, grads)):
            local = local_of(parameter)  # anew each time: FSDP2 moves its shards at first use
            if grad is None or (local.dim() > 1) != is_matrix:
                continue
            state = [self._state[kind][at] for kind in (*MOMENTS, "step")]
            if local.numel():
                rows.append((local, grad, *state))
            else:  # a rank may hold no row of a small parameter, and counts its updates too
                state[-1].add_(1.0 if found_inf is None else 1.0 - found_inf)
        if rows:
            self._adamw(rows, lr, weight_decay, found_inf)

    def _adamw(
        self,
        rows: Sequence[tuple[Tensor, ...]],
        lr: float,
        weight_decay: float,
        found_inf: Tensor | None,
    ) -> None:
        """Update tensors on one device, each with its gradient, moments and number of updates."""
        params, wanted, exp_avgs, exp_avg_sqs, steps = map(list, zip(*rows))
        adamw(
            params,
            wanted,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            fused=True,
            found_inf=found_inf,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=self._eps,
            maximize=False,
        )


def _place_gradient(parameter: nn.Parameter) -> None:
    """DTensor leaves some gradients otherwise than their parameter (a row-wise embedding's)."""
    grad = parameter.grad
    if not isinstance(grad, DTensor) or not isinstance(parameter, DTensor):
        return
    if grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)


def _scale(grads: Iterable[Tensor | None], factor: Tensor) -> None:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        if grad is not None:
            by_dtype.setdefault(grad.dtype, []).append(grad)
    for dtype, alike in by_dtype.items():
        torch._foreach_mul_(alike, factor.to(dtype))


def global_norm(
    parameters: Iterable[nn.Parameter],
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """The 2-norm of all gradients together, equal on all ranks; no value leaves the device.

    Squares of shards are added over the mesh dims that shard them, once per set of such dims;
    gradients that every rank holds whole count once. The sum over tensors is in float64: however
    a model is cut into stages, the float32 norm is the same but for a rounding in 10^8.

    Args:
        group: ranks that hold other parameters; None: nobody does.
        device: of the result where this rank holds no gradient.

    Returns:
        A scalar, float32 unless gradients are float64.
    """
    groups: dict[tuple, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        key: tuple = ()
        if isinstance(grad, DTensor):
            # of all kinds: torch's strided shards (FSDP2 under tensor parallelism) are no `Shard`
            dims = [d for d, placed in enumerate(grad.placements) if not placed.is_replicate()]
            key = (grad.device_mesh, *dims) if dims else ()
        groups.setdefault(key, []).append(local_of(grad))
    squares = []
    for key, grads in groups.items():
        square = square_sum(grads)
        for dim in key[1:]:
            dist.all_reduce(square, group=key[0].get_group(dim))
        squares.append(square)
    total = torch.stack(squares).sum() if squares else torch.zeros((), device=device).double()
    if group is not None:
        dist.all_reduce(total, group=group)
    is_double = any(grad.dtype is torch.float64 for grads in groups.values() for grad in grads)
    return total.sqrt() if is_double else total.sqrt().float()


def square_sum(grads: list[Tensor]) -> Tensor:
    """The sum of all squares, float64; each tensor's own norm in float32 or wider."""
    norms = []
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        alike = [grad for grad in grads if grad.dtype is dtype]
        wide = torch.promote_types(dtype, torch.float32)
        norms += torch._foreach_norm(alike, 2.0, dtype=wide)
    return torch.stack([norm.double() for norm in norms]).square().sum()
