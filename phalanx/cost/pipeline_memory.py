"""Bytes of the tensors of each rank of a pipeline at the peak of a step. No torch.

A rank holds the weights, gradients and optimizer state of its stages; it keeps what autograd saves
of every micro-batch between its forward and its last backward pass on a stage, and what a stage
sends until then. Between an input gradient and its weight gradient torch keeps all of that, and the
gradient of what each trained operator has put out, from which the weight's is made
(`torch.distributed.pipelining._backward`); only the first stage, whose input has no gradient, does
all its work in the second pass. Layers that this pass computes again are all there until it ends.
Moments and terms as in `cost.step_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import ceil

from phalanx.cost.pipeline_parts import Pipeline
from phalanx.cost.step_memory import Unit, memory_terms, units_of
from phalanx.cost.step_saved import is_split_by_token, saved_of
from phalanx.cost.step_work import Workload
from phalanx.mesh import Mesh
from phalanx.models.config import DTYPE_BYTES, DecoderConfig
from phalanx.models.operators import operators
from phalanx.policy import Spec


def units_of_ranks(
    config: DecoderConfig,
    work: Workload,
    data: Sequence[Spec],
    mesh: Mesh,
    master_bytes: int,
    pipeline: Pipeline,
) -> list[list[Unit]]:
    """The units of each rank of the pipeline.

    Args:
        config: sizes of a rank of the tensor axis (`cost.local_shapes`).
    """
    return [
        units_of(config, work, data, mesh, master_bytes, partial(pipeline.holds, rank))
        for rank in range(pipeline.num_ranks)
    ]


def terms_of_ranks(
    config: DecoderConfig,
    work: Workload,
    units: Sequence[Sequence[Unit]],
    pipeline: Pipeline,
    *,
    reduce_bytes: int = 4,
    recompute: str = "none",
    offloads: bool = False,
) -> list[dict[str, float]]:
    """Name -> bytes, of each rank of the pipeline.

    Args:
        units: from `units_of_ranks`.
        offloads: as in `step_memory.memory_terms`.
    """
    parts = [partial(pipeline.runs, stage) for stage in range(pipeline.num_stages)]
    per_stage = saved_of(config, work, recompute, parts)
    sent = float(config.hidden_size * DTYPE_BYTES[config.dtype])
    sent /= work.tensor_degree if work.splits_tokens else 1
    kept = [each.kept + sent for each in per_stage[:-1]] + [per_stage[-1].kept]
    waiting = waiting_gradients(config, work, pipeline)
    num_items = max(1, ceil(work.num_items))
    whole = saved_of(config, work, "none", parts)
    terms = []
    for rank in range(pipeline.num_ranks):
        stages = pipeline.stages_of(rank)
        again = max(per_stage[stage].again for stage in stages)
        if recompute == "full" and any(
            step.kind == "W" for step in pipeline.lists(num_items)[rank]
        ):
            later = [stage for stage in stages if stage]
            again = max([again, *(whole[at].kept - per_stage[at].kept for at in later)])
        found = memory_terms(
            config,
            work,
            units[rank],
            reduce_bytes=reduce_bytes,
            recompute=recompute,
            saved_per_token=pipeline.most_live(rank, num_items, kept, waiting) + again,
            has_head=pipeline.rank_of_stage[-1] == rank,
            offloads=offloads,
        )
        terms.append(found)
    return terms


def waiting_gradients(config: DecoderConfig, work: Workload, pipeline: Pipeline) -> list[float]:
    """Bytes per token that an input gradient leaves on each stage for the weight gradient."""
    waiting = [0.0] * pipeline.num_stages
    for op in operators(config, document_tokens=work.document_tokens, lora=work.lora):
        if not op.num_trained or op.op == "head":  # the loss has made the head's already
            continue
        share = 1.0 / work.tensor_degree if is_split_by_token(op, work) else 1.0
        for stage in pipeline.stages_of_operator(op):
            waiting[stage] += share * op.out_bytes_per_token * (stage > 0)
    return waiting
