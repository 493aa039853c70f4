"""The transformers model cut by hand with torch's parallelize_module on two processes.

What a plain torch script does: query heads, feed-forward and adapters cut, keys and values whole
(one head), head and embedding whole, loss at counted positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from peers.case import LEARNING_RATE, Case
from peers.transformers_peft import adapted_model, inputs_of

NAME = "torch script, parallelize_module on 2 processes"
NUM_PROCESSES = 2


class _SumGradient(torch.autograd.Function):
    """Identity; its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


def build(case: Case) -> Callable[[int], None]:
    """A step: both processes compute all rows together."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = adapted_model(case)
    causal = model.get_base_model()
    for layer in causal.model.layers:
        _cut(layer, mesh)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    cut = [parameter for parameter in trained if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in trained if not isinstance(parameter, DTensor)]
    optimizers = [torch.optim.AdamW(each, lr=LEARNING_RATE, fused=True) for each in (cut, whole)]

    def step(number: int) -> None:
        for row in case.rows(number):
            hidden_SD = causal.model(**inputs_of(row), use_cache=False).last_hidden_state[0]
            logits_NV = causal.lm_head(hidden_SD[torch.from_numpy(row.counted_N)])
            targets_N = torch.from_numpy(row.targets_N)
            loss = torch.nn.functional.cross_entropy(logits_NV.float(), targets_N, reduction="sum")
            (loss / case.num_counted(number)).backward()
        _clip(cut, whole)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def _clip(cut: list[Tensor], whole: list[Tensor]) -> None:
    """To norm 1; torch's own function does not take plain tensors and DTensors together."""
    parts = [parameter.grad.to_local() for parameter in cut]
    square = torch.nn.utils.get_total_norm(parts).square()
    dist.all_reduce(square)
    grads = [parameter.grad for parameter in whole]
    norm = (square + torch.nn.utils.get_total_norm(grads).square()).sqrt()
    factor = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
    for grad in (*parts, *grads):
        grad.mul_(factor)


def _cut(layer: nn.Module, mesh) -> None:
    plan = {}
    for block, names in (("self_attn", ("q_proj",)), ("mlp", ("gate_proj", "up_proj"))):
        for name in names:
            plan[f"{block}.{name}.base_layer"] = ColwiseParallel()
            plan[f"{block}.{name}.lora_B.default"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"{name}.base_layer"] = RowwiseParallel()
        plan[f"{name}.lora_A.default"] = RowwiseParallel()
    parallelize_module(layer, mesh, plan)
    attention, size = layer.self_attn, mesh.size()
    attention.num_key_value_groups //= size
    for projection in (attention.k_proj, attention.v_proj):  # own query heads' part only
        projection.register_forward_hook(_summed)


def _summed(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    return _SumGradient.apply(output)
