"""Megatron tensor parallelism, with or without sequence parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.policy import Exchange, Rule, Spec
from phalanx.registry import Source, register

_SOURCE = Source(
    "Megatron-LM; Reducing Activation Recomputation in Large Transformer Models",
    "arXiv 1909.08053; arXiv 2205.05198",
    "section 3 of both",
)
_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROW = ("o_proj", "down_proj")
_BLOCKS = ("*.self_attn", "*.mlp")


@register("tensor", "megatron", grain="operator", source=_SOURCE)
@dataclass(frozen=True, kw_only=True)
class Megatron(Spec):
    """Cuts each block's first products by output column and its last by input row.

    Attention and MLP then need one exchange per pass instead of one per product. With
    `sequence_parallel` the tokens between blocks are split over the same ranks: each all-reduce
    becomes an all-gather before and a reduce-scatter after, of the same ring volume, and the
    gathered input is not kept but gathered again for the weight gradient.

    Symbols: t = degree of `axis`; b s h = tokens x width of a micro-batch (payload_bytes of one
    exchange); L = layers.

    Costs per layer and micro-batch: 4 all-reduces of b s h (2 forward, 2 backward), or with
    sequence parallelism 6 all-gathers and 4 reduce-scatters; ring bytes sent per device of the
    former 8 b s h (t-1)/t elements. Products, weights and their gradients divide by t.

    Source: Megatron-LM, arXiv 1909.08053, section 3 (f and g); sequence parallelism and the second
    gather, arXiv 2205.05198, section 4.2.2.

    Differences and limits: embedding and head stay whole (no vocabulary-parallel loss); t must
    divide the query heads and the feed-forward width; overlap of exchange and product is not
    modelled; norms are replicated, their gradients are summed over `axis` by the binder with
    sequence parallelism.
    """

    axis: str = "tp"
    sequence_parallel: bool = False

    def rules(self) -> tuple[Rule, ...]:
        """Columns and rows of the products; exchanges around attention and MLP blocks."""
        exchanges = self._sequence_exchanges() if self.sequence_parallel else self._reductions()
        return (
            *(Rule(pattern=f"*.{name}", placement="column", dim=0) for name in _COLUMN),
            *(Rule(pattern=f"*.{name}", placement="row", dim=1) for name in _ROW),
            *(Rule(pattern=block, placement="block", exchanges=exchanges) for block in _BLOCKS),
        )

    def _reductions(self) -> tuple[Exchange, ...]:
        return tuple(
            Exchange(collective="all_reduce", phase=phase, at="after", of="activations")
            for phase in ("F", "B")
        )

    def _sequence_exchanges(self) -> tuple[Exchange, ...]:
        gather, scatter = "all_gather", "reduce_scatter"
        return (
            Exchange(collective=gather, phase="F", at="before", of="activations"),
            Exchange(collective=scatter, phase="F", at="after", of="activations"),
            Exchange(collective=gather, phase="B", at="before", of="activations"),
            Exchange(collective=gather, phase="B", at="before", of="activations"),
            Exchange(collective=scatter, phase="B", at="after", of="activations"),
        )
