"""Plain data parallelism: every rank holds everything, gradients are summed."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.policy import DTYPES, Exchange, Rule, Spec
from phalanx.registry import Source, register

_SOURCE = Source(
    "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
    "arXiv 2006.15704",
    "section 3.2",
)


@register("data", "replicate", grain="unit", source=_SOURCE, status="verified")
@dataclass(frozen=True, kw_only=True)
class Replicate(Spec):
    """Keeps whole parameters on every rank of `axis` and sums gradients unit by unit.

    After `fsdp` in the same plan it is the outer half of hybrid sharding (HSDP): the shards are
    summed across replicas, on the axis where bytes are dear.

    Symbols: R = degree of `axis`, times that of the axes that split a row's tokens unless an
    earlier policy shards over these; F = degree over which an earlier policy has cut the gradients
    (1: none); N = units, root included; Psi = elements of the model; B = bytes per element in
    reduction (`reduce_dtype`).

    Costs per rank and step
        collectives: N all-reduces, after the last micro-batch
        bytes sent (ring): 2 B Psi/F (R-1)/R
        memory: whole parameters, gradients and optimizer state of what an earlier policy left

    Source: arXiv 2006.15704, section 3.2 (overlap of reduction and backward pass); hybrid sharding
    arXiv 2304.11277, section 3.2.2.

    Differences and limits: buckets are units instead of a byte size, so that they mean the same in
    every world; gradients are summed, not averaged (the loss is divided by the global number of
    counted tokens); no reduction between micro-batches.
    """

    axis: str = "replicate"
    units: str = "*layers.*"
    reduce_dtype: str = field(default="", metadata={"choices": DTYPES})

    def rules(self) -> tuple[Rule, ...]:
        """The same reduction for units and for the rest."""
        return (self._rule(self.units), self._rule("*"))

    def _rule(self, pattern: str) -> Rule:
        reduction = Exchange(
            collective="all_reduce", phase="B", at="after", of="grads", when="last"
        )
        return Rule(
            pattern=pattern,
            placement="replicate",
            exchanges=(reduction,),
            reduce_dtype=self.reduce_dtype,
        )
