"""A small transformer with canonical names, whole or a pipeline stage, and what it is in numbers.

Legend: S tokens of one document, D model, H heads, K key/value heads, C channels per head,
F feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.workload import Block, Module, StepWork, Unit

WIDTH, HEADS, KV_HEADS, CHANNELS, HIDDEN, VOCABULARY = 10, 4, 2, 3, 14, 13
NUM_LAYERS, IGNORED = 4, -100


def linear(num_in: int, num_out: int) -> nn.Linear:
    return nn.Linear(num_in, num_out, bias=False)


class Attention(nn.Module):
    """Grouped-query attention; heads are counted from the projections."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = linear(WIDTH, HEADS * CHANNELS)
        self.k_proj = linear(WIDTH, KV_HEADS * CHANNELS)
        self.v_proj = linear(WIDTH, KV_HEADS * CHANNELS)
        self.q_norm = nn.RMSNorm(CHANNELS)
        self.o_proj = linear(HEADS * CHANNELS, WIDTH)

    def forward(self, x_SD: Tensor) -> Tensor:
        q_HSC, k_KSC, v_KSC = (
            proj(x_SD).unflatten(-1, (-1, CHANNELS)).transpose(0, 1)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out_HSC = F.scaled_dot_product_attention(
            self.q_norm(q_HSC)[None], k_KSC[None], v_KSC[None], is_causal=True, enable_gqa=True
        )[0]
        return self.o_proj(out_HSC.transpose(0, 1).flatten(-2))


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = linear(WIDTH, HIDDEN)
        self.up_proj = linear(WIDTH, HIDDEN)
        self.down_proj = linear(HIDDEN, WIDTH)

    def forward(self, x_SD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_SD)) * self.up_proj(x_SD))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(WIDTH)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(WIDTH)
        self.mlp = FeedForward()

    def forward(self, x_SD: Tensor) -> Tensor:
        x_SD = x_SD + self.self_attn(self.input_layernorm(x_SD))
        return x_SD + self.mlp(self.post_attention_layernorm(x_SD))


class Transformer(nn.Module):
    """The stage that holds `layers`; the first embeds tokens, the last gives logits."""

    def __init__(self, layers: range = range(NUM_LAYERS)) -> None:
        super().__init__()
        if layers.start == 0:
            self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(at): Layer() for at in layers})
        if layers.stop == NUM_LAYERS:
            self.norm = nn.RMSNorm(WIDTH)
            self.lm_head = linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [S] or hidden states [S, D] to hidden states or logits [S, V]."""
        x_SD = self.embed_tokens(x) if hasattr(self, "embed_tokens") else x
        for layer in self.layers.values():
            x_SD = layer(x_SD)
        return self.lm_head(self.norm(x_SD)) if hasattr(self, "norm") else x_SD


def make_stage(layers: range, dtype: torch.dtype) -> Transformer:
    """A stage whose values depend on names only, so that every rank and cut has the same."""
    stage = Transformer(layers).to(dtype)
    for name, parameter in stage.named_parameters():
        draw = torch.Generator().manual_seed(sum(name.encode()) * 7919 + len(name))
        value = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        parameter.data.copy_(1 + 0.1 * value if "norm" in name else 0.4 * value)
    return stage


# ---- data ----------------------------------------------------------------------------------------


class Item(NamedTuple):
    """One micro-batch: a document and the token that follows each of its tokens."""

    tokens_S: Tensor
    targets_S: Tensor


def make_items(replica: int, item_tokens: Sequence[int]) -> list[Item]:
    """Micro-batches of a replica."""
    draw = torch.Generator().manual_seed(100 + replica)
    rows = [torch.randint(0, VOCABULARY, (n + 1,), generator=draw) for n in item_tokens]
    return [Item(row[:-1], row[1:]) for row in rows]


def split_item(item: Item, num_parts: int, part: int) -> Item:
    """A rank's part of the tokens; padding goes to the end and is not counted."""
    missing = -len(item.tokens_S) % num_parts
    tokens_S = F.pad(item.tokens_S, (0, missing))
    targets_S = F.pad(item.targets_S, (0, missing), value=IGNORED)
    return Item(tokens_S.chunk(num_parts)[part], targets_S.chunk(num_parts)[part])


def token_loss(logits_SV: Tensor, targets_S: Tensor, *, num_counted_global: int) -> Tensor:
    """Sum over the tokens of one micro-batch, divided by the global number of them."""
    total = F.cross_entropy(logits_SV, targets_S, ignore_index=IGNORED, reduction="sum")
    return total / num_counted_global


def reference(
    num_replicas: int, item_tokens: Sequence[int], dtype: torch.dtype
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process."""
    model = make_stage(range(NUM_LAYERS), dtype)
    num_counted, total = num_replicas * sum(item_tokens), 0.0
    for replica in range(num_replicas):
        for item in make_items(replica, item_tokens):
            loss = token_loss(model(item.tokens_S), item.targets_S, num_counted_global=num_counted)
            loss.backward()
            total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


# ---- in numbers ----------------------------------------------------------------------------------


def work_of(item_tokens: Sequence[int], itemsize: int, *, is_piped: bool) -> StepWork:
    """Units as FSDP sees them: without a pipeline, what no layer holds is one unit, gathered first;
    with one, the first stage holds the embedding and the last one norm and head.
    """
    embedding = _block("embed_tokens", {"embed_tokens": (VOCABULARY, WIDTH)}, itemsize)
    head = _block("norm", {"norm": (WIDTH,), "lm_head": (VOCABULARY, WIDTH)}, itemsize)
    layers = [_layer(at, itemsize) for at in range(NUM_LAYERS)]
    if is_piped:
        first, last = Unit(name="embed", blocks=(embedding,)), Unit(name="head", blocks=(head,))
        units = (first, *layers, last)
    else:
        units = (Unit(name="root", blocks=(embedding, head)), *layers)
    return StepWork(
        units=units, item_tokens=tuple(item_tokens), param_bytes=itemsize, grad_bytes=itemsize
    )


def _layer(at: int, itemsize: int) -> Unit:
    d, q, kv = WIDTH, HEADS * CHANNELS, KV_HEADS * CHANNELS
    attention = {
        "input_layernorm": (d,), "q_proj": (q, d), "k_proj": (kv, d), "v_proj": (kv, d),
        "q_norm": (CHANNELS,), "o_proj": (d, q),
    }  # fmt: skip
    mlp = {
        "post_attention_layernorm": (d,), "gate_proj": (HIDDEN, d), "up_proj": (HIDDEN, d),
        "down_proj": (d, HIDDEN),
    }  # fmt: skip
    name = f"layers.{at}"
    blocks = (
        _block(f"{name}.self_attn", attention, itemsize, 1.0),
        _block(f"{name}.mlp", mlp, itemsize, 1.0),
    )
    return Unit(name=name, blocks=blocks)


def _block(
    name: str, shapes: dict[str, tuple[int, ...]], itemsize: int, flops: float = 0.0
) -> Block:
    modules = tuple(Module(module, shape) for module, shape in shapes.items())
    width = float(WIDTH * itemsize)
    return Block(
        name=name, op="block", modules=modules, flops_per_token=flops, out_bytes_per_token=width
    )
