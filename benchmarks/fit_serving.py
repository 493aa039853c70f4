"""Fits the coefficients of serving steps to published rows and judges them on groups left out.

    python benchmarks/fit_serving.py [TABLE.csv] [--write]

Logarithms of times are fitted by Gauss-Newton steps with weights that a gross outlier loses
(Student's t); every coefficient and factor is pulled towards its start (`COEFFICIENTS`), so a kind
with few rows stays near the value for all. Bars are percentiles of what the folds were off; of
accelerators and engine versions without rows, of what fits were off that had left one out.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.cost import serving_efficiency
from phalanx.cost.serving_efficiency import COEFFICIENTS, FACTORS, UNSEEN, ServingEfficiency
from phalanx.lab.csv_rows import seen_table
from phalanx.lab.folds import folds
from phalanx.lab.serving_predict import ServingTable, regimes, tables_of
from phalanx.lab.serving_rows import ServingRow, read_serving

SCATTER = {  # of the logarithm of a measurement about its formula, beyond which a row is an outlier
    "tpot_s": 0.10,
    "ttft_s": 0.25,
    "latency_s": 0.12,
    "output_tokens_per_s_per_device": 0.12,
}
ROUNDS, STEP, LEAST_ROWS, BAR_ROWS = 8, 1e-4, 4, 60
_BAR_EDGES = (0.04, 0.96)  # of 90 % bars: what further rows are off by is a little more
KINDS_LEFT_OUT: Mapping[str, Callable[[ServingRow], str]] = {
    "accelerator": lambda row: row.machine.name if row.machine else "",
    "software": lambda row: row.software,
}
OUT = Path(serving_efficiency.__file__).with_name("serving_efficiency.json")


Miss = tuple[ServingRow, str, float]  # a metric's logarithm of measured over predicted


@dataclass(frozen=True)
class Parameter:
    """One number of the fit: a coefficient's value for all, or its factor for a key."""

    coefficient: str
    factor: str
    key: str
    spread: float


@dataclass(frozen=True)
class Fitted:
    """A table of rows with its measurements: which metric of which row, and how much it counts."""

    table: ServingTable
    metric: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]  # places, logs, weights


def fit(rows: Sequence[ServingRow]) -> ServingEfficiency:
    """Coefficients of rows that are complete."""
    rows = [row for row in rows if row.is_fitted]
    parts = [_fitted(table, rows) for table in tables_of(rows)]
    parameters = _parameters(parts)
    logs = np.zeros(len(parameters))
    cost, jacobian, misses = _linearised(parts, parameters, logs)
    for _ in range(ROUNDS):
        step = _step(parameters, jacobian, misses, logs)
        for scale in (1.0, 0.3, 0.1):
            trial = logs + scale * step
            new = _cost(_misses(parts, _efficiency(parameters, trial)), parameters, trial)
            if new < cost:
                break
        else:
            break
        logs, gain = trial, cost - new
        cost, jacobian, misses = _linearised(parts, parameters, logs)
        if gain < 2e-3 * cost:
            break
    counts = {
        factor: dict(Counter(key for part in parts for key in part.table.keys[factor]))
        for factor in FACTORS
        if factor != "cell"
    }
    return replace(
        _efficiency(parameters, logs),
        rows=counts,
        sources=dict(Counter(row.source_id for row in rows)),
    )


def _fitted(table: ServingTable, rows: Sequence[ServingRow]) -> Fitted:
    """Rows of large groups count less each, so one sweep does not outweigh all others."""
    sizes = Counter(row.group for row in rows)
    metric = {}
    for name, scatter in SCATTER.items():
        found = [
            (place, rows[at].measured[name], sizes[rows[at].group])
            for place, at in enumerate(table.at)
            if name in rows[at].measured and not _follows(name, rows[at])
        ]
        if found:
            places, values, sizes_of = (np.asarray(column) for column in zip(*found, strict=True))
            weights = 1.0 / scatter / np.sqrt(np.sqrt(sizes_of))
            metric[name] = (places, np.log(values), weights)
    return Fitted(table, metric)


def _follows(metric: str, row: ServingRow) -> bool:
    """Whether other measurements of the row say the same."""
    if metric == "latency_s":
        return "tpot_s" in row.measured
    return metric == "output_tokens_per_s_per_device" and "tpot_s" in row.measured


