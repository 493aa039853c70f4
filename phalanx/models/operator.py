"""Single operators of a decoder: parameters, FLOPs, bytes kept. No torch.

Formulas follow `models.decoder_layers` as it is written, and tests hold them to counted FLOPs and
to the tensors that autograd keeps. Letters: D hidden size, F feed-forward, H and K heads, C
channels per head, r rank, b bytes per element, n tokens of a document, W window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.models.config import DTYPE_BYTES, DecoderConfig
from phalanx.models.spec import LoraSpec, TensorSpec, canonical_tensors, lora_targets


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator of the forward pass.

    Args:
        name: canonical module name ("model.layers.3.mlp.up_proj"), or what it does there.
        layer: index of its layer; None outside of layers.
        op: embedding | rope | norm | rotate | linear | attention | gate | add | scale | router |
            experts | head.
        tensors: canonical weights that it reads; a norm may have none.
        num_params: their elements; a tied head counts none.
        weight_bytes: bytes of weights that it reads, a tied head's included.
        num_trained: elements that are trained in or beside it (adapters).
        flops_per_token: forward, 2 per multiply-add of its matrix products.
        backward_flops_per_token: recomputed scores of attention included.
        saved_bytes_per_token: what autograd keeps until the backward pass, counted where it is
            kept first.
        out_bytes_per_token: bytes of its result.
    """

    name: str
    layer: int | None
    op: str
    tensors: tuple[str, ...] = ()
    num_params: int = 0
    weight_bytes: int = 0
    num_trained: int = 0
    flops_per_token: float = 0.0
    backward_flops_per_token: float = 0.0
    saved_bytes_per_token: float = 0.0
    out_bytes_per_token: float = 0.0


def visible_keys(document_tokens: int, window: int | None) -> float:
    """Mean number of keys that a query of a document sees: sum over i of min(i, W) / n."""
    n, w = document_tokens, min(window or document_tokens, document_tokens)
    return w - w * (w - 1) / (2 * n)


