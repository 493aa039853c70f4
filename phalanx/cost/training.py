"""Seconds and bytes of a training step from a model's operators and this machine's rates. No torch.

A prediction is made before the first step from
    the operator list (`models.operators`), the rows that the data will be packed into (`Workload`),
    the rules of the data specs (what is gathered, kept, reduced), and
    measured rates (`engines.calibrate`): seconds per token of each operator, bytes per second of a
    gather and of a reduction, seconds per element of the optimizer.

Symbols: T, N tokens and targets of a step on one rank; m micro-batches; S tokens of a row; F shard
degree; Psi elements, psi of a unit; K, M, R bytes per element in compute, storage, reduction.

Seconds
    sum over operators of (T or N) (forward + backward), as measured
    + gathered bytes / gather rate + reduced bytes / reduction rate + trained elements / F * rate
Bytes of one rank, above what its libraries take (`prediction.terms`)
    weights        sum of M psi / F, dim 0 of each parameter padded
    gathered       K Psi of units that are kept, else K psi_root + (1 + prefetch) K max psi
    gather buffer  K max psi of units gathered while activations are held
    gradients      trained elements: K (one micro-batch) + R while accumulating + 4 / F
    optimizer      8 / F per trained element
    activations    S * sum of saved bytes
    logits         the loss's chunk, its gradient's tile and rows
    runtime        what the libraries hold beside tensors, measured
    kernels        code that CPU libraries compile and keep for every new shape, measured for all

Differences and limits: ranks wait for the slowest, whose tokens count; overlap of communication and
compute is not credited (gloo on one machine competes for the same cores); the allocator's own
slack is not predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, NamedTuple

from phalanx.data.batches import SampleStream, deal, step_samples
from phalanx.data.samples import Samples
from phalanx.models.config import DTYPE_BYTES, DecoderConfig
from phalanx.models.operators import Operator, operators
from phalanx.models.spec import LoraSpec, TensorSpec, canonical_tensors, layer_tensors, lora_tensors
from phalanx.policy import Rule, Spec

RateKey = str
_LOGIT_CHUNK_BYTES = 1 << 26  # ops.loss holds at most so many bytes of logits


def counted_weight(config: DecoderConfig) -> float:
    """Work of a target beyond that of any token, in tokens: head over layer products.

    Both cost 2 FLOPs per parameter forward and the same multiple of it backward, so the ratio is
    V D over the layers' matrix parameters, whatever is trained.
    """
    layers = sum(
        spec.num_elements
        for layer in range(config.num_layers)
        for spec in layer_tensors(config, layer)
        if len(spec.shape) == 2
    )
    return config.vocab_size * config.hidden_size / layers


def row_multiple(device: str) -> int:
    """Tokens that rows are rounded up to where a plan does not say.

    Libraries for CPUs compile and cache a kernel per shape. With rows of any length the cache
    (1,024 kernels, some 0.6 GB) overflows and compiling goes on for ever; 3 % more tokens were
    9 % less time (Gemma 3 270M, rows of 512, oneDNN of PyTorch 2.13).
    """
    return 32 if device == "cpu" else 1


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a rank computes in a typical step.

    Attributes:
        tokens, counted: of the rank with the most work in a step, mean over steps.
        num_items: micro-batches of a step, mean.
        row_tokens, row_counted: of a typical micro-batch; longest_row: of the longest one.
        document_tokens: mean length of documents, weighted by their tokens.
        row_lengths, document_lengths, target_counts: all that occur (tokens and targets of rows).
        num_trained: elements that get a gradient.
        lora_rank, lora_alpha, lora_targets: of the adapters; rank 0: all weights are trained.
    """

    tokens: float
    counted: float
    num_items: float
    row_tokens: int
    row_counted: int
    longest_row: int
    document_tokens: int
    num_trained: int
    row_lengths: Sequence[int] = ()
    document_lengths: Sequence[int] = ()
    target_counts: Sequence[int] = ()
    lora_rank: int = 0
    lora_alpha: float = 0.0
    lora_targets: Sequence[str] = ()

    @property
    def lora(self) -> LoraSpec | None:
        """The adapters; None when all weights are trained."""
        if not self.lora_rank:
            return None
        targets = tuple(self.lora_targets)
        return LoraSpec(rank=self.lora_rank, alpha=self.lora_alpha, targets=targets)


