"""The step that a plan for this machine should take, operator by operator. No torch.

The plan's program is lowered and played in virtual time with the rates of its calibration. Its rows
are named as a measured step names them: "step", a span per pass of a micro-batch ("F0", "B0", "O"),
collectives on the lanes of their axes, and operators on a lane of their own.

Differences: micro-batches of a typical step are alike; ranks are alike. On CPUs a collective takes
its turn among the computes, since gloo needs the same cores, which is how `cost.training` adds them
up; elsewhere it overlaps and the simulated step may end before the predicted sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from phalanx.action import Action, Collective, Program
from phalanx.cost.local_shapes import local_config
from phalanx.cost.rates import RatesCost
from phalanx.cost.step_work import Workload
from phalanx.cost.training import Pipeline, Prediction, Priced, predict, priced_operators
from phalanx.drive import drive
from phalanx.lower import lower
from phalanx.models.config import DTYPE_BYTES, DecoderConfig
from phalanx.plan import Plan, RoleProgram
from phalanx.planner.training_shape import pipeline_of
from phalanx.planner.work import block_of, model_work
from phalanx.registry import build
from phalanx.trace import Trace, TraceBuilder
from phalanx.worlds.sim import SimWorld

# A simulated step further from the predicted seconds than this is explained.
AGREES_FRAC = 0.05
_EXCHANGES = ("gather", "reduce", "exchange")
_PASSES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
    "O": "optimizer",
}
_RATED = ("all_gather", "reduce_scatter", "all_reduce", "p2p")


@dataclass(frozen=True)
class StepForecast:
    """A training step as predicted and as simulated.

    Attributes:
        trace: one simulated step of every rank, from time 0.
        prediction: seconds by kind of operator, bytes of a rank by what they are for.
        num_ranks: of the role.
    """

    trace: Trace
    prediction: Prediction
    num_ranks: int

    @property
    def gap_frac(self) -> float:
        """Relative distance of the simulated end from the predicted step time."""
        return self.trace.end_s / self.prediction.step_s - 1.0

    @property
    def why(self) -> str:
        """Why the two differ; "" where they agree within `AGREES_FRAC`."""
        if abs(self.gap_frac) <= AGREES_FRAC:
            return ""
        said_s = sum(self.prediction.seconds.get(name, 0.0) for name in _EXCHANGES)
        played = self.trace.where(rank=0)
        played_s = float(played.columns["dur_s"][played.column("axis") != ""].sum())
        told = (
            f"the simulated step ends {self.gap_frac:+.1%} from the predicted sum; of it "
            f"{played_s:.3g} s are communication, where the sum counts {said_s:.3g} s"
        )
        if self.trace.notes["overlaps"]:
            return f"{told}; it overlaps communication with computing, the sum does not"
        if self.trace.notes["micro_batches"] != self.trace.notes["mean_micro_batches"]:
            return f"{told}; it plays whole micro-batches, the sum counts their mean number"
        return f"{told}; a rank alone on its axis talks to nobody, but copies what it would gather"


def step_forecast(plan: Plan, config: DecoderConfig, work: Workload) -> StepForecast:
    """Predict and simulate one step of the training program of a plan for this machine.

    Args:
        plan: from `planner.here.plan_here`; `hardware["rates"]` are its measured rates.
        config: sizes of the whole model.
        work: the workload that the plan was made for.

    Raises:
        PlanError: `plan/illegal` for a program that needs what has no measured rate.
    """
    role, value = plan.program("train"), dict(plan.hardware["rates"])
    mesh, pipeline = role.grid(), pipeline_of(role, config)
    prediction = predict(
        config,
        work,
        role.built_specs(),
        {key: {"value": rate} for key, rate in value.items()},
        mesh=mesh,
        master_bytes=DTYPE_BYTES[role.dtypes["master"]],
        recompute=role.recompute,
        pipeline=pipeline,
    )
    num_items = max(1, round(work.num_items))
    pieces = _pieces(config, work, value, role.recompute, num_items, pipeline)
    cost = RatesCost(
        block_s={key: sum(each.dur_s for each in found) for key, found in pieces.items()},
        optimizer_s=prediction.seconds["optimizer"] + prediction.seconds["sums"],
        bytes_per_s={k: value[k] for k in _RATED if k in value},
    )
    overlaps = role.device != "cpu"
    program = _program(role, config, work, pipeline, overlaps=overlaps)
    played = drive(SimWorld(mesh, cost, job=plan.job), program=program)
    counts = {"micro_batches": num_items, "mean_micro_batches": work.num_items}
    trace = _named(played, pieces, {"overlaps": overlaps, **counts})
    return StepForecast(trace, prediction, mesh.size)


@dataclass(frozen=True)
class _Piece:
    """An operator of a block: its name, kind and seconds for one micro-batch."""

    name: str
    operator: str
    dur_s: float


_Pieces = Mapping[tuple[str, str], list[_Piece]]


def _pieces(
    config: DecoderConfig,
    work: Workload,
    value: Mapping[str, float],
    recompute: str,
    num_items: int,
    pipeline: Pipeline,
) -> _Pieces:
    """(block, phase) -> its operators in the order in which they run.

    Tables of positions belong to no block: they are made before the first one of every stage.
    """
    firsts = [_first_block(pipeline, stage) for stage in range(pipeline.num_stages)]
    forward: dict[str, list[_Piece]] = {}
    backward: dict[str, list[_Piece]] = {}
    again: dict[str, list[_Piece]] = {}
    inputs: dict[str, list[_Piece]] = {}
    weights: dict[str, list[_Piece]] = {}
    local = local_config(config, work.tensor_degree)
    for priced in priced_operators(local, work, value, recompute):
        weight_s = priced.weight_s(trains_all=work.lora is None)
        left_s = priced.backward_s - weight_s
        for block in firsts if priced.operator.op == "rope" else [block_of(priced.operator)]:
            forward.setdefault(block, []).append(_piece(priced, priced.forward_s / num_items))
            backward.setdefault(block, []).append(_piece(priced, priced.backward_s / num_items))
            inputs.setdefault(block, []).append(_piece(priced, left_s / num_items))
            if weight_s:
                weights.setdefault(block, []).append(_piece(priced, weight_s / num_items))
            if priced.again_s:
                again.setdefault(block, []).append(_piece(priced, priced.again_s / num_items))
    passes = {(block, "F"): found for block, found in forward.items()}
    for block, found in backward.items():
        passes[block, "B"] = again.get(block, []) + found[::-1]
        # what is computed again is let go between the two parts, and computed once more
        passes[block, "W"] = again.get(block, []) + weights.get(block, [])[::-1]
        passes[block, "I"] = again.get(block, []) + inputs[block][::-1]
        if pipeline.stages_of_module(block)[0] == 0:  # torch makes what enters it no gradient
            passes[block, "W"], passes[block, "I"] = passes[block, "B"], []
    return passes


def _first_block(pipeline: Pipeline, stage: int) -> str:
    if stage == 0:
        return "model.embed_tokens"
    start, stop = pipeline.stages[stage]
    return f"model.layers.{start}.self_attn" if stop > start else "model.norm"


def _piece(priced: Priced, dur_s: float) -> _Piece:
    return _Piece(priced.operator.name, priced.operator.op, dur_s)


def _program(
    role: RoleProgram, config: DecoderConfig, work: Workload, pipeline: Pipeline, *, overlaps: bool
) -> Program:
    num_items = max(1, round(work.num_items))
    tokens = round(work.tokens / num_items)
    step = model_work(config, (tokens,) * num_items, lora=work.lora)
    mesh, specs = role.grid(), role.built_specs()
    # of one stage forward and backward take turns
    order = pipeline.order or build("pipeline", {"name": "1f1b"})
    stages = pipeline.units_by_stage(unit.name for unit in step.units)
    program = lower(step, mesh, order, specs, stages=stages)
    kept = {
        unit.name
        for unit in step.units
        for spec in specs
        if spec.family == "data" and (rule := spec.rule_for(unit.name)) and not rule.reshard
    }
    # a frozen unit that stays gathered has been gathered before this step (`policies.data.fsdp`)
    gone = {f"gather:{unit}:F0" for unit in kept} if work.lora else set()
    lists = [
        [_placed(each, gone, overlaps=overlaps) for each in actions if each.label not in gone]
        for actions in program.lists
    ]
    return replace(program, lists=tuple(lists))


def _placed(action: Action, gone: set[str], *, overlaps: bool) -> Action:
    action = replace(action, after=tuple(label for label in action.after if label not in gone))
    if isinstance(action, Collective) and not overlaps:
        return replace(action, lane="compute")
    return action


# ---- rows as a measured step names them ----------------------------------------------------------


def _named(played: Trace, pieces: _Pieces, notes: Mapping[str, Any]) -> Trace:
    builder = TraceBuilder("simulated", played.job)
    builder.notes.update({**played.notes, **notes})
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for row in played.rows():
        if row["dur_s"] > 0 or row["operator"] == "optimizer":
            by_rank.setdefault(row["rank"], []).append({**row, "role": "train"})
    for rows in by_rank.values():
        builder.extend(_of_rank(rows, pieces))
    return builder.build()


def _of_rank(rows: list[dict[str, Any]], pieces: _Pieces) -> Iterator[dict[str, Any]]:
    whole = {"role": "train", "rank": rows[0]["rank"], "step": rows[0]["step"]}
    step = {"action_id": f"step{rows[0]['step']}", "operator": "step", "lane": "step"}
    yield (
        whole | step | {"start_s": 0.0, "dur_s": max(row["start_s"] + row["dur_s"] for row in rows)}
    )
    spans: dict[tuple[str, int], tuple[float, float]] = {}
    for row in rows:
        if row["axis"]:
            yield row | {"lane": f"axis:{row['axis']}"}
            continue
        start_s, end_s = row["start_s"], row["start_s"] + row["dur_s"]
        first_s, last_s = spans.get((row["phase"], row["item"]), (start_s, end_s))
        spans[row["phase"], row["item"]] = (min(first_s, start_s), max(last_s, end_s))
        yield from _operators(row, pieces)
    for (phase, item), (start_s, end_s) in spans.items():
        name = f"{phase}{item}" if item >= 0 else phase
        about = {"action_id": name, "phase": phase, "item": item, "operator": _PASSES[phase]}
        yield whole | about | {"lane": "compute", "start_s": start_s, "dur_s": end_s - start_s}


def _operators(row: dict[str, Any], pieces: _Pieces) -> Iterator[dict[str, Any]]:
    at_s = row["start_s"]
    lane = {"lane": "operators"}
    found = pieces.get((row["layer"], row["phase"]))
    if found is None:  # the optimizer is one
        yield row | lane
        return
    for piece in found:
        about = {"operator": piece.operator, "layer": piece.name, "flops": 0.0}
        yield row | lane | about | {"start_s": at_s, "dur_s": piece.dur_s}
        at_s += piece.dur_s
