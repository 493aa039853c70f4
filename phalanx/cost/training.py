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
    + tensor axis: K T D per activation exchange of the rules, through an all-reduce (a gather or a
      scatter counts half of one)
Bytes of one rank, above what its libraries take (`prediction.terms`), at the moment of a step when
they are most (`cost.step_memory` names the moments; F = 1 without shards)
    weights        sum of M psi / F, dim 0 of each parameter padded
    gathered       K Psi of units that are kept, and (1 + prefetch) K max psi while layers compute
    gather buffer  K max psi of units that are being gathered
    gradients      trained elements: G / F reduced, G while they wait for the last micro-batch (K
                   without shards), K + G of the unit that is being reduced; of a head 2 K as the
                   loss makes it, K until its unit is reduced
    optimizer      8 / F per trained element
    activations    S * sum of saved bytes, less what is computed again; none at the end
    logits         at the loss its chunk of them; its gradient's tile and rows
    runtime        what the libraries hold beside tensors, measured
    kernels        code that CPU libraries compile and keep for every new shape, measured for all

Differences and limits: ranks wait for the slowest, whose tokens count; overlap of communication and
compute is not credited (gloo on one machine competes for the same cores); the sum of gradients that
are partial over a tensor axis (norms per head) is left out as small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from phalanx.cost.local_shapes import local_config
from phalanx.cost.step_memory import Unit, is_split_by_token, memory_terms, shard_spec, units_of
from phalanx.cost.step_work import (
    Workload,
    counted_weight,
    row_multiple,
    row_tokens_for,
    workload_of,
)
from phalanx.mesh import Mesh
from phalanx.models.config import DTYPE_BYTES, DecoderConfig
from phalanx.models.operators import Operator, operators
from phalanx.models.spec import canonical_tensors
from phalanx.policy import Exchange, Spec