class OperatorMaker:
    """Makes operators of one model under one way of training.

    Args:
        config, document_tokens, lora: as `operators.operators`.

    Attributes:
        kept_from: the first layer with something trained; below it nothing is kept, at it not its
            input. -1 where everything is trained.
    """

    def __init__(self, config: DecoderConfig, document_tokens: int, lora: LoraSpec | None) -> None:
        self.config, self.document_tokens, self.lora = config, document_tokens, lora
        self.itemsize = DTYPE_BYTES[config.dtype]
        self.specs = canonical_tensors(config)
        adapted = lora_targets(config, lora) if lora else []
        self.adapted = {spec.name for spec in adapted}
        layers = [int(spec.name.split(".")[2]) for spec in adapted]
        self.kept_from = min(layers, default=config.num_layers) if lora else -1

    def keeps(self, layer: int | None) -> bool:
        """Whether results inside a layer need gradients; None: what lies before the layers."""
        return self.lora is None if layer is None else layer >= self.kept_from

    def width(self, channels: int) -> float:
        """Bytes of a row."""
        return float(channels * self.itemsize)

    def is_trained(self, module: str) -> bool:
        """Whether its matrix or its adapter is trained."""
        return self._num_trained(self.specs[f"{module}.weight"]) > 0

    def _num_trained(self, spec: TensorSpec) -> int:
        if self.lora is None:
            return spec.num_elements * spec.is_trained
        return self.lora.rank * sum(spec.shape) if spec.name in self.adapted else 0

    def reads(self, *tensors: str) -> dict[str, Any]:
        """The fields of an operator that say which weights it reads."""
        specs = [self.specs[tensor] for tensor in tensors]
        return {
            "tensors": tensors,
            "num_params": sum(spec.num_elements for spec in specs),
            "weight_bytes": sum(spec.num_bytes for spec in specs),
            "num_trained": sum(self._num_trained(spec) for spec in specs),
        }

    def norm(
        self,
        name: str,
        layer: int | None,
        channels: int,
        *,
        kept: bool,
        heads: int = 1,
        has_weight: bool = True,
        shares_input: bool = False,
    ) -> Operator:
        """Keeps its input (unless another operator does) and one number per row and head, at least
        float32."""
        width = self.width(heads * channels)
        kept_bytes = heads * max(4, self.itemsize) + (0.0 if shares_input else width)
        return Operator(
            name=name,
            layer=layer,
            op="norm",
            **(self.reads(f"{name}.weight") if has_weight else {}),
            saved_bytes_per_token=kept_bytes if kept else 0.0,
            out_bytes_per_token=width,
        )

    def linear(
        self, name: str, layer: int | None, *, shares_input: bool = False, input_has_grad: bool
    ) -> Operator:
        """Keeps its input when it or its adapter is trained, unless a sibling keeps it already."""
        weight = self.reads(f"{name}.weight")
        num_out, num_in = self.specs[f"{name}.weight"].shape
        product = 2.0 * num_in * num_out
        rank = self.lora.rank if self.lora and weight["num_trained"] else 0
        low_in, low_out = 2.0 * rank * num_in, 2.0 * rank * num_out
        backward = low_in + 2 * low_out + input_has_grad * (product + low_in)
        if self.lora is None:
            backward += product
        kept_bytes = self.width(rank)
        if weight["num_trained"] and not shares_input:
            kept_bytes += self.width(num_in)
        return Operator(
            name=name,
            layer=layer,
            op="linear",
            **weight,
            flops_per_token=product + low_in + low_out,
            backward_flops_per_token=backward if self.keeps(layer) else 0.0,
            saved_bytes_per_token=kept_bytes,
            out_bytes_per_token=self.width(num_out),
        )

    def attention(self, name: str, layer: int) -> Operator:
        """Two products forward; backward recomputes the scores and makes four more."""
        kind, source = self.config.attention(layer), self.config.kv_source(layer)
        q, kv = kind.num_heads * kind.head_dim, kind.num_kv_heads * kind.head_dim
        product = 2.0 * q * visible_keys(self.document_tokens, kind.window)
        kept = self.keeps(layer)
        kept_bytes = self.width(q) + (self.width(kind.num_heads) if self.itemsize < 4 else 0.0)
        if layer == self._first_to_keep(source):
            kept_bytes += self.width(2 * kv)
        return Operator(
            name=name,
            layer=layer,
            op="attention",
            flops_per_token=2 * product,
            backward_flops_per_token=5 * product if kept else 0.0,
            saved_bytes_per_token=kept_bytes if kept else 0.0,
            out_bytes_per_token=self.width(q),
        )

    def _first_to_keep(self, source: int) -> int:
        """The first layer that keeps the keys and values which `source` makes."""
        layers = range(max(source, self.kept_from), self.config.num_layers)
        return next((at for at in layers if self.config.kv_source(at) == source), -1)

    def elementwise(
        self, name: str, layer: int | None, op: str, channels: int, saved_channels: int = 0
    ) -> Operator:
        """One of add, gate, rotate, scale; it keeps `saved_channels` of its inputs."""
        return Operator(
            name=name,
            layer=layer,
            op=op,
            saved_bytes_per_token=self.width(saved_channels) if self.keeps(layer) else 0.0,
            out_bytes_per_token=self.width(channels),
        )

    def experts(self, prefix: str, layer: int) -> list[Operator]:
        """Router and experts of one layer; they are counted, not computed, so nothing is kept."""
        assert self.config.experts is not None
        (count, num_active, width), d = self.config.experts, self.config.hidden_size
        router = [f"{prefix}.router.{n}" for n in ("scale", "proj.weight", "per_expert_scale")]
        weights = [f"{prefix}.experts.{n}" for n in ("gate_up_proj", "down_proj")]
        again = (2 if self.lora is None else 1) if self.keeps(layer) else 0
        return [
            Operator(
                name=f"{prefix}.{op}",
                layer=layer,
                op=op,
                **self.reads(*tensors),
                flops_per_token=flops,
                backward_flops_per_token=again * flops,
                out_bytes_per_token=self.width(channels),
            )
            for op, tensors, channels, flops in (
                ("router", router, count, 2.0 * count * d),
                ("experts", weights, d, 6.0 * num_active * d * width),
            )
        ]

    def head(self) -> Operator:
        """The head with its loss, whose gradient is made in the forward pass."""
        tied = self.config.tied_head
        spec = self.specs["model.embed_tokens.weight" if tied else "lm_head.weight"]
        weight = self.reads(spec.name) | ({"num_params": 0, "num_trained": 0} if tied else {})
        passes = 3 if self.lora is None else 2
        return Operator(
            name="head",
            layer=None,
            op="head",
            **weight,
            flops_per_token=passes * 2.0 * spec.num_elements,
            saved_bytes_per_token=8.0 + self.width(self.config.hidden_size),
        )
