"""What a decoder computes, operator by operator: parameters, FLOPs, bytes kept. No torch.

Formulas follow `models.decoder` as it is written, and tests hold them to counted FLOPs and to the
tensors that autograd keeps. Letters: D hidden size, F feed-forward, H and K heads, C channels per
head, r rank, b bytes per element, n tokens of a document, W window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.models.config import DTYPE_BYTES, AttentionKind, DecoderConfig
from phalanx.models.spec import LoraSpec, TensorSpec, canonical_tensors, lora_targets


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator of the forward pass.

    Args:
        name: canonical module name ("model.layers.3.mlp.up_proj"), or what it does there.
        layer: index of its layer; None outside of layers.
        op: embedding | rope | norm | linear | attention | gate | add | head.
        tensors: canonical weights that it reads.
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


def operators(
    config: DecoderConfig, *, document_tokens: int, lora: LoraSpec | None = None
) -> list[Operator]:
    """The operators of one forward pass, in order.

    "Per token" means per row, for the head per counted position: it runs at these only.

    Args:
        config: its dtype is that of weights and activations.
        document_tokens: n, the length of the documents that attention stays within.
        lora: adapters on a frozen base; None: every weight is trained. Exact when the first adapted
            layer adapts q, k and v; otherwise that one layer keeps a little less.
    """
    builder = _Builder(config, document_tokens, lora)
    layers = [op for at in range(config.num_layers) for op in builder.layer(at)]
    ends = [builder.norm("model.norm", None, kept=builder.kept_from < config.num_layers)]
    return [builder.embedding(), *builder.rope(), *layers, *ends, builder.head()]


class _Builder:
    def __init__(self, config: DecoderConfig, document_tokens: int, lora: LoraSpec | None) -> None:
        self.config, self.document_tokens, self.lora = config, document_tokens, lora
        self.itemsize = DTYPE_BYTES[config.dtype]
        self.specs = canonical_tensors(config)
        adapted = lora_targets(config, lora) if lora else []
        self.adapted = {spec.name for spec in adapted}
        # the first layer with something trained; below it nothing is kept, at it not its input
        layers = [int(spec.name.split(".")[2]) for spec in adapted]
        self.kept_from = min(layers, default=config.num_layers) if lora else -1

    def _width(self, channels: int) -> float:
        return float(channels * self.itemsize)

    def _trained(self, spec: TensorSpec) -> int:
        if self.lora is None:
            return spec.num_elements
        return self.lora.rank * sum(spec.shape) if spec.name in self.adapted else 0

    def _weight(self, name: str) -> dict[str, Any]:
        spec = self.specs[f"{name}.weight"]
        return {
            "name": name,
            "tensors": (spec.name,),
            "num_params": spec.num_elements,
            "weight_bytes": spec.num_bytes,
            "num_trained": self._trained(spec),
        }

    def embedding(self) -> Operator:
        ids_bytes = 8.0 if self.lora is None else 0.0
        return Operator(
            **self._weight("model.embed_tokens"),
            layer=None,
            op="embedding",
            saved_bytes_per_token=ids_bytes,
            out_bytes_per_token=self._width(self.config.hidden_size),
        )

    def rope(self) -> list[Operator]:
        """One table of cos and sin per layer kind, float32, shared by its layers."""
        tables = []
        for kind in self.config.kinds:
            last = max(
                (i for i, n in enumerate(self.config.layer_kinds) if n == kind.name), default=-1
            )
            table_bytes = 4.0 * kind.head_dim
            tables.append(
                Operator(
                    name=f"rope.{kind.name}",
                    layer=None,
                    op="rope",
                    saved_bytes_per_token=table_bytes if last >= max(0, self.kept_from) else 0.0,
                    out_bytes_per_token=table_bytes,
                )
            )
        return tables

    def norm(self, name: str, layer: int | None, *, kept: bool, heads: int = 1) -> Operator:
        """Keeps its input and one number per row and head, at least float32."""
        weight = self._weight(name)
        width = self._width(heads * weight["num_params"])
        kept_bytes = width + heads * max(4, self.itemsize)
        return Operator(
            **weight,
            layer=layer,
            op="norm",
            saved_bytes_per_token=kept_bytes if kept else 0.0,
            out_bytes_per_token=width,
        )

    def linear(
        self, name: str, layer: int, *, shares_input: bool, input_has_grad: bool
    ) -> Operator:
        """Keeps its input when it or its adapter is trained, unless a sibling keeps it already."""
        weight = self._weight(name)
        num_out, num_in = self.specs[f"{name}.weight"].shape
        product = 2.0 * num_in * num_out
        rank = self.lora.rank if self.lora and weight["num_trained"] else 0
        low_in, low_out = 2.0 * rank * num_in, 2.0 * rank * num_out
        backward = low_in + 2 * low_out + input_has_grad * (product + low_in)
        if self.lora is None:
            backward += product
        kept_bytes = self._width(rank)
        if weight["num_trained"] and not shares_input:
            kept_bytes += self._width(num_in)
        return Operator(
            **weight,
            layer=layer,
            op="linear",
            flops_per_token=product + low_in + low_out,
            backward_flops_per_token=backward if layer >= self.kept_from else 0.0,
            saved_bytes_per_token=kept_bytes,
            out_bytes_per_token=self._width(num_out),
        )

    def attention(self, name: str, layer: int, kind: AttentionKind) -> Operator:
        """Two products forward; backward recomputes the scores and makes four more."""
        q, kv = kind.num_heads * kind.head_dim, kind.num_kv_heads * kind.head_dim
        product = 2.0 * q * visible_keys(self.document_tokens, kind.window)
        kept = layer >= self.kept_from
        peaks = self._width(kind.num_heads) if self.itemsize < 4 else 0.0
        return Operator(
            name=name,
            layer=layer,
            op="attention",
            flops_per_token=2 * product,
            backward_flops_per_token=5 * product if kept else 0.0,
            saved_bytes_per_token=self._width(q + 2 * kv) + peaks if kept else 0.0,
            out_bytes_per_token=self._width(q),
        )

    def layer(self, layer: int) -> list[Operator]:
        """Attention and feed-forward with their norms and sums."""
        prefix, kind = f"model.layers.{layer}", self.config.attention(layer)
        kept, below = layer >= self.kept_from, layer > self.kept_from
        d, f = self._width(self.config.hidden_size), self._width(self.config.intermediate_size)

        def norm(name: str, kept: bool = kept, heads: int = 1) -> Operator:
            return self.norm(f"{prefix}.{name}", layer, kept=kept, heads=heads)

        def linears(block: str, *names: str, has_grad: bool = True) -> list[Operator]:
            keeper = next((n for n in names if self._is_trained(f"{prefix}.{block}.{n}")), None)
            return [
                self.linear(
                    f"{prefix}.{block}.{name}",
                    layer,
                    shares_input=name != keeper,
                    input_has_grad=has_grad,
                )
                for name in names
            ]

        def add(name: str) -> Operator:
            return Operator(name=f"{prefix}.{name}", layer=layer, op="add", out_bytes_per_token=d)

        gate = Operator(
            name=f"{prefix}.mlp.gate",
            layer=layer,
            op="gate",
            saved_bytes_per_token=2 * f if kept else 0.0,
            out_bytes_per_token=f,
        )
        return [
            norm("input_layernorm", below),
            *linears("self_attn", "q_proj", "k_proj", "v_proj", has_grad=below),
            norm("self_attn.q_norm", heads=kind.num_heads),
            norm("self_attn.k_norm", heads=kind.num_kv_heads),
            self.attention(f"{prefix}.self_attn", layer, kind),
            *linears("self_attn", "o_proj"),
            norm("post_attention_layernorm"),
            add("attention_sum"),
            norm("pre_feedforward_layernorm"),
            *linears("mlp", "gate_proj", "up_proj"),
            gate,
            *linears("mlp", "down_proj"),
            norm("post_feedforward_layernorm"),
            add("feedforward_sum"),
        ]

    def _is_trained(self, module: str) -> bool:
        return self.lora is None or f"{module}.weight" in self.adapted

    def head(self) -> Operator:
        """The tied head with its loss, whose gradient is made in the forward pass."""
        spec = self.specs["model.embed_tokens.weight"]
        product = 2.0 * spec.num_elements
        passes = 3 if self.lora is None else 2
        return Operator(
            name="head",
            layer=None,
            op="head",
            tensors=(spec.name,),
            weight_bytes=spec.num_bytes,
            flops_per_token=passes * product,
            saved_bytes_per_token=8.0 + self._width(self.config.hidden_size),
            out_bytes_per_token=0.0,
        )
