"""Peak memory of the fullest rank of many training plans at once. No torch.

The peak of a rank is what it always holds (weights, gradients, optimizer states), plus what its
schedule makes it keep at once (activations), plus what lives for a moment (logits, buffers of a
layer, gathered units), plus what its software adds (fragmentation, the driver's context). First,
second and last pipeline ranks are priced; the fullest one counts: the first holds the most
micro-batches, the last the logits, the second may hold a layer more than either.

Sources: `memory_formulas` for what a layer keeps; `memory_software` for what each program does.
Bars: spread of published over predicted memory by software (`memory_software.json`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import erf, sqrt
from typing import Protocol

import numpy as np

from phalanx.cost.memory_activations import ITEM_BYTES, LayerBytes, chunks_in_flight, layer_bytes
from phalanx.cost.memory_software import MemoryProfile, memory_profile
from phalanx.cost.memory_states import state_bytes
from phalanx.cost.model_shape import ModelShape
from phalanx.cost.training_plans import CONTEXT_KINDS, RECOMPUTE, SCHEDULES, Column, TrainingPlans

TERMS = (
    "weights",
    "gradients",
    "moments",
    "activations",
    "logits",
    "gathered",
    "buffers",
    "fragmentation",
    "context",
)
_BAR = 1.645  # standard deviations of a 90 % bar


class Device(Protocol):
    """What is read of a machine."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class MemoryTerms:
    """Bytes of the fullest rank of N plans.

    Attributes:
        terms: name (of `TERMS`) -> [N]; they sum to `peak_bytes`.
        peak_bytes, low_bytes, high_bytes: expected peak and its 90 % bar.
        host_bytes: of a rank's optimizer states in host memory.
        profile: what the software keeps.
    """

    terms: Mapping[str, Column]
    host_bytes: Column
    profile: MemoryProfile

    @property
    def peak_bytes(self) -> Column:
        """What a device must have free."""
        return sum(self.terms.values(), start=np.zeros(1))

    @property
    def low_bytes(self) -> Column:
        """5th percentile."""
        return self.peak_bytes * np.exp(-_BAR * self.profile.log_spread)

    @property
    def high_bytes(self) -> Column:
        """95th percentile."""
        return self.peak_bytes * np.exp(_BAR * self.profile.log_spread)

    def fits_probability(self, limit_bytes: float) -> Column:
        """Chance that a device with so many bytes holds each plan (log-normal error)."""
        scores = np.log(limit_bytes / self.peak_bytes) / self.profile.log_spread
        return 0.5 * (1.0 + _erf(scores / sqrt(2.0)))


_erf = np.vectorize(erf, otypes=[float])


def training_memory(shape: ModelShape, plans: TrainingPlans, machine: Device) -> MemoryTerms:
    """Bytes of the fullest rank of every plan, by term.

    Raises:
        JobError: `registry/unknown` for software without a profile.
    """
    profile = memory_profile(plans.software)
    columns = {name: column + 0 for name, column in plans.columns().items()}
    kept = layer_bytes(shape, profile)
    pipeline = columns["pipeline"]
    ranks = (np.zeros_like(pipeline), np.minimum(1, pipeline - 1), pipeline - 1)
    places = [_terms_at(shape, plans, columns, profile, kept, rank) for rank in ranks]
    peaks = np.stack([sum(terms.values()) for terms, _ in places])
    fullest = peaks.argmax(axis=0)
    terms = {name: np.choose(fullest, [place[0][name] for place in places]) for name in TERMS}
    host = np.choose(fullest, [place[1] for place in places])
    return MemoryTerms(terms, host, profile)


def stage_layers(num_layers: int, pipeline: Column, virtual: Column, rank: Column) -> Column:
    """Layers of a pipeline rank.

    Equal where they divide; one less on the first and last rank where that divides (embedding and
    head count as layers, as Llama 3's 126 layers on 16 x 8 stages); else rounded up.
    """
    stages = pipeline * virtual
    even = num_layers / pipeline
    is_even = num_layers % stages == 0
    is_balanced = (num_layers + 2) % stages == 0
    at_end = (rank == 0) | (rank == pipeline - 1)
    balanced = (num_layers + 2) / pipeline - np.where(at_end, 1.0, 0.0)
    rounded = np.ceil(num_layers / stages) * virtual
    uneven = np.where(is_balanced & (pipeline > 1), balanced, np.minimum(rounded, num_layers))
    return np.where(is_even, even, uneven)


