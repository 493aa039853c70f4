"""What a decoder computes, operator by operator, in order. No torch."""

from __future__ import annotations

from dataclasses import replace

from phalanx.models.config import DecoderConfig
from phalanx.models.operator import Operator, OperatorMaker, visible_keys
from phalanx.models.spec import LoraSpec

__all__ = ["Operator", "operators", "visible_keys"]


def operators(
    config: DecoderConfig, *, document_tokens: int, lora: LoraSpec | None = None
) -> list[Operator]:
    """The operators of one forward pass, in order.

    "Per token" means per row, for the head per counted position: it runs at these only.

    Args:
        config: its dtype is that of weights and activations.
        document_tokens: n, the length of the documents that attention stays within.
        lora: adapters on a frozen base; None: every weight is trained. Exact when the first adapted
            layer adapts q, k and v (what it has of them); otherwise that layer keeps a little less.
    """
    maker = OperatorMaker(config, document_tokens, lora)
    body = [_embedding(maker, "model.embed_tokens"), *_rope(maker), *_per_layer_inputs(maker)]
    for at in range(config.num_layers):
        body += _attention_block(maker, at) + _feed_forward_block(maker, at)
        body += _layer_end(maker, at)
    kept = maker.kept_from < config.num_layers
    body.append(maker.norm("model.norm", None, config.hidden_size, kept=kept))
    return [*body, maker.head()]


def _embedding(maker: OperatorMaker, name: str, ids_bytes: float = 8.0) -> Operator:
    weight = maker.reads(f"{name}.weight")
    return Operator(
        name=name,
        layer=None,
        op="embedding",
        **weight,
        saved_bytes_per_token=ids_bytes if maker.lora is None else 0.0,
        out_bytes_per_token=maker.width(maker.specs[f"{name}.weight"].shape[1]),
    )


def _rope(maker: OperatorMaker) -> list[Operator]:
    """One table of cos and sin per layer kind, float32, shared by its layers."""
    tables = []
    for kind in maker.config.kinds:
        names = enumerate(maker.config.layer_kinds)
        last = max((at for at, name in names if name == kind.name), default=-1)
        table_bytes = 4.0 * kind.head_dim
        tables.append(
            Operator(
                name=f"rope.{kind.name}",
                layer=None,
                op="rope",
                saved_bytes_per_token=table_bytes if last >= max(0, maker.kept_from) else 0.0,
                out_bytes_per_token=table_bytes,
            )
        )
    return tables


def _per_layer_inputs(maker: OperatorMaker) -> list[Operator]:
    """What per-layer embeddings compute before the first layer, for all layers at once."""
    config = maker.config
    if config.per_layer_embedding is None:
        return []
    count, width = config.num_layers, config.per_layer_embedding.width
    total = maker.elementwise("model.per_layer_sum", None, "add", count * width)
    if maker.kept_from < count:  # one tensor, of which every layer's gate keeps a view
        total = replace(total, saved_bytes_per_token=maker.width(count * width))
    projection, norm = (f"model.per_layer_{n}" for n in ("model_projection", "projection_norm"))
    return [
        # ids and rows are kept by the embedding and by the first layer's norm already
        _embedding(maker, "model.embed_tokens_per_layer", ids_bytes=0.0),
        maker.linear(projection, None, shares_input=True, input_has_grad=True),
        maker.norm(norm, None, width, kept=maker.lora is None, heads=count),
        total,
    ]


def _linears(
    maker: OperatorMaker, layer: int, block: str, *names: str, has_grad: bool = True
) -> list[Operator]:
    """Products of one input, which the first trained one of them keeps."""
    modules = [f"{block}.{name}" for name in names]
    keeper = next((module for module in modules if maker.is_trained(module)), None)
    return [
        maker.linear(module, layer, shares_input=module != keeper, input_has_grad=has_grad)
        for module in modules
    ]


