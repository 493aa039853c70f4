"""Peak memory of the fullest rank of many training plans at once. No torch.

The peak of a rank is what it always holds (weights, gradients, optimizer states), plus what its
schedule makes it keep at once (activations), plus what lives for a moment (logits, buffers of a
layer, gathered units), plus what its software adds (fragmentation, the driver's context). Three
pipeline ranks are priced (`memory_stages`), and the fullest one counts.

Sources: `memory_formulas` for what a layer keeps; `memory_software` for what each program does.
Bars: 5th and 95th percentile of published over predicted memory by software
(`memory_software.json`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import erf, sqrt
from typing import Protocol

import numpy as np

from phalanx.cost.memory_activations import (
    ITEM_BYTES,
    LayerBytes,
    chunks_in_flight,
    chunks_waiting,
    layer_bytes,
    output_bytes,
)
from phalanx.cost.memory_software import NORMAL_95, MemoryProfile, memory_profile
from phalanx.cost.memory_stages import Stage, Stages, even_stages, stages_by_cost
from phalanx.cost.memory_states import state_bytes
from phalanx.cost.model_shape import ModelShape
from phalanx.cost.training_plans import CONTEXT_KINDS, RECOMPUTE, SCHEDULES, Column, TrainingPlans
from phalanx.hardware import Figure

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
_UNLOGGED = {"device": (), "reserved": ("context",), "allocated": ("context", "fragmentation")}


class Device(Protocol):
    """What is read of a machine."""

    @property
    def memory(self) -> Figure: ...


@dataclass(frozen=True)
class MemoryTerms:
    """Bytes of the fullest rank of N plans.

    Attributes:
        terms: name (of `TERMS`) -> [N]; they sum to `peak_bytes`.
        logged_bytes: what the software's own log prints: of the rank that logs, without what its
            counter does not see. Published figures are compared with this.
        host_bytes: of a rank's optimizer states in host memory.
        all_busy: every pipeline rank has a layer, the head or the loss; others cannot run.
        profile: what the software keeps.
        device_bytes: memory of the device, as its driver shows it.
    """

    terms: Mapping[str, Column]
    logged_bytes: Column
    host_bytes: Column
    all_busy: Column
    profile: MemoryProfile
    device_bytes: float = float("inf")

    @property
    def peak_bytes(self) -> Column:
        """What a device must have free."""
        return sum(self.terms.values(), start=np.zeros(1))

    @property
    def low_bytes(self) -> Column:
        """5th percentile."""
        return self.peak_bytes * np.exp(self.profile.low_log)

    @property
    def high_bytes(self) -> Column:
        """95th percentile."""
        return self.peak_bytes * np.exp(self.profile.high_log)

    @property
    def logged_low_bytes(self) -> Column:
        """5th percentile of `logged_bytes`."""
        return self.logged_bytes * np.exp(self.profile.low_log)

    @property
    def logged_high_bytes(self) -> Column:
        """95th percentile of `logged_bytes`."""
        return self.logged_bytes * np.exp(self.profile.high_log)

    def fits_probability(self, limit_bytes: float | None = None) -> Column:
        """Chance that a device with so many bytes (None: all that the machine has) runs each plan.

        The logarithm of the error is normal on either side of its median, as wide as the bar there;
        a plan that leaves a pipeline rank without work has none.
        """
        limit = self.device_bytes if limit_bytes is None else limit_bytes
        room = np.log(limit / self.peak_bytes)
        width = np.where(room > 0, self.profile.high_log, -self.profile.low_log) / NORMAL_95
        return 0.5 * (1.0 + _erf(room / width / sqrt(2.0))) * self.all_busy


_erf = np.vectorize(erf, otypes=[float])


def training_memory(
    shape: ModelShape,
    plans: TrainingPlans,
    machine: Device | None = None,
    profile: MemoryProfile | None = None,
) -> MemoryTerms:
    """Bytes of the fullest rank of every plan, by term.

    Args:
        machine: how much memory there is; what a program keeps is the same on all.
        profile: another than that of the plans' software.

    Raises:
        JobError: `registry/unknown` for software without a profile.
    """
    profile = (profile or memory_profile(plans.software)).for_training(
        plans.precision, plans.method
    )
    columns = {name: column + 0 for name, column in plans.columns().items()}
    kept = _by_kind(shape, profile, plans)
    stages = _stages(shape, columns, profile)
    places = [
        _terms_at(shape, plans, columns, profile, *kept, stage)
        for stage in (stages.first, stages.second, stages.head)
    ]
    peaks = np.stack([sum(terms.values()) for terms, _ in places])
    fullest = peaks.argmax(axis=0)
    terms = {name: np.choose(fullest, [place[0][name] for place in places]) for name in TERMS}
    logged = places[0][0] if profile.logs_first else terms
    return MemoryTerms(
        terms,
        logged_bytes=sum(
            (term for name, term in logged.items() if name not in _UNLOGGED[profile.logs]),
            start=np.zeros(1),
        ),
        host_bytes=np.choose(fullest, [place[1] for place in places]),
        all_busy=stages.all_busy,
        profile=profile,
        device_bytes=machine.memory.value if machine else float("inf"),
    )


def _stages(shape: ModelShape, columns: Mapping[str, Column], profile: MemoryProfile) -> Stages:
    if profile.stages == "by-cost":
        return stages_by_cost(shape, columns["pipeline"])
    return even_stages(shape.num_layers, columns["pipeline"], _chunks(columns))


def _chunks(columns: Mapping[str, Column]) -> Column:
    """Separate chunks of layers on a rank."""
    has_chunks = [SCHEDULES.index(name) for name in ("interleaved", "hanayo")]
    return np.where(np.isin(columns["schedule"], has_chunks), columns["virtual"], 1)


def _by_kind(
    shape: ModelShape, profile: MemoryProfile, plans: TrainingPlans
) -> tuple[list[LayerBytes], list[LayerBytes]]:
    """What is kept, and what is put out, of all layers without and of all with experts."""
    adapters = plans.lora_targets or profile.adapters if plans.method == "lora" else ""
    dense = [layer for layer in shape.layers if not layer.feed_forward.num_experts]
    mixed = [layer for layer in shape.layers if layer.feed_forward.num_experts]
    return (
        [layer_bytes(each, shape.hidden, profile, adapters) for each in (dense, mixed)],
        [output_bytes(each, shape.hidden, adapters) for each in (dense, mixed)],
    )


def _terms_at(
    shape: ModelShape,
    plans: TrainingPlans,
    columns: Mapping[str, Column],
    profile: MemoryProfile,
    kept: Sequence[LayerBytes],
    put_out: Sequence[LayerBytes],
    stage: Stage,
) -> tuple[dict[str, Column], Column]:
    """Terms of one pipeline rank of each plan, and what it has in host memory."""
    shares = stage.shares(shape, _chunks(columns))
    both = stage.has_embedding * stage.has_head
    states = state_bytes(
        shape,
        columns,
        profile,
        shares=shares,
        tables=stage.has_embedding + stage.has_head - both * shape.tied_head,
        has_embedding=stage.has_embedding,
        method=plans.method,
        lora_rank=plans.lora_rank,
        lora_targets=plans.lora_targets,
        base_bits=plans.base_bits,
    )
    tokens = columns["micro_rows"] * columns["row_tokens"] / columns["context"]
    is_split = (columns["sequence_parallel"] > 0) | profile.sequence_parallel
    per_stream = np.where(is_split, columns["tensor"], 1)
    by_kind = [_kept(each, columns, tokens, per_stream) for each in kept]
    whole, inputs, matrix = (
        shares[0] * dense + shares[1] * mixed for dense, mixed in zip(*by_kind)
    )
    selective = profile.selective_keeps * whole if profile.selective_keeps else whole - matrix
    recompute = columns["recompute"]
    each = np.choose(recompute, [whole, selective, inputs])
    held = chunks_in_flight(
        columns["schedule"],
        columns["pipeline"],
        stage.rank,
        columns["virtual"],
        columns["num_micro"],
    )
    one_layer = whole / np.maximum(stage.layers, 1.0)
    again = np.where(recompute == RECOMPUTE.index("full"), one_layer, 0.0)
    once = profile.stage_input * shape.hidden * tokens
    keys = _gathered_keys(shape, columns, profile, tokens)
    kept_keys = np.where(recompute == RECOMPUTE.index("full"), 1.0, held * stage.layers) * keys
    activations = held * (each + once) + again + kept_keys
    if profile.keeps_waiting_outputs:
        outputs = (_kept(each, columns, tokens, per_stream)[0] for each in put_out)
        waiting = chunks_waiting(
            columns["schedule"], columns["pipeline"], stage.rank, columns["num_micro"]
        )
        activations = activations + waiting * sum(map(np.multiply, shares, outputs))
    logits = _logits(shape, columns, profile, tokens, per_stream) * stage.has_head
    buffers = profile.working_frac * one_layer + _exchange(shape, columns, profile, tokens)
    gathered = states.gathered + np.maximum(0.0, states.late - activations)
    moving = activations + logits + buffers + gathered
    terms = {
        "weights": states.weights,
        "gradients": states.gradients,
        "moments": states.moments,
        "activations": activations,
        "logits": logits,
        "gathered": gathered,
        "buffers": buffers,
        "fragmentation": profile.fragmentation_frac * moving,
        "context": np.full(moving.shape, profile.context_bytes),
    }
    return terms, states.host


def _kept(
    kept: LayerBytes, columns: Mapping[str, Column], tokens: Column, per_stream: Column
) -> tuple[Column, Column, Column]:
    """(all, inputs alone, attention matrices) bytes of such layers and one micro-batch."""
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
    logits = tokens * columns["counted_frac"] * per_logit * shape.vocab
    if profile.most_logit_bytes:
        logits = np.minimum(logits, profile.most_logit_bytes)
    return tokens * inputs + logits


def _gathered_keys(
    shape: ModelShape, columns: Mapping[str, Column], profile: MemoryProfile, tokens: Column
) -> Column:
    """Keys and values of other ranks' tokens that a mean layer keeps, where its software does.

    All other tokens of the row, 2 (N - 1) c g D e / t; of a layer with a window of w those that its
    queries see, at most 2 (w - 1): a rank holds two stretches of a row.
    """
    gathers = columns["context_kind"] == CONTEXT_KINDS.index("all-gather")
    if not profile.keeps_gathered_keys:
        return np.zeros(1)
    others = (columns["context"] - 1.0) * tokens
    total = np.zeros(1)
    for layer in shape.layers:
        attention = layer.attention
        split = np.minimum(columns["tensor"], max(1, attention.num_kv_heads))
        most = columns["micro_rows"] * 2.0 * (attention.window - 1 if attention.window else np.inf)
        seen = np.minimum(others, most)
        total = total + layer.count * ITEM_BYTES * attention.cached_per_token * seen / split
    return np.where(gathers, total / shape.num_layers, 0.0)


def _exchange(
    shape: ModelShape, columns: Mapping[str, Column], profile: MemoryProfile, tokens: Column
) -> Column:
    """Buffers of communication: between stages, and of gathered tokens or keys and values."""
    hidden = ITEM_BYTES * shape.hidden * tokens
    between = np.where(columns["pipeline"] > 1, 2.0 * hidden, 0.0)
    late = np.where(columns["pipeline"] > 1, 0.0, profile.late_copies)
    inside = np.where(columns["tensor"] > 1, (profile.token_copies + late) * hidden, 0.0)
    cached = max(layer.attention.cached_per_token for layer in shape.layers)
    keys = ITEM_BYTES * cached * tokens / columns["tensor"]
    whole = columns["context_kind"] == CONTEXT_KINDS.index("all-gather")
    held = np.where(whole, columns["context"], 2.0)
    return between + inside + np.where(columns["context"] > 1, held * keys, 0.0)