__all__ = [
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

RateKey = str
_REPEATED_BY_SELECTIVE = ("norm", "gate")


def rate_key(op: Operator, config: DecoderConfig) -> RateKey:
    """Operators with one key cost the same: kind, shape, and whether something is trained in it."""
    key = op.op
    if op.op == "linear":
        shape = canonical_tensors(config)[op.tensors[0]].shape
        key += f".{shape[0]}x{shape[1]}{'.trained' if op.num_trained else ''}"
    elif op.op == "norm":
        rotated = ".rotated" if op.name.endswith(("q_norm", "k_norm")) else ""
        bare = "" if op.tensors else ".bare"
        key += f".{op.out_bytes_per_token:.0f}{rotated}{bare}"
    elif op.op == "attention":
        assert op.layer is not None
        key += f".{config.layer_kinds[op.layer]}"
    elif op.op in ("gate", "rotate", "add", "scale", "embedding"):
        key += f".{op.out_bytes_per_token:.0f}"
    return key


@dataclass(frozen=True)
class Prediction:
    """What a run should take, before its first step.

    Attributes:
        step_s: wall time of a typical step.
        peak_bytes: of all ranks together, above what their libraries take.
        seconds: operator kind or exchange -> seconds of a step.
        terms: name -> bytes of one rank, at the moment of the peak.
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
) -> Prediction:
    """Seconds and bytes of a step.

    Args:
        config: sizes of the whole model; its dtype is that of compute and of frozen weights.
        specs: of the plan: data ("shard", "replicate") and tensor.
        rates: "rates" of `engines.calibrate.calibrate` for this work.
        mesh: of the role, on this machine.
        master_bytes, reduce_bytes: per element of trained weights and of reductions.
        recompute: none, selective or full.
    """
    value = {key: float(entry["value"]) for key, entry in rates.items()}
    local = local_config(config, work.tensor_degree)
    data = [spec for spec in specs if spec.family == "data"]
    units = units_of(local, work, data, mesh, master_bytes)
    seconds = _operator_seconds(local, work, value, recompute)
    seconds["gather"] = sum(u.gathers(work.num_items) * u.gathered for u in units)
    seconds["gather"] /= value["all_gather"]
    seconds["reduce"] = _reduced_seconds(units, data, value, mesh, reduce_bytes)
    if work.tensor_degree > 1:
        tensor = [spec for spec in specs if spec.family == "tensor"]
        payload = _exchanged_bytes(config, work, tensor, recompute)
        seconds["exchange"] = payload / value["all_reduce"]
    seconds["optimizer"] = sum(u.trained for u in units) * value["optimizer"]
    libraries = {name: value[name] for name in ("runtime", "kernels")}
    terms = memory_terms(local, work, units, reduce_bytes=reduce_bytes, recompute=recompute)
    terms |= libraries
    return Prediction(
        step_s=sum(seconds.values()),
        peak_bytes=mesh.size * sum(terms.values()),
        seconds=seconds,
        terms=terms,
    )


class Priced(NamedTuple):
    """An operator with a rank's seconds of a step: forward, backward, and forward once more where
    the backward pass computes it again."""

    operator: Operator
    forward_s: float
    backward_s: float
    again_s: float


def priced_operators(
    config: DecoderConfig, work: Workload, value: Mapping[RateKey, float], recompute: str = "none"
) -> Iterator[Priced]:
    """The operators of a rank in the order of the forward pass.

    Args:
        config: a rank's sizes (`cost.local_shapes`).
        value: rate key -> seconds per token (per target for the head).
    """
    for op in operators(config, document_tokens=work.document_tokens, lora=work.lora):
        key = rate_key(op, config)
        count = work.counted if op.op == "head" else work.tokens
        if is_split_by_token(op, work):
            count /= work.tensor_degree
        forward_s, backward_s = count * value[f"{key}.F"], count * value[f"{key}.B"]
        repeated = recompute == "full" or op.op in _REPEATED_BY_SELECTIVE
        is_again = recompute != "none" and op.layer is not None and repeated
        yield Priced(op, forward_s, backward_s, forward_s if is_again else 0.0)


def _operator_seconds(
    config: DecoderConfig, work: Workload, value: Mapping[RateKey, float], recompute: str
) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for op, forward_s, backward_s, again_s in priced_operators(config, work, value, recompute):
        seconds[op.op] = seconds.get(op.op, 0.0) + forward_s + backward_s
        if again_s:
            seconds["recompute"] = seconds.get("recompute", 0.0) + again_s
    return seconds


def _reduced_seconds(
    units: Sequence[Unit],
    data: Sequence[Spec],
    value: Mapping[RateKey, float],
    mesh: Mesh,
    reduce_bytes: int,
) -> float:
    shard = shard_spec(data)
    degree = mesh.degree(shard.axis) if shard else 1
    num_trained = sum(unit.num_trained for unit in units)
    seconds = num_trained * reduce_bytes / value["reduce_scatter"] if degree > 1 else 0.0
    for spec in data:
        if spec is not shard and mesh.degree(spec.axis) > 1:
            held = sum(unit.trained for unit in units)
            seconds += held * reduce_bytes / value["all_reduce"]
    return seconds


def _exchanged_bytes(
    config: DecoderConfig, work: Workload, specs: Sequence[Spec], recompute: str
) -> float:
    """Bytes of activations that a rank puts through all-reduces in a step."""
    blocks = [
        f"model.layers.{layer}.{block}"
        for layer in range(config.num_layers)
        for block in ("self_attn", "mlp")
    ]
    times = 0.0
    for spec in specs:
        for module in (*blocks, "model.embed_tokens", "lm_head"):
            rule = spec.rule_for(module)
            for exchange in rule.exchanges if rule else ():
                again = recompute == "full" and exchange.phase == "F" and module in blocks
                times += _weight(exchange) * (2 if again else 1)
    return times * work.tokens * config.hidden_size * DTYPE_BYTES[config.dtype]


def _weight(exchange: Exchange) -> float:
    """Of an exchange of activations, in all-reduces of the same payload."""
    if exchange.of not in ("activations", "inputs"):
        return 0.0
    return 1.0 if exchange.collective == "all_reduce" else 0.5
