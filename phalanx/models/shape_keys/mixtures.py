"""Mixtures of experts behind grouped-query attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from phalanx.cost.model_shape import FeedForwardShape, LayerShape, ModelShape
from phalanx.errors import JobError, shown
from phalanx.models.shape_keys.dense import SIZES, Form, attention_of, small_params, windows
from phalanx.models.shape_keys.reader import ShapeKeys

EXPERTS = "num_local_experts|num_experts|n_routed_experts|moe_num_experts"
ACTIVE = "num_experts_per_tok|moe_top_k|moe_k|experts_per_token"


class _Mixture(NamedTuple):
    """Where a family differs.

    Attributes:
        width_key: of an expert.
        form: of everything else.
        shared: how shared experts are given: a key of their width, or of their number ("#key");
            "": there are none.
        dense_layers: a key of the number of first layers without experts; "": none.
        dense_default: that number where the key is absent.
        router_bias: the router has a bias or correction per expert.
        expert_bias: every matrix of an expert has a bias.
        shared_gate: the shared expert is gated by a vector of D weights.
    """

    width_key: str
    form: Form = Form()
    shared: str = ""
    dense_layers: str = ""
    dense_default: int = 0
    router_bias: bool = False
    expert_bias: bool = False
    shared_gate: bool = False


_FAMILIES = {
    "mixtral": _Mixture("intermediate_size"),
    "grok-1": _Mixture("intermediate_size", Form(norms=4, tied=True)),
    "dbrx": _Mixture("ffn_hidden_size"),
    "phimoe": _Mixture("intermediate_size", Form(norms=4, final_bias=True)),
    "granitemoe": _Mixture("intermediate_size"),
    "olmoe": _Mixture("intermediate_size", Form(wide_norms=True)),
    "gpt_oss": _Mixture("intermediate_size", Form(attention_bias=True), router_bias=True,
                        expert_bias=True),
    "minimax_m2": _Mixture("intermediate_size", Form(wide_norms=True), router_bias=True),
    "qwen2_moe": _Mixture("moe_intermediate_size", Form(qkv_bias=True),
                          shared="shared_expert_intermediate_size", shared_gate=True),
    "qwen3_moe": _Mixture("moe_intermediate_size", Form(head_norms=True)),
    "qwen3_vl_moe_text": _Mixture("moe_intermediate_size", Form(head_norms=True)),
    "qwen3_omni_moe_text": _Mixture("moe_intermediate_size", Form(head_norms=True)),
    "glm4_moe": _Mixture("moe_intermediate_size", shared="#n_shared_experts",
                         dense_layers="first_k_dense_replace", router_bias=True),
    "ernie4_5_moe": _Mixture("moe_intermediate_size", shared="#moe_num_shared_experts",
                             dense_layers="moe_layer_start_index", router_bias=True),
    "hy_v3": _Mixture("moe_intermediate_size", Form(head_norms=True),
                      shared="#num_shared_experts|n_shared_experts",
                      dense_layers="first_k_dense_replace", dense_default=1, router_bias=True),
}  # fmt: skip


def shared_width(keys: ShapeKeys, named: str, width: int) -> int:
    """Of the experts that every token uses."""
    if named.startswith("#"):
        return keys.size(named[1:], 0, low=0) * width
    return keys.size(named, 0, low=0) if named else 0


def _mixture(keys: ShapeKeys, family: _Mixture) -> ModelShape:
    keys.require(*SIZES, EXPERTS, ACTIVE, family.width_key)
    first = 0
    if family.dense_layers:
        first = keys.size(family.dense_layers, family.dense_default, low=0)
    experts, width = keys.size(EXPERTS), keys.size(family.width_key)
    hidden = keys.size("hidden_size")
    sparse = FeedForwardShape(
        num_experts=experts,
        num_active=keys.size(ACTIVE),
        expert_width=width,
        shared_width=shared_width(keys, family.shared, width),
    )
    form = family.form
    if keys.flag("use_qk_norm") and not form.wide_norms:
        form = form._replace(head_norms=True)
    of_experts = experts if family.router_bias else 0
    of_experts += experts * (2 * width + hidden) if family.expert_bias else 0
    of_experts += hidden if family.shared_gate else 0
    dense = set(range(first)) | _dense_among(keys)
    if dense:
        keys.require("intermediate_size")
    layers = []
    for at, window in enumerate(windows(keys)):
        attention, is_dense = attention_of(keys, window), at in dense
        block = FeedForwardShape(width=keys.size("intermediate_size")) if is_dense else sparse
        small = small_params(keys, attention, form) + (0 if is_dense else of_experts)
        small += attention.num_heads if keys.table["model_type"] == "gpt_oss" else 0  # sinks
        layers.append(
            LayerShape(
                count=1,
                attention=attention,
                feed_forward=block,
                norms=form.norms,
                other_params=small,
            )
        )
    return keys.model(layers, tied=form.tied, other_params=hidden if form.final_bias else 0)


def _dense_among(keys: ShapeKeys) -> set[int]:
    """Layers that Qwen's keys keep without experts: those listed, and all but every n-th."""
    count, every = keys.size("num_hidden_layers"), keys.size("decoder_sparse_step", 1)
    listed = keys.table.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(each) is int for each in listed):
        where, rule = f"{keys.where}: mlp_only_layers", "must be a list of layers"
        raise JobError("job/bad-value", where, shown(listed), rule)
    return {*listed, *(at for at in range(count) if (at + 1) % every)}


def _llama4(keys: ShapeKeys) -> ModelShape:
    """Every n-th layer a mixture with one shared expert, the others dense; three of four layers
    attend within chunks, which are read as windows of that size."""
    keys.require(*SIZES, "num_local_experts", "intermediate_size", "intermediate_size_mlp")
    every = keys.size("interleave_moe_layer_step", 1)
    width = keys.size("intermediate_size")
    sparse = FeedForwardShape(
        num_experts=keys.size("num_local_experts"),
        num_active=keys.size("num_experts_per_tok", 1),
        expert_width=width,
        shared_width=width,
    )
    dense = FeedForwardShape(width=keys.size("intermediate_size_mlp"))
    chunk = keys.size("attention_chunk_size", 8192)
    layers = [
        LayerShape(
            count=1,
            attention=attention_of(keys, 0 if (at + 1) % 4 == 0 else chunk),
            feed_forward=dense if (at + 1) % every else sparse,
        )
        for at in range(keys.size("num_hidden_layers"))
    ]
    return keys.model(layers)


def _reader(family: _Mixture) -> Callable[[ShapeKeys], ModelShape]:
    return lambda keys: _mixture(keys, family)


MIXTURES: dict[str, Callable[[ShapeKeys], ModelShape]] = {
    **{kind: _reader(family) for kind, family in _FAMILIES.items()},
    "llama4_text": _llama4,
}
