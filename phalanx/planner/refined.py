"""Plans played as events: what a closed form of the pipeline leaves out.

The formula of a step (`cost.training_step`) gives every schedule an idle share for equal stages and
adds messages one after another. Here the schedule itself is played, with stages of unequal layers,
the head on the last, messages that hide behind compute where they can, and, if asked, documents of
other lengths on every rank. Everything else of the step keeps the formula's seconds. No torch.

Stages are those of the program that runs the plan (`planner.cuts`), so the busiest rank may hold
other layers than the formula's. A pass of a chunk of l layers takes l times a layer's parts of a
micro-batch (`cost.training_passes`); input and weight gradients each compute again what they need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.training_bubble import bubble_micro_batches
from phalanx.cost.training_passes import (
    FORWARD_SHARE,
    OF_LAYERS,
    counted_layers,
    head_seconds,
    layer_passes,
)
from phalanx.cost.training_plans import SCHEDULES, TrainingPlans
from phalanx.cost.training_step import StepTimes, training_step
from phalanx.errors import JobError
from phalanx.hardware import Machine
from phalanx.planner.cuts import Cut, equal_cut
from phalanx.planner.runnable import order_table
from phalanx.policy import Order
from phalanx.registry import build
from phalanx.worlds.pipeline_arrays import Played, Wired, play, wire

PLAYED = tuple(name for name in SCHEDULES if order_table(name, 2))  # schedules that have an order
_LONG, _LONGER = 3, 5  # times as many micro-batches as ranks: the middle repeats itself from here


@dataclass(frozen=True)
class Refined:
    """N plans, with the pipeline's part played.

    Attributes:
        parts: what the steps are spent on -> seconds of the busiest rank [N]; they sum to a step.
        total_s: the steps [N].
        waits_s: time of the busiest pipeline rank in which it waits, of the whole step [N].
        is_played: whether the plan's schedule was played; others keep the formula [N].
    """

    parts: Mapping[str, np.ndarray]
    total_s: np.ndarray
    waits_s: np.ndarray
    is_played: np.ndarray


def refine(
    shape: ModelShape, plans: TrainingPlans, times: StepTimes, cut: Cut | None = None
) -> Refined:
    """Play the pipelines of some plans, one after another (5 to 100 ms each).

    Args:
        times: of these plans, from `training_step`.
        cut: of the program that runs them; None: equal chunks.
    """
    columns, count = plans.columns(), (plans.shape or (1,))[0]
    new = {name: np.array(each, dtype=float).reshape(count) for name, each in times.parts.items()}
    waits_s = new["bubble"] + new["pipeline"]
    is_played = np.zeros(count, dtype=bool)
    for at in range(count):
        row = {name: column[at] for name, column in columns.items()}
        if row["pipeline"] == 1 or SCHEDULES[row["schedule"]] not in PLAYED:
            continue
        parts = {name: float(values[at]) for name, values in new.items()}
        stages = _stages(shape, plans, row, parts, cut or partial(equal_cut, shape.num_layers))
        waits_s[at], is_played[at] = _waits_of(row, stages), True
        for name, seconds in _of_busiest(row, stages, parts, float(waits_s[at])).items():
            new[name][at] = seconds
    return Refined(new, np.sum(list(new.values()), axis=0), waits_s, is_played)


@dataclass(frozen=True)
class _Stages:
    """Seconds of one micro-batch [stages, 1, 1], and of a message.

    Attributes:
        layers: of each stage; holder: the rank that has it; counted: layers that the formula's
            parts are of.
        head_s: of a micro-batch, both passes.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    weight_s: np.ndarray
    input_s: np.ndarray
    message_s: float
    layers: np.ndarray
    holder: Sequence[int]
    counted: float
    head_s: float

    def play(self, wired: Wired, weight: Any = 1.0, message_s: float | None = None) -> Played:
        """The schedule with these, times a weight that broadcasts to [stages, items, replicas]."""
        forward_s, backward_s, weight_s, input_s = (
            each * weight for each in (self.forward_s, self.backward_s, self.weight_s, self.input_s)
        )
        took_s = self.message_s if message_s is None else message_s
        return play(wired, forward_s, backward_s, took_s, weight_s, input_s)


