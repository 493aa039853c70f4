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
_EMBEDDING, _HEAD = "*embed_tokens*", "*lm_head"
_PER_HEAD = ("*.q_norm", "*.k_norm")  # whole on every rank, which sees its own heads only
_SUM = Exchange(collective="all_reduce", phase="B", at="after", of="grads", when="last")


@register("tensor", "megatron", grain="operator", source=_SOURCE, status="verified")
@dataclass(frozen=True, kw_only=True)
class Megatron(Spec):
    """Cuts each block's first products by output column and its last by input row.

    Attention and MLP then need one exchange per pass instead of one per product. With
    `sequence_parallel` the tokens between blocks are split over the same ranks: each all-reduce
    becomes an all-gather before and a reduce-scatter after, of the same ring volume, and
    (`gather_twice`) the gathered input is not kept but gathered again for the weight gradient.
    With `overlap` the sum of a block's input gradient runs beside the gradients of its weights.

    Symbols: t = degree of `axis`; b s h = tokens x width of a micro-batch (payload_bytes of one
    exchange); L = layers.

    Costs per layer and micro-batch: 4 all-reduces of b s h (2 forward, 2 backward), or with
    sequence parallelism 6 all-gathers (4 without `gather_twice`) and 4 reduce-scatters; ring bytes
    sent per device of the former 8 b s h (t-1)/t elements. Products, weights and their gradients
    divide by t; with sequence parallelism so do stored activations and messages between stages.
    Per micro-batch with `vocabulary_parallel`: the embedding's output is summed (one exchange), the
    head reads whole rows and the gradient of these is summed (one all-reduce, with sequence
    parallelism after an all-gather); embedding, head and logits divide by t, and the loss exchanges
    three numbers per row instead of V logits. Without it, embedding and head are whole on every
    rank and exchange nothing. Per step: one all-reduce of the gradients that each rank has a part
    of, of norms per head, or with sequence parallelism of every module that is not cut.

    Source: Megatron-LM, arXiv 1909.08053, section 3 (f and g, embedding and loss); sequence
    parallelism and the second gather, arXiv 2205.05198, section 4.2.2.

    Differences and limits: the vocabulary is cut into uneven parts instead of being padded to a
    multiple of 128 t. t must divide the query heads and the feed-forward width; where it does not
    divide the key and value heads, every rank keeps their projections whole, uses the rows of its
    own query heads and sums their gradients with the other partial ones (`layout.tensor_split`),
    which the prices here do not know: they divide these too. A tied head's gradient and rows that
    do not count in the loss travel less than priced (the loss exchanges counted rows only). With
    sequence parallelism and a whole vocabulary, embedding and head work on a rank's own tokens,
    which the trainer refuses. Tokens are padded to a multiple of t. `overlap` is not priced, and
    does nothing for frozen weights. Where whole layers are computed again (recompute = "full"),
    they gather again anyway, and `gather_twice` adds nothing.
    """

    axis: str = "tp"
    sequence_parallel: bool = False
    gather_twice: bool = True
    vocabulary_parallel: bool = True
    overlap: bool = False

    def rules(self) -> tuple[Rule, ...]:
        """Columns and rows of the products, exchanges around attention and MLP blocks, and what
        has a part of its gradient on each rank."""
        partial = ("*",) if self.sequence_parallel else _PER_HEAD
        exchanges = self._sequence_exchanges() if self.sequence_parallel else self._reductions()
        return (
            *(Rule(pattern=f"*.{name}", placement="column", dim=0) for name in _COLUMN),
            *(Rule(pattern=f"*.{name}", placement="row", dim=1) for name in _ROW),
            *(
                Rule(pattern=block, placement="block", exchanges=exchanges, overlap=self.overlap)
                for block in _BLOCKS
            ),
            *(self._vocabulary() if self.vocabulary_parallel else ()),
            *(Rule(pattern=name, placement="partial", exchanges=(_SUM,)) for name in partial),
        )

    def _vocabulary(self) -> tuple[Rule, Rule]:
        """The embedding's output is summed; the head's input is whole, its gradient summed."""
        splits = self.sequence_parallel
        out = "reduce_scatter" if splits else "all_reduce"
        embedding = [Exchange(collective=out, phase="F", at="after", of="activations")]
        head = [Exchange(collective="all_reduce", phase="B", at="after", of="activations")]
        if splits:
            gather = Exchange(collective="all_gather", phase="F", at="before", of="activations")
            again = Exchange(collective="all_gather", phase="B", at="before", of="activations")
            embedding, head = [*embedding, again], [gather, *head]
        return (
            Rule(pattern=_EMBEDDING, placement="vocab", dim=0, exchanges=tuple(embedding)),
            Rule(pattern=_HEAD, placement="vocab", dim=0, exchanges=tuple(head)),
        )

    def _reductions(self) -> tuple[Exchange, ...]:
        return tuple(
            Exchange(collective="all_reduce", phase=phase, at="after", of="activations")
            for phase in ("F", "B")
        )

    def _sequence_exchanges(self) -> tuple[Exchange, ...]:
        gather, scatter = "all_gather", "reduce_scatter"
        again = Exchange(collective=gather, phase="B", at="before", of="inputs")
        return (
            Exchange(collective=gather, phase="F", at="before", of="activations"),
            Exchange(collective=scatter, phase="F", at="after", of="activations"),
            Exchange(collective=gather, phase="B", at="before", of="activations"),
            *((again,) if self.gather_twice else ()),
            Exchange(collective=scatter, phase="B", at="after", of="activations"),
        )