def _parameters(parts: Sequence[Fitted]) -> list[Parameter]:
    found = []
    for name, each in COEFFICIENTS.items():
        found.append(Parameter(name, "", "", each.spread))
        for factor, spread in each.factors.items():
            keys = Counter(key for part in parts for key in part.table.keys[factor])
            for key in sorted(key for key, count in keys.items() if count >= LEAST_ROWS):
                found.append(Parameter(name, factor, key, spread))
    return found


def _efficiency(parameters: Sequence[Parameter], logs: np.ndarray) -> ServingEfficiency:
    values = {}
    factors: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for parameter, log in zip(parameters, logs, strict=True):
        if parameter.factor:
            table = factors[parameter.coefficient][parameter.factor]
            table[parameter.key] = float(np.exp(log))
        else:
            start = COEFFICIENTS[parameter.coefficient].start
            values[parameter.coefficient] = float(start * np.exp(log))
    return ServingEfficiency(values, {name: dict(table) for name, table in factors.items()})


def _misses(parts: Sequence[Fitted], efficiency: ServingEfficiency) -> np.ndarray:
    """Predicted less measured logarithms over their scatter, all measurements below each other."""
    return np.concatenate(
        [
            _misses_of(part, part.table.metrics(efficiency.rates_of(part.table.keys)))
            for part in parts
        ]
    )


