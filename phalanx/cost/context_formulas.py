"""Closed forms of context parallelism: work, bytes and the gain of a balanced layout.

They take numbers or arrays. Symbols: N ranks, S tokens of a row, c = S / N tokens of a rank, h
query heads, g key and value heads, D channels of a head, e bytes of an element; a pair is one query
that sees one key.

Sources
    [R] Ring Attention, arXiv 2310.01889; [S] Striped Attention, arXiv 2311.09431, section 3 and
    appendix A (theoretical speed-up); [L] DOI 10.1145/3695053.3731410, section 4 (keys and values
    gathered); [U] DeepSpeed Ulysses, arXiv 2309.14509, section 3.
"""

from __future__ import annotations

from typing import Any


def contiguous_pairs(ranks: int, tokens: Any, rank: Any) -> Any:
    """Pairs of rank r under a causal mask, contiguous blocks: r c^2 + c (c + 1) / 2."""
    own = tokens / ranks
    return rank * own * own + own * (own + 1) / 2


def striped_pairs(ranks: int, tokens: Any, rank: Any) -> Any:
    """Pairs of rank r where token t is on rank t mod N: N c^2 / 2 + (2r + 2 - N) c / 2 [S]."""
    own = tokens / ranks
    return ranks * own * own / 2 + (2 * rank + 2 - ranks) * own / 2


def head_tail_pairs(ranks: int, tokens: Any) -> Any:
    """Pairs of every rank with chunks r and 2N - 1 - r of 2N: all causal pairs over N [L]."""
    return tokens * (tokens + 1) / 2 / ranks


def ring_bytes(ranks: Any, tokens: Any, kv_heads: Any, channels: Any, itemsize: Any) -> Any:
    """Sent per rank and layer in a forward pass, (N - 1) 2 c g D e [R].

    What a rank receives from an all-gather of keys and values is the same [L].
    """
    return (ranks - 1) * 2 * (tokens / ranks) * kv_heads * channels * itemsize


def ring_backward_bytes(
    ranks: Any, tokens: Any, kv_heads: Any, channels: Any, itemsize: Any, grad_itemsize: Any = 4
) -> Any:
    """Sent per rank and layer in a backward pass: keys and values go round again, and their
    gradients in `grad_itemsize` bytes all the way home, N hops [R]. The ring of `ops` makes N - 1
    of them: what a rank adds to its own gradients waits at home."""
    one = 2 * (tokens / ranks) * kv_heads * channels
    return (ranks - 1) * one * itemsize + ranks * one * grad_itemsize


def ulysses_bytes(
    ranks: Any, tokens: Any, heads: Any, kv_heads: Any, channels: Any, itemsize: Any
) -> Any:
    """Sent per rank and layer in a forward pass, (2h + 2g) c D e (N - 1) / N [U]."""
    own = tokens / ranks
    return (2 * heads + 2 * kv_heads) * own * channels * itemsize * (ranks - 1) / ranks


def gpt_linear_flops(layers: Any, width: Any, ffn_width: Any, vocabulary: Any) -> Any:
    """Forward FLOPs of a token outside attention, 2 L (4 d^2 + 2 d f) + 2 d V [S].

    Two matrices of the feed-forward are counted, as the paper's printed values need.
    """
    return 2 * layers * (4 * width**2 + 2 * width * ffn_width) + 2 * width * vocabulary


def striped_speedup(
    ranks: Any,
    tokens: Any,
    *,
    layers: Any,
    width: Any,
    linear_flops: Any,
    attention_weight: float = 1.0,
) -> Any:
    """Most that a balanced layout gains over contiguous blocks in a ring [S, appendix A].

    The slowest rank decides every round: (N - 1/2) c^2 pairs against N c^2 / 2.

    Args:
        linear_flops: of a token (`gpt_linear_flops`).
        attention_weight: seconds of an attention FLOP over those of another (2 where attention
            runs in TF32 beside bf16).
    """
    own = tokens / ranks
    pair_flops = 4 * width * layers * attention_weight
    ring = linear_flops * own + pair_flops * (ranks - 0.5) * own**2
    return ring / (linear_flops * own + pair_flops * ranks / 2 * own**2)