def workload_of(
    samples: Samples,
    config: DecoderConfig,
    *,
    num_steps: int,
    global_batch_tokens: int,
    row_tokens: int,
    num_ranks: int,
    multiple: int = 1,
    seed: int = 0,
    lora: LoraSpec | None = None,
    held_out: Samples | None = None,
) -> Workload:
    """Deal the steps as training will and see what they hold.

    Args:
        row_tokens: longest packed row.
        multiple: what rows are rounded up to; the filler counts as tokens.
        held_out: samples that an evaluation scores, as one more step of shapes.
    """
    stream, start = SampleStream(samples, seed), 0
    steps: list[_Dealt] = []
    for _ in range(num_steps):
        counters = step_samples(stream, start, global_batch_tokens)
        steps.append(_dealt(stream, counters, config, row_tokens, num_ranks, multiple))
        start = counters.stop
    heaviest = [step.heaviest_rank(num_ranks, counted_weight(config)) for step in steps]
    tokens, counted = (mean(column) for column in zip(*heaviest))
    num_items = mean(len(step.rows) / num_ranks for step in steps)
    lengths = samples.lengths.astype(float)
    seen = list(steps)
    if held_out is not None and len(held_out):
        stream = SampleStream(held_out, seed)
        counters = range(len(held_out))
        seen.append(_dealt(stream, counters, config, row_tokens, num_ranks, multiple))
    rows = [row for step in seen for row in step.rows if row]
    return Workload(
        tokens=tokens,
        counted=counted,
        num_items=num_items,
        row_tokens=round(tokens / num_items),
        row_counted=max(1, round(counted / num_items)),
        longest_row=max(sum(row) for row in rows),
        document_tokens=round(float((lengths**2).sum() / lengths.sum())),
        num_trained=sum(spec.num_elements for spec in _trained(config, lora)),
        row_lengths=sorted({sum(row) for row in rows}),
        document_lengths=sorted({length for row in rows for length in row}),
        target_counts=sorted({count for step in seen for count in step.counted}),
        lora_rank=lora.rank if lora else 0,
        lora_alpha=lora.alpha if lora else 0.0,
        lora_targets=lora.targets if lora else (),
    )


class _Dealt(NamedTuple):
    """A step's rows as document lengths with their filler, and the targets of each."""

    rows: list[list[int]]
    counted: list[int]

    def heaviest_rank(self, num_ranks: int, weight: float) -> tuple[int, int]:
        """Tokens and targets of the rank with the most work."""
        ranks = [
            (sum(map(sum, self.rows[rank::num_ranks])), sum(self.counted[rank::num_ranks]))
            for rank in range(num_ranks)
        ]
        return max(ranks, key=lambda rank: rank[0] + weight * rank[1])


def _dealt(
    stream: SampleStream,
    counters: range,
    config: DecoderConfig,
    row_tokens: int,
    num_ranks: int,
    multiple: int,
) -> _Dealt:
    lengths = [stream.length(counter) for counter in counters]
    counted = [stream.num_counted(counter) for counter in counters]
    weight = counted_weight(config)
    work = [n + weight * c for n, c in zip(lengths, counted)]
    rows = deal(lengths, work, row_tokens=row_tokens, num_ranks=num_ranks)
    return _Dealt(
        [_rounded([lengths[at] for at in row], multiple) for row in rows],
        [sum(counted[at] for at in row) for row in rows],
    )


def _rounded(row: Sequence[int], multiple: int) -> list[int]:
    """Document lengths of a row with its filler."""
    filler = -sum(row) % multiple
    return [*row, filler] if filler else list(row)


def _trained(config: DecoderConfig, lora: LoraSpec | None) -> list[TensorSpec]:
    table = lora_tensors(config, lora) if lora else canonical_tensors(config)
    return list(table.values())


def rate_key(op: Operator, config: DecoderConfig) -> RateKey:
    """Operators with one key cost the same: kind, shape, and whether something is trained in it."""
    key = op.op
    if op.op == "linear":
        shape = canonical_tensors(config)[op.tensors[0]].shape
        key += f".{shape[0]}x{shape[1]}{'.trained' if op.num_trained else ''}"
    elif op.op == "norm":
        rotated = ".rotated" if op.name.endswith(("q_norm", "k_norm")) else ""
        key += f".{op.out_bytes_per_token:.0f}{rotated}"
    elif op.op == "attention":
        assert op.layer is not None
        key += f".{config.layer_kinds[op.layer]}"
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
    num_ranks: int,
    master_bytes: int = 4,
    reduce_bytes: int = 4,
) -> Prediction:
    """Seconds and bytes of a step.

    Args:
        config: sizes; its dtype is that of compute and of frozen weights.
        specs: data specs of the plan; one with placement "shard", or none (replicated).
        rates: "rates" of `engines.calibrate.calibrate`.
        num_ranks: data-parallel ranks on this machine.
        master_bytes, reduce_bytes: per element of trained weights and of reductions.
    """
    value = {key: float(entry["value"]) for key, entry in rates.items()}
    units = _units(config, work, specs, num_ranks, master_bytes)
    seconds: dict[str, float] = {}
    for op in operators(config, document_tokens=work.document_tokens, lora=work.lora):
        key = rate_key(op, config)
        count = work.counted if op.op == "head" else work.tokens
        spent = count * (value[f"{key}.F"] + value[f"{key}.B"])
        seconds[op.op] = seconds.get(op.op, 0.0) + spent
    seconds["gather"] = sum(u.gathers(work.num_items) * u.gathered for u in units)
    seconds["gather"] /= value["all_gather"]
    trained_bytes = work.num_trained * reduce_bytes
    seconds["reduce"] = trained_bytes / value["reduce_scatter"] if num_ranks > 1 else 0.0
    seconds["optimizer"] = sum(u.trained for u in units) * value["optimizer"]
    libraries = {name: value[name] for name in ("runtime", "kernels")}
    terms = _terms(config, work, units, reduce_bytes) | libraries
    return Prediction(
        step_s=sum(seconds.values()),
        peak_bytes=num_ranks * sum(terms.values()),
        seconds=seconds,
        terms=terms,
    )