def _stages(
    shape: ModelShape,
    plans: TrainingPlans,
    row: dict[str, Any],
    parts: dict[str, float],
    cut: Cut,
) -> _Stages:
    pipeline, chunks = int(row["pipeline"]), _chunks(row)
    layers = cut(pipeline * chunks)
    holder = _order(SCHEDULES[row["schedule"]], chunks).rank_of_stage(pipeline)
    counted = counted_layers(shape, row, parts)
    each = {name: parts[name] / row["num_micro"] / counted for name in OF_LAYERS}
    passes = layer_passes(plans.method, row, each)
    head_s = head_seconds(shape, row, parts)
    share, weight_share = FORWARD_SHARE[plans.method], (plans.method != "lora") / 3
    is_last = np.zeros(len(layers))
    is_last[-1] = 1.0

    def of_stages(layer_s: float, head_share: float) -> np.ndarray:
        return (layers * layer_s + is_last * head_share * head_s)[:, None, None]

    idle = bubble_micro_batches(row["schedule"], pipeline, row["virtual"], row["num_micro"])
    messages = 2 * row["virtual"] * (row["num_micro"] + idle)
    return _Stages(
        forward_s=of_stages(passes.forward_s, share),
        backward_s=of_stages(passes.backward_s, 1 - share),
        weight_s=of_stages(passes.weight_s, weight_share),
        input_s=of_stages(passes.input_s, 1 - share - weight_share),
        message_s=parts["pipeline"] / float(messages),
        layers=layers,
        holder=holder,
        counted=counted,
        head_s=head_s,
    )


def _of_busiest(
    row: Mapping[str, Any], stages: _Stages, parts: Mapping[str, float], waits_s: float
) -> dict[str, float]:
    """The parts of the rank that works longest, whose waits these are; others stay as they are."""
    layer_s = sum(parts[name] for name in OF_LAYERS) / stages.counted
    work = np.bincount(stages.holder, weights=stages.layers) * layer_s
    work[stages.holder[-1]] += stages.head_s * row["num_micro"]
    busiest = int(work.argmax())
    layers = sum(n for n, rank in zip(stages.layers, stages.holder) if rank == busiest)
    new = {name: parts[name] * layers / stages.counted for name in OF_LAYERS}
    is_last = busiest == stages.holder[-1]
    new["head"] = stages.head_s * row["num_micro"] if is_last else 0.0
    new["pipeline"] = min(parts["pipeline"], waits_s)
    return new | {"bubble": waits_s - new["pipeline"]}


def _chunks(row: dict[str, Any]) -> int:
    """Model chunks of a rank."""
    schedule = SCHEDULES[row["schedule"]]
    if schedule in ("interleaved", "hanayo"):
        return int(row["virtual"])
    return 2 if schedule in ("zbv", "dualpipe-v") else 1


def _order(schedule: str, chunks: int) -> Order:
    table = order_table(schedule, chunks)
    assert table is not None
    order: Order = build("pipeline", {k: v for k, v in table.items() if k != "family"})
    return order


@lru_cache(maxsize=64)
def _wired(schedule: str, pipeline: int, chunks: int, num_micro: int) -> Wired:
    return wire(_order(schedule, chunks).order(pipeline, num_micro))


def _waits_of(row: dict[str, Any], stages: _Stages) -> float:
    """Of the busiest rank. A long step repeats its middle, so two shorter ones tell it."""
    pipeline, num_micro = int(row["pipeline"]), int(row["num_micro"])
    if num_micro <= _LONGER * pipeline:
        return _played_waits(row, stages, num_micro)
    short, longer = _LONG * pipeline, _LONGER * pipeline
    first_s, second_s = (_played_waits(row, stages, count) for count in (short, longer))
    return first_s + (second_s - first_s) * (num_micro - short) / (longer - short)


def _played_waits(row: dict[str, Any], stages: _Stages, num_micro: int) -> float:
    name = SCHEDULES[row["schedule"]]
    wired = _wired(name, int(row["pipeline"]), _chunks(row), num_micro)
    played = stages.play(wired)
    return float(played.step_s[0] - played.busy_s.max())