def _attention_block(maker: OperatorMaker, layer: int) -> list[Operator]:
    config, kind = maker.config, maker.config.attention(layer)
    prefix, block, d = (
        f"model.layers.{layer}",
        f"model.layers.{layer}.self_attn",
        config.hidden_size,
    )
    kept, below = maker.keeps(layer), layer > maker.kept_from
    makes_kv = config.kv_source(layer) == layer
    names = ["q_proj"] + makes_kv * (["k_proj"] + ["v_proj"] * (not kind.key_is_value))
    turned = [("q", kind.num_heads)] + makes_kv * [("k", kind.num_kv_heads)]
    ops = [maker.norm(f"{prefix}.input_layernorm", layer, d, kept=below)]
    ops += _linears(maker, layer, block, *names, has_grad=below)
    for which, heads in turned:
        if config.qk_norm:
            name = f"{block}.{which}_norm"
            ops.append(maker.norm(name, layer, kind.head_dim, kept=kept, heads=heads))
        else:
            name = f"{block}.{which}_rotation"
            ops.append(maker.elementwise(name, layer, "rotate", heads * kind.head_dim))
    if config.value_norm and makes_kv:
        ops.append(
            maker.norm(
                f"{block}.v_norm", layer, kind.head_dim, kept=kept, heads=kind.num_kv_heads,
                has_weight=False, shares_input=kind.key_is_value and config.qk_norm,
            )
        )  # fmt: skip
    ops.append(maker.attention(block, layer))
    ops += _linears(maker, layer, block, "o_proj")
    if config.sandwich_norms:
        ops.append(maker.norm(f"{prefix}.post_attention_layernorm", layer, d, kept=kept))
    return [*ops, maker.elementwise(f"{prefix}.attention_sum", layer, "add", d)]


def _feed_forward_block(maker: OperatorMaker, layer: int) -> list[Operator]:
    config, prefix = maker.config, f"model.layers.{layer}"
    block, d, f = f"{prefix}.mlp", config.hidden_size, config.ffn_width(layer)
    kept = maker.keeps(layer)

    def norm(name: str) -> Operator:
        return maker.norm(f"{prefix}.{name}", layer, d, kept=kept)

    before = "pre_feedforward_layernorm" if config.sandwich_norms else "post_attention_layernorm"
    ops = [
        norm(before),
        *_linears(maker, layer, block, "gate_proj", "up_proj"),
        maker.elementwise(f"{block}.gate", layer, "gate", f, saved_channels=2 * f),
        *_linears(maker, layer, block, "down_proj"),
    ]
    if config.experts is not None:
        ops.append(norm("post_feedforward_layernorm_1"))
        ops.append(norm("pre_feedforward_layernorm_2"))
        ops += maker.experts(prefix, layer)
        ops.append(norm("post_feedforward_layernorm_2"))
        ops.append(maker.elementwise(f"{block}.experts_sum", layer, "add", d))
    if config.sandwich_norms:
        ops.append(norm("post_feedforward_layernorm"))
    return [*ops, maker.elementwise(f"{prefix}.feedforward_sum", layer, "add", d)]


def _layer_end(maker: OperatorMaker, layer: int) -> list[Operator]:
    """What follows the two blocks: the per-layer embedding and the layer's scalar."""
    config, prefix, d = maker.config, f"model.layers.{layer}", maker.config.hidden_size
    ops: list[Operator] = []
    if config.per_layer_embedding is not None:
        width = config.per_layer_embedding.width
        name = f"{prefix}.post_per_layer_input_norm"
        ops += [
            *_linears(maker, layer, prefix, "per_layer_input_gate"),
            maker.elementwise(f"{prefix}.per_layer_gate", layer, "gate", width, width),
            *_linears(maker, layer, prefix, "per_layer_projection"),
            maker.norm(name, layer, d, kept=maker.keeps(layer)),
            maker.elementwise(f"{prefix}.per_layer_sum", layer, "add", d),
        ]
    if config.layer_scalar:
        scalar = Operator(
            name=f"{prefix}.layer_scalar",
            layer=layer,
            op="scale",
            **maker.reads(f"{prefix}.layer_scalar"),
            out_bytes_per_token=maker.width(d),
        )
        ops.append(scalar)
    return ops
