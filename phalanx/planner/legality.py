"""Which plans cannot exist, or are known to be no use, and why. Whole columns at once.

Sources: heads and widths, arXiv 2104.04473, section 2.3; interleaved rounds need stages <= round <=
micro-batches, Megatron Core and DOI 10.1145/3695053.3731410, section 3.1 (a round may be as long as
all micro-batches, so that they suffice); a pipeline's first and last rank may hold a layer less
because of embedding and head, same, section 3.2; ZeRO-3 gathers at every visit of a stage and is
rejected with pipelines, and gradients are sharded where all forwards come first, same, section 3.3;
two chunks of every rank for the schedules that fold the
pipeline, arXiv 2401.10241, section 6, and arXiv 2412.19437, section 3.2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.training_plans import CONTEXT_KINDS, SCHEDULES
from phalanx.planner.columns import Table

LEAST_CONTEXT_TOKENS = 1024  # of a rank: attention of fewer keys does not pay for their journey
MOST_TENSOR = 64  # no published plan cuts a product further

NO_CUT = "cut heads or widths into uneven parts"
NO_DOMAIN = "stretch tensor parallelism over scale-up domains"
NO_LAYERS = "have more stages than layers"
NO_CHUNKS = "cut rows into uneven parts"
NO_TOKENS = f"leave a context rank fewer than {LEAST_CONTEXT_TOKENS:,} tokens"
NO_WORK = "leave a data rank without a row"
NO_SHARE = "share the rows of a batch unevenly"
NO_STATE = "cut a linear attention's row other than by heads"
NO_EXPERTS = "spread experts over more ranks than there are"
NO_ROUND = "have fewer micro-batches than the schedule needs"
NO_CHUNK = "give chunks of a pipeline unequal numbers of layers"
NO_HOST = "move more moments to the host than it has memory for"
NO_FOLD = "fold a pipeline of an odd number of ranks"

_GPIPE, _INTERLEAVED, _DUALPIPE, _DUALPIPE_V = map(
    SCHEDULES.index, ("gpipe", "interleaved", "dualpipe", "dualpipe-v")
)
_ULYSSES = CONTEXT_KINDS.index("ulysses")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What legality asks of a model and a batch.

    Attributes:
        cut: sizes that a tensor degree must divide: query heads and widths.
        heads: query heads of every kind of layer that attends.
        experts, expert_widths: of mixtures; () for none.
        has_state: some layer is a linear attention.
        row_tokens: of a row of fixed length, else of the longest document's; rows: of a batch.
        is_fixed: every row has this length.
        domain: devices that share the fast links.
    """

    cut: tuple[int, ...]
    heads: tuple[int, ...]
    experts: tuple[int, ...]
    expert_widths: tuple[int, ...]
    num_layers: int
    has_state: bool
    row_tokens: int
    rows: int
    is_fixed: bool
    domain: int


def sizes_of(
    shape: ModelShape, *, row_tokens: int, rows: int, is_fixed: bool, domain: int
) -> Sizes:
    """Of a model's layers."""
    attending = [layer.attention for layer in shape.layers if layer.attention.kind != "none"]
    fed = [layer.feed_forward for layer in shape.layers]
    widths = {width for each in fed for width in (each.width, each.shared_width) if width}
    heads = tuple(sorted({each.num_heads for each in attending}))
    mixed = [each for each in fed if each.num_experts]
    return Sizes(
        cut=tuple(sorted({*heads, *widths})),
        heads=heads,
        experts=tuple(sorted({each.num_experts for each in mixed})),
        expert_widths=tuple(sorted({each.expert_width for each in mixed})),
        num_layers=shape.num_layers,
        has_state=any(each.kind == "linear" for each in attending),
        row_tokens=row_tokens,
        rows=rows,
        is_fixed=is_fixed,
        domain=domain,
    )


def _uneven(sizes: tuple[int, ...], degree: np.ndarray) -> np.ndarray:
    """Where some size is no multiple of the degree."""
    none = np.zeros(degree.shape, dtype=bool)
    return reduce(np.logical_or, (size % degree != 0 for size in sizes), none)


def axis_rules(sizes: Sizes, table: Table) -> Mapping[str, np.ndarray]:
    """Of tensor, pipeline, context and data degrees."""
    tensor, context, data = table["tensor"], table["context"], table["data"]
    rules = {
        NO_CUT: _uneven(sizes.cut, tensor),
        NO_DOMAIN: (tensor > max(sizes.domain, 8)) | (tensor > MOST_TENSOR),
        NO_LAYERS: table["pipeline"] > sizes.num_layers + 2,
        NO_TOKENS: (context > 1) & (sizes.row_tokens < LEAST_CONTEXT_TOKENS * context),
        NO_WORK: data > sizes.rows,
    }
    if sizes.is_fixed:
        rules[NO_CHUNKS] = (context > 1) & (sizes.row_tokens % (2 * context) != 0)
        rules[NO_SHARE] = sizes.rows % data != 0
    return rules


def token_rules(sizes: Sizes, table: Table) -> Mapping[str, np.ndarray]:
    """Of sequence parallelism: a rank's part of a row over the tensor axis."""
    if not sizes.is_fixed:
        return {}
    uneven = sizes.row_tokens % (table["context"] * table["tensor"]) != 0
    return {NO_CHUNKS: (table["sequence_parallel"] == 1) & uneven}


def context_rules(sizes: Sizes, table: Table) -> Mapping[str, np.ndarray]:
    """Of the way that keys and values travel."""
    context, by_heads = table["context"], table["context_kind"] == _ULYSSES
    return {
        NO_CUT: by_heads & _uneven(sizes.heads, context * table["tensor"]),
        NO_STATE: (context > 1) & ~by_heads & sizes.has_state,
    }


def expert_rules(sizes: Sizes, table: Table) -> Mapping[str, np.ndarray]:
    """Of expert parallelism over the ranks of a pipeline stage."""
    spread = table["expert"] * table["expert_tensor"]
    ranks = table["tensor"] * table["context"] * table["data"]
    return {
        NO_CUT: _uneven(sizes.experts, table["expert"])
        | _uneven(sizes.expert_widths, table["expert_tensor"]),
        NO_EXPERTS: ranks % spread != 0,
    }


def stage_rules(sizes: Sizes, table: Table) -> Mapping[str, np.ndarray]:
    """Of a schedule on its stages."""
    pipeline, schedule = table["pipeline"], table["schedule"]
    chunks = pipeline * table["virtual"]
    is_equal = (sizes.num_layers % chunks == 0) | ((sizes.num_layers + 2) % chunks == 0)
    return {
        NO_LAYERS: (pipeline > 1) & (chunks > sizes.num_layers + 2),
        NO_CHUNK: (schedule == _INTERLEAVED) & ~is_equal,
        NO_FOLD: (schedule == _DUALPIPE) & (pipeline % 2 != 0),
    }


def round_rules(table: Table) -> Mapping[str, np.ndarray]:
    """Of a schedule on its micro-batches: all forwards first works with any number of them."""
    pipeline, schedule = table["pipeline"], table["schedule"]
    times = np.where(np.isin(schedule, (_DUALPIPE, _DUALPIPE_V)), 2, 1)
    return {
        NO_ROUND: (pipeline > 1) & (schedule != _GPIPE) & (table["num_micro"] < times * pipeline)
    }
