"""ZeRO stages 1 and 2: whole weights on every rank, their update cut over the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.errors import PlanError
from phalanx.policy import DTYPES, Exchange, Rule, Spec
from phalanx.registry import Source, register

_SOURCE = Source(
    "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    "arXiv 1910.02054",
    "sections 5 and 7",
)


@register("data", "zero", grain="unit", source=_SOURCE, status="verified")
@dataclass(frozen=True, kw_only=True)
class Zero(Spec):
    """Keeps whole weights on every rank of `axis`; each updates its rows and sends them round.

    Stage 1 cuts optimizer state: whole gradients add up over the micro-batches, a unit's are
    reduced to shards as soon as its last ones exist, each rank updates its rows, and the rows are
    gathered. Stage 2 cuts gradients too: they are reduced after every micro-batch, and in a
    pipeline with several stages per rank after each row of micro-batches that a stage takes before
    another one has its turn; only shards are kept. Weights are never gathered in between, so both
    suit pipelines, where sharded weights would be gathered at every visit of a stage.

    Symbols: F = degree of `axis`, times that of the axes that split a row's tokens (whose ranks use
    the same weights); N = units, root included; Psi = elements of the model; K = bytes per element
    of weights, R = in reduction (`reduce_dtype`), M = of master weights; r = rounds of a step (1 at
    stage 1).

    Costs per rank and step
        collectives: r N reduce-scatters, N all-gathers
        bytes sent: r R Psi (F-1)/F + K Psi (F-1)/F; with R = K and r = 1 as an all-reduce
        memory: K Psi weights + K Psi gradients (R Psi/F at stage 2) + (8 + M) Psi/F AdamW (fp32),
            less M Psi/F where weights are kept in the master dtype; of two units a second
            copy of the gradients while they are reduced
        every Psi counts each parameter's dim 0 padded to a multiple of F
        in 16-bit weights and gradients and fp32 masters: 4 + 12/F and 2 + 14/F bytes per element

    Source: arXiv 1910.02054, sections 5.1 and 5.2 (stages), 7.2 (volume 2 Psi); rounds: Llama 3,
    arXiv 2407.21783, section 3.3.2.

    Differences and limits: rows of each parameter instead of flat partitions, so that checkpoints
    of any layout read them; buckets are units; gradients are summed, not averaged (the loss is
    divided by the global number of counted tokens); the gather follows the update at once instead
    of overlapping with the next forward pass; stage 3 is `fsdp`.

    Raises:
        PlanError: `plan/illegal` for another stage.
    """

    axis: str = "shard"
    stage: int = 1
    units: str = "*layers.*"
    reduce_dtype: str = field(default="", metadata={"choices": DTYPES})

    def __post_init__(self) -> None:
        if self.stage not in (1, 2):
            rule = "keeps whole weights; the data policy fsdp shards them (stage 3)"
            where = "policy.data.zero.stage"
            raise PlanError("plan/illegal", where, self.stage, rule, legal=[1, 2])

    def rules(self) -> tuple[Rule, ...]:
        """The same for units and for the rest."""
        return (self._rule(self.units), self._rule("*"))

    def _rule(self, pattern: str) -> Rule:
        reduction = Exchange(
            collective="reduce_scatter",
            phase="B",
            at="after",
            of="grads",
            when="round" if self.stage == 2 else "last",
        )
        gather = Exchange(collective="all_gather", phase="O", at="after", of="params")
        return Rule(
            pattern=pattern,
            placement="update",
            exchanges=(reduction, gather),
            reduce_dtype=self.reduce_dtype,
        )
