"""Low-rank adapters: injection, and merging into canonical weights.

Legend: S rows, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from phalanx.errors import JobError
from phalanx.models.decoder import Projection
from phalanx.models.parameters import initial_values, load_parameters
from phalanx.models.spec import DecoderConfig, LoraSpec, lora_targets, lora_tensors
from phalanx.ops.dropout import DropoutKey, keyed_dropout


class LoraLinear(Projection):
    """A frozen matrix with a trainable low-rank update; `weight` keeps its canonical name.

    The update is computed in the dtype of the rows (its weights, usually float32, are cast), where
    PEFT computes it in the dtype of the adapter; in float32 both are the same.
    """

    def __init__(self, base: nn.Linear, name: str, lora: LoraSpec, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.name, self.scale, self.dropout = name, lora.scale, lora.dropout
        self.weight = base.weight
        self.register_parameter("bias", None)
        with torch.device("meta"):
            self.lora_A = nn.Linear(base.in_features, lora.rank, bias=False, dtype=dtype)
            self.lora_B = nn.Linear(lora.rank, base.out_features, bias=False, dtype=dtype)
        if base.weight.device.type != "meta":
            self.lora_A.to_empty(device=base.weight.device)
            self.lora_B.to_empty(device=base.weight.device)

    def forward(self, x_SI: Tensor, dropout: DropoutKey | None = None) -> Tensor:
        """x W^T + scale (x A^T) B^T, [S, O]."""
        return self.product(x_SI, self.weight, self.lora_A.weight, self.lora_B.weight, dropout)

    def product(
        self,
        x_SI: Tensor,
        weight_OI: Tensor,
        down_RI: Tensor,
        up_OR: Tensor,
        dropout: DropoutKey | None,
        first_channel: int = 0,
    ) -> Tensor:
        """The same with the parts of the weights that a rank holds.

        A part of the outputs: rows of W and of B. A part of the inputs, from `first_channel` on:
        columns of W and of A; what the ranks compute is then to be summed, update included.
        """
        down_RI, up_OR = down_RI.to(x_SI.dtype), up_OR.to(x_SI.dtype)
        drop = None
        if self.training and self.dropout > 0.0:
            if dropout is None:
                rule = "needs a DropoutKey: pass `dropout` to the decoder while training"
                raise JobError("job/missing", "lora.dropout", self.dropout, rule)
            drop = partial(
                keyed_dropout,
                probability=self.dropout,
                key=dropout,
                name=self.name,
                first_channel=first_channel,
            )
        return _FrozenPlusLowRank.apply(x_SI, weight_OI, down_RI, up_OR, self.scale, drop)


class _FrozenPlusLowRank(torch.autograd.Function):
    """x W^T + scale (drop(x) A^T) B^T with W frozen: both sums happen inside the products.

    The mask is drawn again for the backward pass, so dropout keeps nothing of its own.
    """

    @staticmethod
    def forward(ctx, x_SI, weight_OI, down_RI, up_OR, scale, drop):
        kept_SI = x_SI if drop is None else drop(x_SI)
        low_SR = F.linear(kept_SI, down_RI).mul_(scale)
        ctx.save_for_backward(x_SI, weight_OI, down_RI, up_OR, low_SR)
        ctx.scale, ctx.drop = scale, drop
        return F.linear(x_SI, weight_OI).addmm_(low_SR, up_OR.t())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SO):
        x_SI, weight_OI, down_RI, up_OR, low_SR = ctx.saved_tensors
        kept_SI = x_SI if ctx.drop is None else ctx.drop(x_SI)
        grad_low_SR = (grad_SO @ up_OR).mul_(ctx.scale)
        grad_x_SI = None
        if ctx.needs_input_grad[0]:
            grad_x_SI = grad_SO @ weight_OI
            if ctx.drop is None:
                grad_x_SI.addmm_(grad_low_SR, down_RI)
            else:  # elementwise and linear: its own gradient
                grad_x_SI += ctx.drop(grad_low_SR @ down_RI)
        return grad_x_SI, None, grad_low_SR.t() @ kept_SI, grad_SO.t() @ low_SR, None, None


def lora_values(
    config: DecoderConfig, lora: LoraSpec, seed: int, dtype: str = "float32"
) -> Iterator[tuple[str, Tensor]]:
    """(name, fresh value) of every adapter tensor; B is zero, so the model starts unchanged."""
    return initial_values(seed, lora_tensors(config, lora, dtype).values())


def inject(
    decoder: nn.Module, lora: LoraSpec, *, seed: int = 0, dtype: str = "float32"
) -> list[str]:
    """Freeze the decoder and give each target matrix an adapter.

    Call it before sharding. On the meta device the adapters stay unfilled: fill them with
    `load_parameters(decoder, lora_values(config, lora, seed), strict=False)`.

    Returns:
        Names of the trainable parameters: `<module>.lora_A.weight`, `<module>.lora_B.weight`.
    """
    decoder.requires_grad_(False)
    modules = dict(decoder.named_modules())
    for spec in lora_targets(decoder.config, lora):
        name = spec.name.removesuffix(".weight")
        if name in modules:  # a pipeline stage holds only some layers
            parent, _, leaf = name.rpartition(".")
            adapted = LoraLinear(modules[name], name, lora, getattr(torch, dtype))
            setattr(modules[parent], leaf, adapted)
    trainable = {n: p for n, p in decoder.named_parameters() if p.requires_grad}
    if not any(parameter.is_meta for parameter in trainable.values()):
        load_parameters(decoder, lora_values(decoder.config, lora, seed, dtype), strict=False)
    return list(trainable)


def merged_tensors(
    base: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor], lora: LoraSpec
) -> Iterator[tuple[str, Tensor]]:
    """Canonical tensors W + scale B A, computed in float32 and rounded once to W's dtype.

    Args:
        base: (canonical name, tensor), for example `hf.read_tensors(folder)`.
        adapters: whole adapter tensors by our names (`<module>.lora_A.weight`).

    Raises:
        JobError: `model/tensor` for an adapter without its matrix or its partner.
    """
    left = set(adapters)
    for name, weight_OI in base:
        module = name.removesuffix(".weight")
        parts = [f"{module}.lora_A.weight", f"{module}.lora_B.weight"]
        if left.isdisjoint(parts):
            yield name, weight_OI
            continue
        left.difference_update(parts)
        a_RI, b_OR = (_adapter(adapters, part).float() for part in parts)
        yield name, (weight_OI.float() + lora.scale * (b_OR @ a_RI)).to(weight_OI.dtype)
    if left:
        raise JobError("model/tensor", "adapters", min(left), "belongs to no matrix of the base")


def _adapter(adapters: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in adapters:
        raise JobError("model/tensor", "adapters", name, "is missing beside its partner")
    return adapters[name]


def adapter_tensors(decoder: nn.Module) -> dict[str, Tensor]:
    """The adapters of a decoder by our names, whole: a sharded one is gathered (a collective)."""
    return {
        name: parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()
        for name, parameter in decoder.named_parameters()
        if ".lora_" in name
    }
