"""Predictions of published serving rows, all of a table at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.serving_efficiency import (
    UNSEEN,
    ServingEfficiency,
    keys_of,
    serving_efficiency,
)
from phalanx.cost.serving_goals import trace_at_rate
from phalanx.cost.serving_plans import ServingPlans, join_plans, serving_plans
from phalanx.cost.serving_steady import (
    Loads,
    SteadyState,
    closed_loop,
    saturated,
    split_engines,
    static_batch,
)
from phalanx.cost.serving_step import Rates
from phalanx.hardware import Machine
from phalanx.lab.scores import Estimate
from phalanx.lab.serving_degrees import Degrees
from phalanx.lab.serving_rows import ServingRow


@dataclass(frozen=True)
class ServingPrediction:
    """Of one row: estimates by metric, or why there are none."""

    values: Mapping[str, Estimate]
    reason: str = ""


@dataclass(frozen=True)
class ServingTable:
    """Rows of one kind of load as columns.

    Attributes:
        at: their places in the list that the table was made of.
        plans, prompt_plans: of each engine (the latter of split deployments alone).
        workers: numbers of engines for prompts and answers.
        requests_per_s, num_requests: of traces that arrive at a rate.
        devices: of a deployment.
        keys: of the efficiency tables.
    """

    kind: str
    at: np.ndarray
    plans: ServingPlans
    prompt_plans: ServingPlans | None
    workers: tuple[np.ndarray, np.ndarray]
    loads: Loads
    requests_per_s: np.ndarray
    num_requests: np.ndarray
    devices: np.ndarray
    keys: Mapping[str, np.ndarray]

    def state(self, rates: Rates) -> SteadyState:
        """What its engines do under their loads."""
        if self.kind == "split":
            assert self.prompt_plans is not None
            return split_engines(self.prompt_plans, self.plans, self.workers, self.loads, rates)
        if self.kind == "open":
            return trace_at_rate(
                self.plans, self.loads, rates, self.requests_per_s, self.num_requests
            )
        by_kind = {"closed": closed_loop, "saturated": saturated, "static": static_batch}
        return by_kind[self.kind](self.plans, self.loads, rates)

    def metrics(self, rates: Rates) -> dict[str, np.ndarray]:
        """By the names of `serving_rows.METRICS`."""
        state = self.state(rates)
        return {
            "ttft_s": state.ttft_s,
            "tpot_s": state.tpot_s,
            "latency_s": state.latency_s,
            "output_tokens_per_s_per_device": state.output_tokens_per_s / self.devices,
        }


def predict_serving(
    rows: Sequence[ServingRow], efficiency: ServingEfficiency | None = None
) -> list[ServingPrediction]:
    """One prediction for each row; rows that lack minimum inputs get the reason instead.

    Args:
        efficiency: other coefficients than those that come with Phalanx.
    """
    efficiency = efficiency or serving_efficiency()
    found = [ServingPrediction({}, _reason(row)) for row in rows]
    for table in tables_of(rows):
        metrics = table.metrics(efficiency.rates_of(table.keys))
        for place, at in enumerate(table.at):
            values = {}
            for name, column in metrics.items():
                low, high = efficiency.bar(name, *_regimes(rows[at], efficiency))
                value = float(column[place])
                values[name] = Estimate(value, value * low, value * high)
            found[at] = ServingPrediction(values)
    return found


def tables_of(rows: Sequence[ServingRow]) -> list[ServingTable]:
    """Predictable rows, by kind of load."""
    places: dict[str, list[int]] = {}
    for at, row in enumerate(rows):
        if row.is_predictable:
            places.setdefault(row.kind, []).append(at)
    return [_table(kind, at, [rows[place] for place in at]) for kind, at in places.items()]


def _table(kind: str, at: list[int], rows: list[ServingRow]) -> ServingTable:
    plans = join_plans([_plan(row, row.degrees) for row in rows])
    prompts = [row.prompt_degrees for row in rows if row.prompt_degrees]
    prompt_plans = None
    if kind == "split":
        prompt_plans = join_plans(
            [_plan(row, degrees) for row, degrees in zip(rows, prompts, strict=True)]
        )
    concurrency = [row.concurrency or np.inf for row in rows]
    loads = Loads(
        prompt_tokens=_column([row.prompt_tokens for row in rows]),
        answer_tokens=_column([row.answer_tokens for row in rows]),
        concurrency=_column(concurrency),
    )
    return ServingTable(
        kind=kind,
        at=np.asarray(at),
        plans=plans,
        prompt_plans=prompt_plans,
        workers=(
            _column([each.workers for each in prompts] if prompts else [1] * len(rows)),
            _column([row.degrees.workers for row in rows]),
        ),
        loads=loads,
        requests_per_s=_column([row.requests_per_s for row in rows]),
        num_requests=_column([row.num_requests for row in rows]),
        devices=_column([row.devices for row in rows]),
        keys=keys_of(plans, np.asarray([row.load for row in rows], dtype=object)),
    )


def _plan(row: ServingRow, degrees: Degrees) -> ServingPlans:
    assert row.shape is not None and row.machine is not None  # else the row lacks inputs
    return _cached_plan(
        row.shape, row.machine, degrees._replace(workers=1), row.precision, row.software
    )


@lru_cache(maxsize=4096)
def _cached_plan(
    shape: ModelShape, machine: Machine, degrees: Degrees, precision: str, software: str
) -> ServingPlans:
    return serving_plans(
        shape,
        machine,
        tensor=degrees.tensor,
        pipeline=degrees.pipeline,
        expert=degrees.expert,
        attention_dp=degrees.attention_dp,
        precision=precision,
        software=software,
    )


def _column(values: Sequence[float]) -> np.ndarray:
    return np.asarray(values, dtype=float)


def _reason(row: ServingRow) -> str:
    if row.missing:
        return f"insufficient input: {'; '.join(row.missing)}"
    return f"unknown {row.unknown}" if row.unknown else ""


def regimes(row: ServingRow) -> tuple[str, str, str]:
    """What a row's bars are looked up by, the narrowest first."""
    return f"{row.kind} {row.software.partition(':')[0]}", row.kind, "all"


def _regimes(row: ServingRow, efficiency: ServingEfficiency) -> tuple[str, ...]:
    """As `regimes`; wider bars where the accelerator or the engine's version has no rows."""
    assert row.machine is not None
    family, _, generation = row.software.partition(":")
    is_seen = efficiency.has_rows(row.machine.name, family, generation)
    return regimes(row) if is_seen else (UNSEEN, *regimes(row))