@dataclass(frozen=True)
class _Unit:
    """A unit of the data specs in bytes: stored on a rank, gathered; and trained elements held."""

    rule: Rule | None
    stored: float
    gathered: float
    trained: float
    num_trained: int

    def gathers(self, num_items: float) -> float:
        """Times that it is gathered in a step."""
        if self.rule is None or (not self.rule.reshard and not self.num_trained):
            return 0.0  # whole everywhere, or gathered once and kept
        return 2.0 * num_items if self.rule.reshard else 1.0

    @property
    def is_kept(self) -> bool:
        return self.rule is not None and not self.rule.reshard


def _units(
    config: DecoderConfig, work: Workload, specs: Sequence[Spec], num_ranks: int, master_bytes: int
) -> list[_Unit]:
    shard = next((s for s in specs if s.rules()[-1].placement == "shard"), None)
    degree = num_ranks if shard else 1
    stored = DTYPE_BYTES[config.dtype]
    adapters = list(lora_tensors(config, work.lora).values()) if work.lora else []
    by_unit: dict[str, list[TensorSpec]] = {}
    for spec in (*canonical_tensors(config).values(), *adapters):
        by_unit.setdefault(_unit_name(spec.name, shard), []).append(spec)
    units = []
    for tensors in by_unit.values():
        held, gathered, trained, num_trained = 0.0, 0.0, 0.0, 0
        for spec in tensors:
            share = -(-spec.shape[0] // degree) / spec.shape[0]  # of dim 0, padded
            is_trained = work.lora is None or ".lora_" in spec.name
            held += spec.num_elements * share * (master_bytes if is_trained else stored)
            gathered += spec.num_elements * share * degree * stored if shard else 0.0
            trained += spec.num_elements * share * is_trained
            num_trained += spec.num_elements * is_trained
        rule = shard.rule_for(tensors[0].name.removesuffix(".weight")) if shard else None
        units.append(_Unit(rule, held, gathered, trained, num_trained))
    return units


def _unit_name(tensor: str, shard: Spec | None) -> str:
    """The unit that claims a tensor: its layer, the root (""), or modules taken out by a rule."""
    parts = tensor.split(".")
    layer = ".".join(parts[:3]) if parts[1] == "layers" else ""
    rule = shard.rule_for(tensor.removesuffix(".weight")) if shard else None
    if shard is None or rule in (shard.rule_for(layer), shard.rule_for("")):
        return layer
    return rule.pattern if rule else layer


def _terms(
    config: DecoderConfig, work: Workload, units: Sequence[_Unit], reduce_bytes: int
) -> dict[str, float]:
    itemsize = DTYPE_BYTES[config.dtype]
    listed = operators(config, document_tokens=work.document_tokens, lora=work.lora)
    saved = sum(op.saved_bytes_per_token for op in listed if op.op != "head")
    in_turn = [u for u in units if u.rule is not None and u.rule.reshard]
    waiting = 1 + max((u.rule.prefetch for u in in_turn if u.rule), default=0)
    regathered = [u.gathered for u in units if u.gathers(1.0)]
    accumulating = reduce_bytes if work.num_items > 1 else 0
    return {
        "weights": sum(u.stored for u in units),
        "gathered": sum(u.gathered for u in units if u.is_kept)
        + waiting * max((u.gathered for u in in_turn), default=0.0),
        "gather buffer": max(regathered, default=0.0),
        "gradients": work.num_trained * (itemsize + accumulating)
        + reduce_bytes * sum(u.trained for u in units),
        "optimizer": 8.0 * sum(u.trained for u in units),
        "activations": work.longest_row * saved,
        "logits": float(
            min(_LOGIT_CHUNK_BYTES, work.row_counted * config.vocab_size * itemsize)
            + 2 * work.row_counted * config.hidden_size * (itemsize + 4)
        ),
    }
