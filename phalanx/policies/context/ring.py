"""Context parallelism in a ring: queries stay, keys and values go round."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.policies.context import ATTENTION, halo_rules, tokens_rule
from phalanx.policy import Exchange, Rule, Spec
from phalanx.registry import Source, register

_SOURCE = Source(
    "Ring Attention with Blockwise Transformers; Striped Attention",
    "arXiv 2310.01889; arXiv 2311.09431",
    "section 3 of both",
)


@register("context", "ring", grain="operator", source=_SOURCE, status="verified")
@dataclass(frozen=True, kw_only=True)
class Ring(Spec):
    """Splits the tokens of every row over `axis`; keys and values travel to the next rank while the
    queries of a rank meet those that it holds.

    `layout` says which rank has which tokens. Under a causal mask contiguous blocks leave the last
    rank (N - 1/2) / (N / 2) times the mean work; "head_tail" and "striped" give all ranks the same,
    of one document per row; "per_document" and "balanced" of packed documents too.

    Symbols: N = degree of `axis`; c = tokens of a rank; g = key and value heads; D = channels of a
    head; e = bytes per element.

    Costs per rank, layer and micro-batch
        forward: N - 1 messages of 2 c g D e, beside the attention of the round before
        backward: keys and values again, (N - 1) 2 c g D e, and their gradients on the way home,
            (N - 1) 2 c g D max(e, 4): a rank's own part waits there
        hidden where c >= (F/B) g/h for full blocks (F FLOP/s, B byte/s, h query heads), twice that
            under a causal mask
        memory: activations, logits and saved tensors divide by N; two blocks of keys and values
        with `halo`, layers with a window of w tokens exchange the keys and values that queries of
            other ranks see, instead: at most 2 g D e for each of 2 (w - 1) tokens under head and
            tail, one all-to-all each way
    Weights, gradients and optimizer state are those of a rank whose data axes are N times as long:
    gradients are summed over `axis` too.

    Source: arXiv 2310.01889, section 3 (ring, overlap); arXiv 2311.09431, section 3 (striped);
    head and tail DOI 10.1145/3695053.3731410, section 4.

    Differences and limits: rows are filled up to a multiple of N (2 N for head and tail). In a
    simulated step a ring is a gather of keys and values and a scatter of their gradients, of the
    same bytes, beside the attention block; work is taken as equal, whatever the layout, and rows as
    one document.

    Raises:
        PlanError: `plan/illegal` for a layout that does not exist.
    """

    axis: str = "cp"
    layout: str = "head_tail"
    halo: bool = True

    def __post_init__(self) -> None:
        tokens_rule(self.layout)  # refuses an unknown one

    def rules(self) -> tuple[Rule, ...]:
        """How tokens lie, and what attention exchanges."""
        gather = {"collective": "all_gather", "at": "before", "of": "keys_values"}
        home = Exchange(collective="reduce_scatter", phase="B", at="after", of="keys_values")
        return (
            tokens_rule(self.layout),
            *halo_rules(self.halo),
            Rule(
                pattern=ATTENTION,
                placement="ring",
                exchanges=(Exchange(phase="F", **gather), Exchange(phase="B", **gather), home),
            ),
        )