def _misses_of(part: Fitted, metrics: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.concatenate(
        [
            (np.log(metrics[name][places]) - logs) * weights
            for name, (places, logs, weights) in part.metric.items()
        ]
    )


def _linearised(
    parts: Sequence[Fitted], parameters: Sequence[Parameter], logs: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Cost, derivatives by all parameters and misses.

    A factor acts on its key's rows alone and exactly as its coefficient does there, so one
    derivative for each coefficient is enough.
    """
    efficiency = _efficiency(parameters, logs)
    misses, blocks = [], []
    for part in parts:
        rates = efficiency.rates_of(part.table.keys)
        here = _misses_of(part, part.table.metrics(rates))
        places = np.concatenate([places for places, _, _ in part.metric.values()])
        slopes = {}
        for name in COEFFICIENTS:
            moved = dict(rates) | {name: rates[name] * (1.0 + STEP)}
            slopes[name] = (_misses_of(part, part.table.metrics(moved)) - here) / STEP
        columns = [
            slopes[each.coefficient]
            * (part.table.keys[each.factor][places] == each.key if each.factor else 1.0)
            for each in parameters
        ]
        misses.append(here)
        blocks.append(np.stack(columns, axis=1))
    all_misses = np.concatenate(misses)
    return _cost(all_misses, parameters, logs), np.concatenate(blocks), all_misses


def _cost(misses: np.ndarray, parameters: Sequence[Parameter], logs: np.ndarray) -> float:
    spreads = np.asarray([each.spread for each in parameters])
    return float((2.0 * np.log1p(misses**2 / 3.0)).sum() + ((logs / spreads) ** 2).sum())


def _step(
    parameters: Sequence[Parameter], jacobian: np.ndarray, misses: np.ndarray, logs: np.ndarray
) -> np.ndarray:
    """Of least squares, each miss weighted as Student's t with 3 degrees of freedom has it."""
    spreads = np.asarray([each.spread for each in parameters])
    roots = np.sqrt((2.0 / 3.0) / (1.0 + misses**2 / 3.0))
    weighted = jacobian * roots[:, None]
    normal = weighted.T @ weighted + np.diag(1.0 / spreads**2)
    return np.linalg.solve(normal, -(weighted.T @ (misses * roots)) - logs / spreads**2)


def judged(rows: Sequence[ServingRow], efficiency: ServingEfficiency) -> list[Miss]:
    """Misses of complete rows."""
    found = []
    for table in tables_of(rows):
        metrics = table.metrics(efficiency.rates_of(table.keys))
        for place, at in enumerate(table.at):
            for name, value in rows[at].measured.items():
                found.append((rows[at], name, float(np.log(value / metrics[name][place]))))
    return found


def cross_validated(rows: Sequence[ServingRow], count: int) -> list[list[Miss]]:
    """As `judged`, by fold, each row by a fit that has not seen its group."""
    rows = [row for row in rows if row.is_fitted]
    return [judged(unseen, fit(seen)) for seen, unseen in folds(rows, count)]


def bars_of(misses: Sequence[Miss]) -> dict[str, dict[str, tuple[float, float]]]:
    """90 % bars of measured over predicted by metric and regime, as `_BAR_EDGES` cut them."""
    by: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row, metric, miss in misses:
        for regime in regimes(row):
            by[metric, regime].append(miss)
    bars: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for (metric, regime), values in sorted(by.items()):
        if len(values) >= BAR_ROWS or regime == "all":
            low, high = np.exp(np.quantile(values, _BAR_EDGES))
            bars[metric][regime] = (min(float(low), 1.0), max(float(high), 1.0))
    return dict(bars)


def cross_validation(parts: Sequence[Sequence[Miss]]) -> dict[str, Any]:
    """By metric: rows, errors, and how many lie in bars that the other folds set."""
    inside: dict[str, list[bool]] = defaultdict(list)
    for at, part in enumerate(parts):
        others = [miss for place, each in enumerate(parts) if place != at for miss in each]
        bars = ServingEfficiency({}, bars=bars_of(others))
        for row, metric, miss in part:
            low, high = bars.bar(metric, *regimes(row))
            inside[metric].append(bool(low <= np.exp(miss) <= high))
    classes = {}
    for metric, hits in inside.items():
        values = np.asarray([-miss for part in parts for _, name, miss in part if name == metric])
        errors = np.abs(np.expm1(values))
        classes[metric] = {
            "rows": len(values),
            "median": float(np.median(errors)),
            "p90": float(np.quantile(errors, 0.9)),
            "bias": float(np.expm1(np.median(values))),
            "in_bar": float(np.mean(hits)),
        }
    return {"folds": len(parts), "by": "whole groups", "classes": classes}


def left_out(
    rows: Sequence[ServingRow], kind_of: Callable[[ServingRow], str]
) -> dict[str, list[Miss]]:
    """Misses on each kind with enough rows, by a fit without any row of it."""
    rows = [row for row in rows if row.is_fitted]
    found = {}
    for kind, count in sorted(Counter(kind_of(row) for row in rows).items()):
        if count >= BAR_ROWS:
            without = fit([row for row in rows if kind_of(row) != kind])
            found[kind] = judged([row for row in rows if kind_of(row) == kind], without)
    return found


def medians(parts: Mapping[str, Sequence[Miss]]) -> dict[str, dict[str, float]]:
    """Of the errors of each metric, by kind left out."""
    table: dict[str, dict[str, float]] = {}
    for kind, misses in parts.items():
        table[kind] = {"rows": len({row.line for row, _, _ in misses})}
        for metric in ("tpot_s", "ttft_s"):
            errors = [abs(float(np.expm1(-miss))) for _, name, miss in misses if name == metric]
            if errors:
                table[kind][metric] = float(np.median(errors))
    return table


def report(title: str, misses: Sequence[Miss]) -> list[str]:
    """Median and 90th percentile of errors, and bias, by source and metric."""
    by: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row, metric, miss in misses:
        by[row.source_id, row.kind, metric].append(-miss)
    lines = [title]
    for key, values in sorted(by.items()):
        errors = np.abs(np.expm1(values))
        lines.append(
            f"{key[0]:26s} {key[1]:10s} {key[2]:31s} n {len(values):5d}  median "
            f"{np.median(errors):6.1%}  p90 {np.quantile(errors, 0.9):7.1%}  bias "
            f"{np.expm1(np.median(values)):+.1%}"
        )
    return lines


def main() -> None:
    """Fits, judges, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", nargs="?", default=str(seen_table("serving")))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--folds", type=int, default=5)
    arguments = parser.parse_args()
    rows = read_serving(arguments.table)
    efficiency = fit(rows)
    print("\n".join(report("in sample", judged([r for r in rows if r.is_fitted], efficiency))))
    parts = cross_validated(rows, arguments.folds)
    misses = [miss for part in parts for miss in part]
    print("\n".join(report(f"{arguments.folds} folds over whole groups", misses)))
    judgement = cross_validation(parts)
    bars = bars_of(misses)
    unseen: list[Miss] = []
    for name, kind_of in KINDS_LEFT_OUT.items():
        without = left_out(rows, kind_of)
        judgement[f"{name}_left_out"] = medians(without)
        unseen += [miss for part in without.values() for miss in part]
    for metric, table in bars_of(unseen).items():
        bars[metric][UNSEEN] = table["all"]
    print(json.dumps(_rounded(judgement), indent=1))
    efficiency = replace(efficiency, bars=bars, cross_validation=judgement)
    for name, value in efficiency.values.items():
        print(f"{name:18s} {value:.3g}  {COEFFICIENTS[name].meaning}")
    if arguments.write:
        OUT.write_text(json.dumps(_rounded(efficiency.to_dict()), indent=1) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    main()
