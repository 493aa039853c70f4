"""Bytes that a rank reads and writes to add gradients up and to copy them. No torch.

Beside what operators and collectives are measured with, a step of one rank moves (K bytes per
element of a gradient, G of the reduction, psi elements of a unit, D of a row, m micro-batches):

    forks      3 K D per token and sum: what several products read, and what goes around a block
               (residual), gets one gradient from each reader; two are read, one is written
    tied       3 K V D per micro-batch: a trained matrix that is embedding and head gets two
    items      gradients of micro-batches that are reduced together, added up
                   in their own dtype: 3 K psi for every one after the first
                   in a wider one: (K + G) psi, a copy, for each of m > 1; and 3 G psi for every one
                   after the first, as the sum of two dtypes is taken of such a copy
               where each is reduced at once: 3 G psi / F, of the sums of the parts
    packing    (K + G) psi of replicas: into the buffer that is summed (a scattered one's packing is
               part of its measured rate)

Each kind has a rate of its own, measured by `engines.operator_bench`: "add" (dtype of the model, in
place), "add.wide" (float32, in place), "copy" (into a block that is new, whose pages the system has
to give first: where blocks are large that takes longer than filling them).

Source: torch/csrc/autograd/input_buffer.cpp and accumulate_grad.h; torch/distributed/fsdp/
_fully_shard/_fsdp_param.py (`to_accumulated_grad_if_needed`), `engines.unit_sum`. Differences:
gradients of norms and of rows without a gradient are counted as others; what is scattered from sums
in G is packed from G bytes, where K were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from phalanx.cost.step_memory import Unit
from phalanx.cost.step_saved import is_split_by_token
from phalanx.cost.step_work import Workload
from phalanx.models.config import DTYPE_BYTES, DecoderConfig
from phalanx.models.operators import operators

_READ_TOGETHER = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_EXPERTS = "experts_sum"  # both its readers read what norms have made for them alone


class Moved(NamedTuple):
    """Bytes of a step, read and written, by the rate that they are priced with."""

    add: float = 0.0
    add_wide: float = 0.0
    copy: float = 0.0

    def plus(self, other: Moved) -> Moved:
        """Both."""
        return Moved(*(a + b for a, b in zip(self, other)))

    def seconds(self, rates: Mapping[str, float]) -> float:
        """At measured rates."""
        return (
            self.add / rates["add"] + self.add_wide / rates["add.wide"] + self.copy / rates["copy"]
        )


def summed_units(units: Sequence[Unit], work: Workload, reduce_bytes: int) -> Moved:
    """Gradients of weights: summed over micro-batches, and packed."""
    total = Moved()
    for unit in units:
        total = total.plus(_summed_items(unit, work.num_items, reduce_bytes))
        if unit.is_summed:
            total = total.plus(Moved(copy=(unit.grad_itemsize + reduce_bytes) * unit.num_trained))
    return total


def _summed_items(unit: Unit, num_items: float, reduce_bytes: int) -> Moved:
    """A mean of m micro-batches between 1 and 2 is a share of steps that have two."""
    narrow, later = unit.grad_itemsize, max(0.0, num_items - 1.0)
    if unit.reduces_always:
        return Moved(add_wide=3.0 * reduce_bytes * unit.updated * later)
    if not (unit.is_cut or unit.is_summed) or reduce_bytes <= narrow:
        return Moved(add=3.0 * narrow * unit.num_trained * later)
    copies = later + min(1.0, later)
    return Moved(
        add_wide=3.0 * reduce_bytes * unit.num_trained * later,
        copy=(narrow + reduce_bytes) * unit.num_trained * copies,
    )


def summed_twice(config: DecoderConfig, work: Workload) -> Moved:
    """The two gradients of a trained matrix that is embedding and head, on a rank with both."""
    if work.lora is not None or not config.tied_head:
        return Moved()
    elements = config.vocab_size * config.hidden_size
    return Moved(add=3.0 * DTYPE_BYTES[config.dtype] * elements * work.num_items)


def summed_rows(config: DecoderConfig, work: Workload) -> dict[str, float]:
    """Sum behind a block -> bytes of the gradients that meet there: of what goes around the block,
    and of what several of its products read.

    Args:
        config: a rank's sizes (`cost.local_shapes`).
    """
    row_bytes = config.hidden_size * DTYPE_BYTES[config.dtype]
    tokens = work.tokens / work.context_degree
    found: dict[str, float] = {}
    readers, is_below = 0, work.lora is not None  # the first adapter: rows have no gradient
    block_has_adapter = False
    for op in operators(config, document_tokens=work.document_tokens, lora=work.lora):
        readers += op.op == "linear" and op.name.endswith(_READ_TOGETHER)
        block_has_adapter |= op.num_trained > 0
        if op.layer is None or op.op != "add" or op.name.endswith(_EXPERTS):
            continue
        share = 1.0 / work.tensor_degree if is_split_by_token(op, work) else 1.0
        sums = 0.0 if is_below else share + max(0, readers - 1)
        found[op.name] = 3.0 * row_bytes * tokens * sums
        is_below = is_below and not block_has_adapter
        readers = 0
    return found
