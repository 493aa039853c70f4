"""Context parallelism by gathered keys and values, as Llama 3 was trained."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.policies.context import ATTENTION, halo_rules, tokens_rule
from phalanx.policy import DTYPES, Exchange, Rule, Spec
from phalanx.registry import Source, register

_SOURCE = Source(
    "Scaling Llama 3 Training with Efficient Parallelism Strategies",
    "DOI 10.1145/3695053.3731410",
    "section 4",
)


@register("context", "all_gather", grain="operator", source=_SOURCE, status="verified")
@dataclass(frozen=True, kw_only=True)
class AllGather(Spec):
    """Splits the tokens of every row over `axis`; keys and values of the whole row are gathered
    before attention, and their gradients scattered behind its backward pass.

    One exchange each way instead of a ring's N - 1, and any mask: a rank computes its own queries
    against the row as it is. Attention then needs the keys and values of all S tokens.

    Symbols: N = degree of `axis`; S = tokens of a row; g = key and value heads; D = channels of a
    head; e = bytes per element.

    Costs per rank, layer and micro-batch
        forward: one all-gather, 2 S g D e (N-1)/N received
        backward: one reduce-scatter, 2 S g D max(e, 4) (N-1)/N sent, or in `reduce_dtype`
        memory: activations, logits and saved tensors divide by N, but for 2 S g D e of every layer
            that is not recomputed: keys and values are not gathered twice
        with `halo`, layers with a window of w tokens exchange the keys and values that queries of
            other ranks see, instead: at most 2 g D e for each of 2 (w - 1) tokens under head and
            tail, one all-to-all each way
    Weights, gradients and optimizer state are those of a rank whose data axes are N times as long:
    gradients are summed over `axis` too.

    Source: DOI 10.1145/3695053.3731410, section 4 (layout of heads and tails, documents' mask);
    arXiv 2407.21783, section 3.3.2.

    Differences and limits: the exchange is exposed, as there. Rows are filled up to a multiple of
    2 N (N for other layouts). A simulated step takes work as equal, whatever the layout, and rows
    as one document.

    Raises:
        PlanError: `plan/illegal` for a layout that does not exist.
    """

    axis: str = "cp"
    layout: str = "head_tail"
    halo: bool = True
    reduce_dtype: str = field(default="", metadata={"choices": DTYPES})

    def __post_init__(self) -> None:
        tokens_rule(self.layout)  # refuses an unknown one

    def rules(self) -> tuple[Rule, ...]:
        """How tokens lie, and what attention exchanges."""
        gather = Exchange(collective="all_gather", phase="F", at="before", of="keys_values")
        scatter = Exchange(collective="reduce_scatter", phase="B", at="after", of="keys_values")
        return (
            tokens_rule(self.layout),
            *halo_rules(self.halo),
            Rule(
                pattern=ATTENTION,
                placement="all_gather",
                exchanges=(gather, scatter),
                reduce_dtype=self.reduce_dtype,
            ),
        )
