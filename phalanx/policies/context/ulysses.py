"""Context parallelism by heads: tokens are exchanged for heads around attention."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.policies.context import ATTENTION, tokens_rule
from phalanx.policy import Exchange, Rule, Spec
from phalanx.registry import Source, register

_SOURCE = Source(
    "DeepSpeed Ulysses: System Optimizations for Extreme Long Sequence Transformer Models",
    "arXiv 2309.14509",
    "section 3",
)


@register("context", "ulysses", grain="operator", source=_SOURCE)
@dataclass(frozen=True, kw_only=True)
class Ulysses(Spec):
    """Splits the tokens of every row over `axis`; for attention each rank gets all tokens of its
    part of the heads, and its tokens of all heads back.

    Symbols: N = degree of `axis`; c = tokens of a rank; h, g = query heads, key and value heads;
    D = channels of a head; e = bytes per element.

    Costs per rank, layer and micro-batch
        forward: 2 all-to-alls (queries, keys and values; outputs back), (2h + 2g) c D e (N-1)/N
            sent
        backward: the same, of gradients
        where N does not divide g, key and value heads are sent as often as ranks need them:
            2 lcm(g, N) in place of 2 g
        memory: activations, logits and saved tensors divide by N
    Weights, gradients and optimizer state are those of a rank whose data axes are N times as long:
    gradients are summed over `axis` too.

    Source: arXiv 2309.14509, section 3 (exchange, bytes).

    With `ring` or `all_gather` on a second axis, the ranks of this one hold one place of its layout
    between them, and exchange heads within it (USP, arXiv 2405.07719).

    Differences and limits: N must divide the query heads of a rank (after tensor parallelism);
    work is equal on all ranks whatever the layout, so tokens lie in contiguous blocks unless
    `layout` says otherwise.

    Raises:
        PlanError: `plan/illegal` for a layout that does not exist.
    """

    axis: str = "cp"
    layout: str = "contiguous"

    def __post_init__(self) -> None:
        tokens_rule(self.layout)  # refuses an unknown one

    def rules(self) -> tuple[Rule, ...]:
        """How tokens lie, and what attention exchanges."""
        exchanges = [
            Exchange(collective="all_to_all", phase=phase, at=at, of=of)
            for phase, at, of in (
                ("F", "before", "heads"),
                ("F", "after", "queries"),
                ("B", "before", "queries"),
                ("B", "after", "heads"),
            )
        ]
        return (
            tokens_rule(self.layout),
            Rule(pattern=ATTENTION, placement="all_to_all", exchanges=tuple(exchanges)),
        )