@dataclass(frozen=True)
class DocumentStep:
    """A step in which every data rank has documents of its own.

    Attributes:
        step_s: until the slowest rank is through, with the exchange of gradients and the optimizer.
        pipeline_s: of each data rank, forward and backward passes with their waits [data].
        played: all pipelines.
        work_imbalance: work of the heaviest data rank over the mean.
    """

    step_s: float
    pipeline_s: np.ndarray
    played: Played
    work_imbalance: float


def play_documents(
    shape: ModelShape,
    plan: TrainingPlans,
    machine: Machine,
    documents: Sequence[Sequence[Sequence[int]]],
    cut: Cut | None = None,
) -> DocumentStep:
    """Play one plan with the documents that each data rank really has. Nothing is folded.

    Args:
        plan: a table of one row.
        documents: data rank -> micro-batch -> lengths of its documents, in tokens; every rank the
            same number of micro-batches. Work within a context group is taken as equal.
        cut: as `refine`.

    Raises:
        JobError: `job/bad-value` for documents that do not match the plan, or have no length.
    """
    row = {name: column[0] for name, column in plan.columns().items()}
    tokens_DM, squares_DM = _sums(documents, int(row["data"]), int(row["num_micro"]))
    schedule = SCHEDULES[row["schedule"]]
    if schedule not in PLAYED:
        rule = "this schedule has no order to play"
        raise JobError("job/bad-value", "schedule", schedule, rule, legal=PLAYED)
    even = replace(plan, imbalance=1.0)
    mean_tokens, row_tokens = float(tokens_DM.mean()), int(row["micro_rows"] * row["row_tokens"])
    short, long = (
        training_step(shape, replace(even, document_tokens=length), machine)
        for length in (max(1, row_tokens // 2), row_tokens)
    )
    parts = {name: float(values.reshape(-1)[0]) for name, values in long.parts.items()}
    stages = _stages(shape, plan, row, parts, cut or partial(equal_cut, shape.num_layers))
    # seconds are linear in the tokens of a micro-batch and in the squares of its documents
    fixed = 2 * short.parts["compute"] - long.parts["compute"]
    square_share = 1.0 - float(fixed.reshape(-1)[0]) / parts["compute"]
    weight_DM = (1 - square_share) * tokens_DM / row_tokens
    weight_DM = weight_DM + square_share * squares_DM / (row_tokens * float(row_tokens))
    weight_1MD = weight_DM.T[None]
    wired = _wired(schedule, int(row["pipeline"]), _chunks(row), int(row["num_micro"]))
    message_s = stages.message_s * mean_tokens / row_tokens
    played = stages.play(wired, weight_1MD, message_s)
    after_s = parts["data"] + parts["optimizer"]
    work_D = weight_DM.sum(axis=1)
    return DocumentStep(
        step_s=float(played.step_s.max()) + after_s,
        pipeline_s=played.step_s,
        played=played,
        work_imbalance=float(work_D.max() / work_D.mean()),
    )


def _sums(
    documents: Sequence[Sequence[Sequence[int]]], data: int, num_micro: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and squares of lengths, of each micro-batch [data, micro-batches]."""
    counts = {len(rank) for rank in documents}
    if len(documents) != data or counts != {num_micro}:
        rule = f"must give {num_micro} micro-batches for each of {data} data ranks"
        given = f"{len(documents)} ranks of {sorted(counts)} micro-batches"
        raise JobError("job/bad-value", "documents", given, rule)
    tokens, squares = np.zeros((data, num_micro)), np.zeros((data, num_micro))
    for at, rank in enumerate(documents):
        for item, lengths in enumerate(rank):
            each = np.asarray(lengths, dtype=float)
            if not each.size or not (each >= 1).all():
                where = f"documents[{at}][{item}]"
                raise JobError("job/bad-value", where, list(lengths)[:4], "needs lengths >= 1")
            tokens[at, item], squares[at, item] = each.sum(), (each * each).sum()
    return tokens, squares
