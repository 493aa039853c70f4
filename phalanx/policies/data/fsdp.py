"""Fully sharded data parallelism as PyTorch's `fully_shard` (FSDP2) schedules it."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.errors import PlanError
from phalanx.policy import DTYPES, Exchange, Rule, Spec
from phalanx.registry import Source, register

_SOURCE = Source(
    "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel",
    "arXiv 2304.11277",
    "sections 3.2 to 3.4 and 4.4",
)


@register("data", "fsdp", grain="unit", source=_SOURCE, status="verified")
@dataclass(frozen=True, kw_only=True)
class Fsdp(Spec):
    """Shards parameters, gradients and optimizer state over `axis`, one unit at a time.

    A unit (one decoder layer; the rest of the model is the root unit) is gathered just before it
    computes and given back just after; its gradients are reduced to the shards as soon as they
    exist. The root stays gathered between its forward and its backward pass. Low-rank adapters are
    one unit together, so that frozen layers need not travel because of what little changes in them.

    Symbols: F = degree of `axis`, times that of the axes that split a row's tokens (whose ranks use
    the same parameters); N = units, root included; psi_i, Psi = elements of unit i and of all; K =
    bytes per element in compute (`param_dtype`), R = in reduction (`reduce_dtype`), M = in storage;
    p = `prefetch`; m = micro-batches of a step.

    Costs per rank and step
        collectives, one micro-batch: 3N - 1 with `reshard_after_forward`, 2N without
        gathered bytes received: 2 K Psi (F-1)/F, less K psi_root (F-1)/F; without reshard
            K Psi (F-1)/F, whatever m is
        reduced bytes sent: R Psi (F-1)/F, once a step (m times with `reduce_every_item`)
        memory: M Psi/F parameters + M Psi/F gradients + 8 Psi/F AdamW (fp32) + K psi_root
            + (1 + p) K max psi_i; without reshard K Psi in place of the last two
        accumulating without `reduce_every_item` keeps R Psi of gradients until the last micro-batch
        every psi_i counts each parameter's dim 0 padded to a multiple of F

    Source: arXiv 2304.11277, section 3.2.1 (traffic), 3.3.2 (backward prefetch: the next gather is
    issued before the reduction that shares its process group), 4.4 (memory). Schedule and padding:
    torch/distributed/fsdp/_fully_shard of PyTorch 2.13.

    Differences and limits: per-parameter shards of dim 0 (FSDP2), not flat parameters (the paper);
    gradients are summed, not averaged, because the loss is divided by the global number of counted
    tokens; frozen parameters are gathered but not reduced; a unit that is not given back after its
    forward pass and holds only frozen parameters is gathered once and kept, as it never changes;
    adapters are gathered before the forward pass and reduced after the backward pass of the model.
    Torch prefetches one unit backward even when `prefetch` is 0.

    Raises:
        PlanError: `plan/illegal` for a negative `prefetch`.
    """

    axis: str = "shard"
    units: str = "*layers.*"
    adapters: str = "*.lora_*"
    reshard_after_forward: bool = True
    prefetch: int = 1
    reduce_every_item: bool = False
    param_dtype: str = field(default="", metadata={"choices": DTYPES})
    reduce_dtype: str = field(default="", metadata={"choices": DTYPES})

    def __post_init__(self) -> None:
        if self.prefetch < 0:
            where, rule = "policy.data.prefetch", "units gathered ahead cannot be fewer than 0"
            raise PlanError("plan/illegal", where, self.prefetch, rule, legal=[0])

    def rules(self) -> tuple[Rule, ...]:
        """Rules for the adapters, for the units, and for the root, which is everything else."""
        return (
            self._rule(self.adapters, reshard=False),
            self._rule(self.units, self.reshard_after_forward),
            self._rule("*", reshard=False),
        )

    def _rule(self, pattern: str, reshard: bool) -> Rule:
        reduction = Exchange(
            collective="reduce_scatter",
            phase="B",
            at="after",
            of="grads",
            when="always" if self.reduce_every_item else "last",
        )
        return Rule(
            pattern=pattern,
            placement="shard",
            exchanges=(_gather("F"), _gather("B"), reduction),
            reshard=reshard,
            prefetch=self.prefetch,
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
        )


def _gather(phase: str) -> Exchange:
    return Exchange(collective="all_gather", phase=phase, at="before", of="params", when="sharded")
