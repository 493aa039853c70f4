"""Pass 4b: gradients that every rank of a model axis has only a part of are summed once a step.

A weight that all ranks of the axis hold whole but use on their own tokens or heads (norms between
sequence-parallel blocks, norms of query and key heads) gets a part of its gradient on each. The
parts are summed in one exchange of the shards that data axes left, when these have been reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from phalanx.action import Collective
from phalanx.lower.chunk import PARTIAL_PLACEMENT, Placed, padded_size
from phalanx.policy import Exchange, Spec
from phalanx.workload import Unit


def sum_partial_gradients(
    units: Iterable[str], placed: Placed, specs: Sequence[Spec], waits: tuple[str, ...]
) -> list[Collective]:
    """One collective per spec that has rules with partial gradients on these units.

    Args:
        units: names of those that the rank holds.
        placed: with the data axes' cuts.
        specs: those of model axes.
        waits: labels of what completes the gradients of the rank.
    """
    found: list[Collective] = []
    for spec in specs:
        if placed.mesh.degree(spec.axis) == 1:
            continue
        parts = [part for name in units for part in _parts(placed.unit_of[name], placed, spec)]
        elements = sum(size for _, size in parts)
        if elements:
            found.append(
                Collective(
                    collective=parts[0][0].collective,
                    axis=spec.axis,
                    lane=f"axis:{spec.axis}",
                    label=f"reduce:partial@{spec.axis}",
                    after=(*waits, *(each.label for each in found)),
                    tensor="partial/grad",
                    payload_bytes=float(elements * placed.work.grad_bytes),
                )
            )
    return found


def _parts(unit: Unit, placed: Placed, spec: Spec) -> Iterator[tuple[Exchange, int]]:
    """The exchange and the elements of each partial gradient; units with adapters have none."""
    if unit.trainable_params is not None:
        return
    degree = placed.sharded.get(unit.name, 1)
    for block in unit.blocks:
        for module in block.modules:
            rule = spec.rule_for(f"{block.name}.{module.name}")
            if rule is not None and rule.placement == PARTIAL_PLACEMENT:
                exchange = next(e for e in rule.exchanges if e.of == "grads")
                yield exchange, padded_size(module.shape, degree) // degree
