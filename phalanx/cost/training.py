"""Seconds and bytes of a training step from a model's operators and this machine's rates. No torch.

A prediction is made before the first step from
    the operator list (`models.operators`) with a rank's own shapes (`cost.local_shapes`),
    the rows that the data will be packed into (`cost.step_work`),
    the rules of the data and tensor specs (what is gathered, kept, reduced, exchanged), and
    measured rates (`engines.calibrate`): seconds per token of each operator, bytes per second of
    collectives, seconds per element of the optimizer.

Symbols: T, N tokens and targets of a step on one rank; m micro-batches; S tokens of a row; F shard
degree, R replicas, t tensor degree; Psi elements, psi of a unit; K, M, G bytes per element in
compute, storage, reduction; D hidden size.

Seconds
    sum over operators of (T or N) (forward + backward), as measured, with a rank's shapes
    + what recomputation repeats: norms and gates (selective), the forward pass of layers (full)
    + gathered bytes / gather rate + reduced bytes / reduction rate + trained elements / F * rate
    + replicas: G Psi_trained / F through an all-reduce
    + gradients added up and copied: bytes read and written over measured rates (`cost.step_sums`)
    + tensor axis: K T D per activation exchange of the rules, through an all-reduce (a gather or a
      scatter counts half of one)
    + context axis (c ranks): all of it with T / c and N / c; keys, values or queries by the rules;
      gradients are summed, or weights sharded, over data and context ranks together
    + pipeline: the schedule is played with the passes of each stage and its messages; the slowest
      rank's gradients and updates come after it
Bytes of one rank, above what its libraries take (`prediction.terms`), at the moment of a step when
they are most (`cost.step_memory` names the moments; F = 1 without shards)
    weights        sum of M psi / F, dim 0 of each parameter padded
    gathered       K Psi of units that are kept, and (1 + prefetch) K max psi while layers compute
    gather buffer  K max psi of units that are being gathered
    gradients      trained elements: G / F reduced, G while they wait for the last micro-batch (K
                   without shards), K + G of the unit that is being reduced; of a head 2 K as the
                   loss makes it, K until its unit is reduced
    optimizer      8 / F per trained element
    activations    S * sum of saved bytes, less what is computed again; none at the end; where ranks
                   of a context axis gather keys and values, those of all others too
    logits         at the loss the largest of its chunks; its gradient's tile and rows
    runtime        what the libraries hold beside tensors, measured
    kernels        code that CPU libraries compile and keep for every new shape, measured for all

Differences and limits: ranks wait for the slowest, whose tokens count; overlap of communication and
compute is not credited (gloo on one machine competes for the same cores); the sum of gradients that
are partial over a tensor axis (norms per head) is left out as small; micro-batches of a pipeline
are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Any

import numpy as np

from phalanx.cost.local_shapes import local_config
from phalanx.cost.pipeline_memory import terms_of_ranks, units_of_ranks
from phalanx.cost.pipeline_parts import Pipeline
from phalanx.cost.rates import MeasuredRates
from phalanx.cost.step_memory import Unit, cut_degree, shard_spec, update_spec
from phalanx.cost.step_seconds import (
    Priced,
    RateKey,
    priced_exchanges,
    priced_operators,
    rate_key,
)
from phalanx.cost.step_sums import Moved, summed_twice, summed_units
from phalanx.cost.step_work import (
    Workload,
    counted_weight,
    row_multiple,
    row_tokens_for,
    workload_of,
)
from phalanx.mesh import Mesh
from phalanx.models.config import DTYPE_BYTES, DecoderConfig
from phalanx.policy import Spec
from phalanx.worlds.pipeline_arrays import play

__all__ = [
    "Pipeline",
    "Prediction",
    "Priced",
    "RateKey",
    "Workload",
    "counted_weight",
    "predict",
    "priced_operators",
    "rate_key",
    "row_multiple",
    "row_tokens_for",
    "workload_of",
]

WAITS = "pipeline"  # seconds in which a rank waits for others, or sends to them


@dataclass(frozen=True)
class Prediction:
    """What a run should take, before its first step.

    Attributes:
        step_s: wall time of a typical step.
        peak_bytes: of all ranks together, above what their libraries take.
        seconds: operator kind or exchange -> seconds of a step; of a pipeline, those of the rank
            that works longest, and what it waits.
        terms: name -> bytes of one rank, the fullest, at the moment of the peak.
    """

    step_s: float
    peak_bytes: float
    seconds: Mapping[str, float]
    terms: Mapping[str, float]

    def rows(self) -> list[dict[str, Any]]:
        """Tables for `report.Row`: the two totals, then their parts."""
        source = {"source": "formula", "note": "from rates measured before the first step"}
        rows = [
            {"quantity": "training/step time", "value": self.step_s, "unit": "s"},
            {"quantity": "training/peak memory", "value": self.peak_bytes, "unit": "bytes"},
        ]
        rows += [
            {"quantity": f"training/step time/{name}", "value": value, "unit": "s"}
            for name, value in self.seconds.items()
        ]
        rows += [
            {"quantity": f"training/peak memory of a rank/{name}", "value": value, "unit": "bytes"}
            for name, value in self.terms.items()
        ]
        return [row | source for row in rows]


def predict(
    config: DecoderConfig,
    work: Workload,
    specs: Sequence[Spec],
    rates: Mapping[RateKey, Mapping[str, Any]],
    *,
    mesh: Mesh,
    master_bytes: int = 4,
    reduce_bytes: int = 4,
    recompute: str = "none",
    pipeline: Pipeline | None = None,
    offloads: bool = False,
) -> Prediction:
    """Seconds and bytes of a step.

    Args:
        config: sizes of the whole model; its dtype is that of compute and of frozen weights.
        specs: of the plan: data, tensor and context.
        rates: "rates" of `engines.calibrate.calibrate` for this work.
        mesh: of the role, on this machine.
        master_bytes, reduce_bytes: per element of trained weights and of reductions.
        recompute: none, selective or full.
        pipeline: stages and schedule; None: every rank holds all layers.
        offloads: moments wait outside the device.

    Raises:
        PlanError: `plan/illegal` for a rate that was not measured, as in an older release's plan.
    """
    value = MeasuredRates({key: float(entry["value"]) for key, entry in rates.items()})
    pipeline = pipeline or Pipeline.whole(config)
    local = local_config(config, work.tensor_degree)
    data = [spec for spec in specs if spec.family == "data"]
    units = units_of_ranks(local, work, data, mesh, master_bytes, pipeline)
    passes = _passes(local, work, specs, value, pipeline, recompute)
    played_s = _played_seconds(local, work, value, pipeline, passes)
    after = [
        _after_seconds(local, work, rank, units[rank], data, value, mesh, reduce_bytes, pipeline)
        for rank in range(pipeline.num_ranks)
    ]
    busiest = int(np.argmax([sum(seconds.values()) for seconds in passes.of_rank]))
    seconds = passes.of_rank[busiest] | after[busiest]
    if pipeline.num_ranks > 1:
        slowest_s = max(sum(each.values()) for each in after)
        seconds[WAITS] = max(0.0, played_s + slowest_s - sum(seconds.values()))
    terms = terms_of_ranks(
        local,
        work,
        units,
        pipeline,
        reduce_bytes=reduce_bytes,
        recompute=recompute,
        offloads=offloads,
    )
    libraries = {name: value[name] for name in ("runtime", "kernels")}
    totals = [sum(each.values()) + sum(libraries.values()) for each in terms]
    return Prediction(
        step_s=sum(seconds.values()),
        peak_bytes=mesh.size / pipeline.num_ranks * sum(totals),
        seconds=seconds,
        terms=terms[int(np.argmax(totals))] | libraries,
    )


@dataclass(frozen=True)
class _Passes:
    """Seconds of all passes of a step.

    Attributes:
        of_rank: operator kind or exchange -> seconds, of each rank of the pipeline.
        forward_s, backward_s, weight_s: of each stage; weight gradients are part of backward: on
            the first stage all of it, since torch makes what enters it no gradient of its own.
    """

    of_rank: Sequence[dict[str, float]]
    forward_s: np.ndarray
    backward_s: np.ndarray
    weight_s: np.ndarray


def _passes(
    config: DecoderConfig,
    work: Workload,
    specs: Sequence[Spec],
    value: Mapping[RateKey, float],
    pipeline: Pipeline,
    recompute: str,
) -> _Passes:
    forward_s, backward_s, weight_s = np.zeros((3, pipeline.num_stages))
    of_rank: list[dict[str, float]] = [{} for _ in range(pipeline.num_ranks)]

    def add(stage: int, kind: str, seconds: float) -> None:
        found = of_rank[pipeline.rank_of_stage[stage]]
        found[kind] = found.get(kind, 0.0) + seconds

    for priced in priced_operators(config, work, value, recompute):
        for stage in pipeline.stages_of_operator(priced.operator):
            add(stage, priced.operator.op, priced.forward_s + priced.backward_s)
            if priced.again_s:
                add(stage, "recompute", priced.again_s)
            forward_s[stage] += priced.forward_s
            backward_s[stage] += priced.backward_s + priced.again_s
            weight_s[stage] += priced.weight_s(trains_all=work.lora is None)
    for exchange in priced_exchanges(config, work, specs, value, recompute):
        stage = pipeline.stages_of_module(exchange.module)[
            -1 if exchange.module == "lm_head" else 0
        ]
        add(stage, exchange.kind, exchange.forward_s + exchange.backward_s)
        forward_s[stage] += exchange.forward_s
        backward_s[stage] += exchange.backward_s
    weight_s[0] = backward_s[0]
    return _Passes(of_rank, forward_s, backward_s, weight_s)


def _played_seconds(
    config: DecoderConfig,
    work: Workload,
    value: Mapping[RateKey, float],
    pipeline: Pipeline,
    passes: _Passes,
) -> float:
    """From the first forward to the last backward pass. Steps of a mean of 3.4 micro-batches are
    four times of ten steps of 4."""
    if pipeline.num_ranks == 1:
        return float((passes.forward_s + passes.backward_s).sum())
    items = work.num_items
    row = work.tokens / items / work.context_degree * config.hidden_size
    row /= work.tensor_degree if work.splits_tokens else 1
    message_s = row * DTYPE_BYTES[config.dtype] / value["p2p"]
    forward_s, backward_s, weight_s = (
        each[:, None, None] / items
        for each in (passes.forward_s, passes.backward_s, passes.weight_s)
    )

    def step_s(count: int) -> float:
        lists = pipeline.lists(count)
        input_s = backward_s - weight_s
        return float(play(lists, forward_s, backward_s, message_s, weight_s, input_s).step_s[0])

    low, high = max(1, floor(items)), max(1, ceil(items))
    first_s = step_s(low)
    return first_s if low == high else first_s + (items - low) * (step_s(high) - first_s)


def _after_seconds(
    config: DecoderConfig,
    work: Workload,
    rank: int,
    units: Sequence[Unit],
    data: Sequence[Spec],
    value: Mapping[RateKey, float],
    mesh: Mesh,
    reduce_bytes: int,
    pipeline: Pipeline,
) -> dict[str, float]:
    """What a rank does beside the passes of its stages."""
    gathered = sum(u.gathers(work.num_items) * u.gathered for u in units)
    seconds = {
        "gather": gathered / value["all_gather"]
        + _updated_seconds(config, units, data, value, mesh, work),
        "reduce": _reduced_seconds(units, data, value, mesh, reduce_bytes, work),
    }
    ends = (pipeline.rank_of_stage[0], pipeline.rank_of_stage[-1])
    if pipeline.shares_embedding() and rank in ends and work.lora is None:
        shared = config.vocab_size * config.hidden_size * reduce_bytes
        seconds["reduce"] += shared / value["all_reduce"]
    seconds["sums"] = _summed(config, work, rank, units, reduce_bytes, pipeline).seconds(value)
    seconds["optimizer"] = sum(u.updated for u in units) * value["optimizer"]
    return seconds


def _summed(
    config: DecoderConfig,
    work: Workload,
    rank: int,
    units: Sequence[Unit],
    reduce_bytes: int,
    pipeline: Pipeline,
) -> Moved:
    """Bytes of gradients of weights that this rank adds up and copies."""
    moved = summed_units(units, work, reduce_bytes)
    has_both_ends = not pipeline.shares_embedding() and rank == pipeline.rank_of_stage[0]
    return moved.plus(summed_twice(config, work)) if has_both_ends else moved


def _reduced_seconds(
    units: Sequence[Unit],
    data: Sequence[Spec],
    value: Mapping[RateKey, float],
    mesh: Mesh,
    reduce_bytes: int,
    work: Workload,
) -> float:
    """Scattered to the ranks that share weights or their update, as often as a unit's rule says;
    then summed over replicas; then updated weights are gathered where only the update is cut."""
    shard, update = shard_spec(data), update_spec(data)
    cut, seconds = shard or update, 0.0
    if cut_degree(cut, mesh, work) > 1:
        times = [work.num_items if unit.reduces_always else 1.0 for unit in units]
        scattered = sum(unit.num_trained * count for unit, count in zip(units, times))
        seconds += scattered * reduce_bytes / value["reduce_scatter"]
    copies = [mesh.degree(spec.axis) for spec in data if spec is not cut]
    copies += [work.context_degree] if cut is None else []
    if max([1, *copies]) > 1:
        held = sum(unit.updated for unit in units)
        seconds += held * reduce_bytes / value["all_reduce"]
    return seconds


def _updated_seconds(
    config: DecoderConfig,
    units: Sequence[Unit],
    data: Sequence[Spec],
    value: Mapping[RateKey, float],
    mesh: Mesh,
    work: Workload,
) -> float:
    """Gathering weights that every rank updated a part of."""
    if cut_degree(update_spec(data), mesh, work) == 1:
        return 0.0
    return sum(u.num_trained for u in units) * DTYPE_BYTES[config.dtype] / value["all_gather"]
