"""Single operators of a decoder with inputs of their own, ready to be run and differentiated.

Legend: S tokens of a rank's row, N targets, D model, F feed-forward, V vocabulary, H query and K
key/value heads, C channels; T tokens of a row that ranks share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from phalanx.layout.context_part import ContextPart
from phalanx.layout.token_layout import KeysSeen
from phalanx.models.config import DecoderConfig
from phalanx.models.decoder_layers import Projection, RmsNorm
from phalanx.models.lora import LoraLinear
from phalanx.models.operators import Operator
from phalanx.models.spec import LoraSpec, canonical_tensors
from phalanx.ops.attention import Documents, packed_attention
from phalanx.ops.gate import gated_product
from phalanx.ops.loss import counted_cross_entropy
from phalanx.ops.partial_attention import partial_attention, partial_attention_backward
from phalanx.ops.rope import rope_table, rotate_rows

Call = Callable[[], Tensor]
_SHARED_LAYOUT = "head_tail"  # any layout gives all ranks as many pairs


class Bench(Protocol):
    """What operators are made for.

    Attributes:
        config: a rank's sizes; dtype: as torch has it; lora: adapters, None: all is trained.
        documents: of the rank's row; num_counted: targets in it; positions: of its tokens.
        context_degree, document_tokens: ranks that share a row, and how long its documents are.
    """

    config: DecoderConfig
    dtype: torch.dtype
    lora: LoraSpec | None
    documents: Documents
    num_counted: int
    context_degree: int
    document_tokens: int

    @property
    def positions(self) -> Tensor: ...


def _rows(bench: Bench, *channels: int) -> Tensor:
    """What an operator reads. Its gradient is gone at once, as in a model, where the operator
    before uses it up."""
    shape = (bench.documents.bounds[-1], *channels)
    return _forgetful(torch.randn(shape, dtype=bench.dtype).requires_grad_())


def _forgetful(leaf: Tensor) -> Tensor:
    """With gradients that are gone at once: a leaf would add those of all passes up, a third of a
    small backward pass; what a step adds up is counted by itself (`cost.step_sums`)."""
    leaf.register_post_accumulate_grad_hook(_forget)
    return leaf


def _forget(leaf: Tensor) -> None:
    leaf.grad = None


def _trained(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            _forgetful(parameter)


def _linear(bench: Bench, op: Operator) -> Call:
    num_out, num_in = canonical_tensors(bench.config)[op.tensors[0]].shape
    module = Projection(num_in, num_out, dtype=bench.dtype)
    if bench.lora is not None:
        module.requires_grad_(False)
        if op.num_trained:
            module = LoraLinear(module, op.name, bench.lora, torch.float32)
            nn.init.normal_(module.lora_A.weight)
            nn.init.normal_(module.lora_B.weight)
    _trained(module)
    x_SD = _rows(bench, num_in)
    return lambda: module(x_SD)


def _norm(bench: Bench, op: Operator) -> Call:
    per_head = op.name.endswith(("q_norm", "k_norm", "v_norm"))
    width = _channels(bench, op)
    num_channels = op.num_params or (
        bench.config.attention(op.layer).head_dim if per_head else width
    )
    module = RmsNorm(
        num_channels, bench.config.norm_eps, has_weight=bool(op.tensors), dtype=bench.dtype
    )
    module.requires_grad_(bench.lora is None)
    _trained(module)
    if not op.name.endswith(("q_norm", "k_norm")):
        x = _rows(bench, width // num_channels, num_channels)
        return lambda: module(x)
    x_SHC = _rows(bench, width // num_channels, num_channels)
    rope = rope_table(bench.positions, num_channels, 10_000.0, 1.0)
    return lambda: module(x_SHC, rope)


def _rotate(bench: Bench, op: Operator) -> Call:
    head_dim = bench.config.attention(op.layer).head_dim
    x_SHC = _rows(bench, _channels(bench, op) // head_dim, head_dim)
    cos_S1c, sin_S1c = rope_table(bench.positions, head_dim, 10_000.0, 1.0)
    return lambda: rotate_rows(x_SHC, cos_S1c, sin_S1c)


def _channels(bench: Bench, op: Operator) -> int:
    """Of its result, all heads together."""
    return round(op.out_bytes_per_token) // bench.dtype.itemsize


def evenly(num_tokens: int, document_tokens: int) -> Documents:
    count = max(1, round(num_tokens / document_tokens))
    return Documents.from_starts([num_tokens * at // count for at in range(count)], num_tokens)


def _attention(bench: Bench, op: Operator) -> Call:
    if bench.context_degree > 1:
        return _shared_attention(bench, op)
    kind = bench.config.attention(op.layer)
    q_SHC = _rows(bench, kind.num_heads, kind.head_dim)
    k_SKC, v_SKC = (_rows(bench, kind.num_kv_heads, kind.head_dim) for _ in range(2))
    documents = bench.documents
    options = {"scale": bench.config.query_scale, "window": kind.window}
    return lambda: packed_attention(q_SHC, k_SKC, v_SKC, documents, **options)


def _shared_attention(bench: Bench, op: Operator) -> Call:
    """A rank's queries on the keys of the whole row, which are there already."""
    kind, degree = bench.config.attention(op.layer), bench.context_degree
    own = -(-bench.documents.bounds[-1] // 2) * 2
    row = evenly(own * degree, bench.document_tokens)
    starts = row.bounds[:-1]
    part = ContextPart.of_row(_SHARED_LAYOUT, 0, degree, starts, own * degree)
    keys = (own * degree, kind.num_kv_heads)
    q_SHC, k_TKC, v_TKC = (
        torch.randn(*shape, kind.head_dim, dtype=bench.dtype).requires_grad_()
        for shape in ((own, kind.num_heads), keys, keys)
    )
    seen, scale = part.row_seen(kind.window), bench.config.query_scale
    return lambda: _PartOfRow.apply(q_SHC, k_TKC, v_TKC, seen, scale)


class _PartOfRow(torch.autograd.Function):
    """Partial attention with its gradient."""

    @staticmethod
    def forward(ctx, q_SHC: Tensor, k_TKC: Tensor, v_TKC: Tensor, seen: KeysSeen, scale: float):
        out_SHC, lse_SH = partial_attention(q_SHC, k_TKC, v_TKC, seen, scale=scale)
        ctx.save_for_backward(q_SHC, k_TKC, v_TKC, out_SHC, lse_SH)
        ctx.seen, ctx.scale = seen, scale
        return out_SHC.to(q_SHC.dtype)

    @staticmethod
    def backward(ctx, grad_SHC: Tensor):
        q_SHC, k_TKC, v_TKC, out_SHC, lse_SH = ctx.saved_tensors
        grads = partial_attention_backward(
            grad_SHC, q_SHC, k_TKC, v_TKC, out_SHC, lse_SH, ctx.seen, scale=ctx.scale
        )
        return (*(grad.to(q_SHC.dtype) for grad in grads), None, None)


def _gate(bench: Bench, op: Operator) -> Call:
    a_SF, b_SF = (_rows(bench, _channels(bench, op)) for _ in range(2))
    return lambda: gated_product(a_SF, b_SF, bench.config.activation)


def _add(bench: Bench, op: Operator) -> Call:
    a_SD, b_SD = (_rows(bench, _channels(bench, op)) for _ in range(2))
    return lambda: a_SD + b_SD


def _scale(bench: Bench, op: Operator) -> Call:
    x_SD, factor = _rows(bench, _channels(bench, op)), torch.ones(1, dtype=bench.dtype)
    return lambda: x_SD * factor


def _embedding(bench: Bench, op: Operator) -> Call:
    shape = canonical_tensors(bench.config)[op.tensors[0]].shape
    table_VD = torch.zeros(shape, dtype=bench.dtype)
    if bench.lora is None:
        _forgetful(table_VD.requires_grad_())
    tokens_S = torch.randint(shape[0], (bench.documents.bounds[-1],))
    return lambda: nn.functional.embedding(tokens_S, table_VD) * 2.0


def _rope(bench: Bench, op: Operator) -> Call:
    positions_S = bench.positions
    head_dim = bench.config.kinds[0].head_dim
    return lambda: rope_table(positions_S, head_dim, 10_000.0, 1.0)[0]


def _head(bench: Bench, op: Operator) -> Call:
    config, count = bench.config, bench.num_counted
    # logits of order one, as a model's: exponentials of wider ones are denormal and slow
    scale = config.hidden_size**-0.5
    shape = (config.vocab_size, config.hidden_size)
    head_VD = torch.empty(shape, dtype=bench.dtype).normal_(std=scale)
    if bench.lora is None:
        _forgetful(head_VD.requires_grad_())
    hidden_SD = _rows(bench, config.hidden_size)
    counted_N = torch.randperm(bench.documents.bounds[-1])[:count]
    targets_N = torch.randint(config.vocab_size, (count,))
    options = {"num_counted_global": count, "soft_cap": config.logit_soft_cap}
    return lambda: counted_cross_entropy(hidden_SD, head_VD, counted_N, targets_N, **options)


CASES: dict[str, Callable[[Bench, Operator], Call]] = {
    "linear": _linear,
    "norm": _norm,
    "attention": _attention,
    "gate": _gate,
    "add": _add,
    "scale": _scale,
    "rotate": _rotate,
    "embedding": _embedding,
    "rope": _rope,
    "head": _head,
}