def _terms_at(
    shape: ModelShape,
    plans: TrainingPlans,
    columns: Mapping[str, Column],
    profile: MemoryProfile,
    kept: LayerBytes,
    rank: Column,
) -> tuple[dict[str, Column], Column]:
    """Terms of one pipeline rank of each plan."""
    pipeline = columns["pipeline"]
    is_first, is_last = rank == 0, rank == pipeline - 1
    virtual = np.where(columns["schedule"] == SCHEDULES.index("interleaved"), columns["virtual"], 1)
    layers = stage_layers(shape.num_layers, pipeline, virtual, rank)
    frac = layers / shape.num_layers
    head = is_last & (not shape.tied_head or (pipeline > 1))
    states = state_bytes(
        shape,
        columns,
        profile,
        layer_frac=frac,
        tables=is_first * 1.0 + head * 1.0,
        method=plans.method,
        lora_rank=plans.lora_rank,
        base_bits=plans.base_bits,
        precision=plans.precision,
    )
    tokens = columns["micro_rows"] * columns["row_tokens"] / columns["context"]
    per_stream = np.where(
        (columns["sequence_parallel"] > 0) | profile.sequence_parallel, columns["tensor"], 1
    )
    whole, inputs, matrix = _kept(kept, columns, tokens, per_stream)
    selective = profile.selective_keeps * whole if profile.selective_keeps else whole - matrix
    recompute = columns["recompute"]
    each = np.choose(recompute, [whole, selective, inputs])
    held = chunks_in_flight(
        columns["schedule"], pipeline, rank, columns["virtual"], columns["num_micro"]
    )
    one_layer = whole / shape.num_layers
    again = np.where(recompute == RECOMPUTE.index("full"), one_layer, 0.0)
    activations = held * frac * each + again
    logits = _logits(shape, columns, profile, tokens, per_stream) * is_last
    buffers = profile.working_frac * one_layer + _exchange(shape, columns, tokens)
    moving = activations + logits + buffers + states.gathered
    terms = {
        "weights": states.weights,
        "gradients": states.gradients,
        "moments": states.moments,
        "activations": activations,
        "logits": logits,
        "gathered": states.gathered,
        "buffers": buffers,
        "fragmentation": profile.fragmentation_frac * moving,
        "context": np.full(rank.shape, profile.context_bytes),
    }
    return terms, states.host


def _kept(
    kept: LayerBytes, columns: Mapping[str, Column], tokens: Column, per_stream: Column
) -> tuple[Column, Column, Column]:
    """(all, inputs alone, attention matrices) bytes of all layers and one micro-batch."""
    tensor = columns["tensor"]
    matrix = tokens * columns["document_tokens"] * kept.matrix / tensor
    fixed = kept.stream / per_stream + kept.inner / tensor
    shared = kept.shared_heads / np.minimum(tensor, kept.num_shared_heads)
    sent = columns["expert_imbalance"] * columns["expert_tensor"] / tensor
    routed = sent * (kept.routed_stream + kept.routed_inner / columns["expert_tensor"])
    whole = tokens * (fixed + shared + routed) + matrix
    return whole, tokens * kept.inputs / per_stream, matrix


def _logits(
    shape: ModelShape,
    columns: Mapping[str, Column],
    profile: MemoryProfile,
    tokens: Column,
    per_stream: Column,
) -> Column:
    """The final norm's input, the head's, and the logits at tokens that count."""
    per_logit = profile.logit_bytes / (columns["tensor"] if profile.splits_loss else 1)
    inputs = 2.0 * ITEM_BYTES * shape.hidden / per_stream
    return tokens * (inputs + columns["counted_frac"] * per_logit * shape.vocab)


def _exchange(shape: ModelShape, columns: Mapping[str, Column], tokens: Column) -> Column:
    """Buffers of communication: between stages, and of gathered tokens or keys and values."""
    hidden = ITEM_BYTES * shape.hidden * tokens
    between = np.where(columns["pipeline"] > 1, 2.0 * hidden, 0.0)
    inside = np.where(columns["tensor"] > 1, hidden, 0.0)
    cached = max(layer.attention.cached_per_token for layer in shape.layers)
    keys = ITEM_BYTES * cached * tokens / columns["tensor"]
    whole = columns["context_kind"] == CONTEXT_KINDS.index("all-gather")
    copies = np.where(whole, columns["context"], 2.0)
    return between + inside + np.where(columns["context"] > 1, copies * keys, 0.0)
