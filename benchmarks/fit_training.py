"""Fits `phalanx/cost/training_efficiency.json` to published training rows, and judges the fit.

    python benchmarks/fit_training.py [--table FILE] [--write]

Method: `training_step` counts once what each row needs; its price is then a function of the numbers
of `StepEfficiency`, each an assumption times factors of nested levels (`training_efficiency`). The
logarithms of the factors have normal priors around 0, wider or narrower by field and level
(`_SPREADS`), so that a level with few rows stays near the level above. Errors are log(predicted /
measured) under a Cauchy loss; rows of large tables weigh less, so that no source decides alone.
Gauss-Newton steps, the loss sharpened in three rounds.

Judged by cross-validation over whole groups (`lab.folds`): the 90 % bars and all printed errors are
of rows that the fit has not seen. Rows recalled from memory are not used.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from phalanx.cost import training_efficiency
from phalanx.cost.training_count import StepWork, count_step
from phalanx.cost.training_efficiency import SHARES, StepEfficiency, family_of, kind_of, level_keys
from phalanx.cost.training_price import Speeds, price_step
from phalanx.lab.csv_rows import seen_table
from phalanx.lab.folds import folds
from phalanx.lab.row_class import LEAST_PLANS
from phalanx.lab.scores import Estimate, error_score, spearman, top_regret
from phalanx.lab.training_rows import TrainingRow, batches, read_training

TABLE = Path(training_efficiency.__file__).with_name(training_efficiency.TABLE)
FOLDS = 5
ROWS_OF_FULL_WEIGHT = 150  # of one source and class; more rows share that weight
_ROUNDS = ((0.6, 6), (0.2, 6), (0.07, 12))  # scale of the Cauchy loss, steps
_LEAST_ROWS_OF_BAR = 20


class Spread(NamedTuple):
    """Standard deviations of log factors by level; 0: the level has no factor."""

    all: float = 0.0
    family: float = 0.0
    software: float = 0.0
    generation: float = 0.0
    accelerator: float = 0.0
    precision: float = 0.0


_SPREADS = {
    "product": Spread(0.15, 0.05, generation=0.1),
    "product_traffic": Spread(0.4, 0.3),
    "product_start_s": Spread(0.5, 0.5, 0.4),
    "expert_start_s": Spread(0.7, 0.3, 0.3),
    "expert": Spread(0.3, 0.2, 0.2, 0.1),
    "attention": Spread(0.2, 0.1, generation=0.15),
    "state": Spread(1.0, 0.3, generation=0.2),
    "attention_start_tokens": Spread(0.7, 0.3),
    "scores": Spread(0.4),
    "stream": Spread(0.4, 0.4),
    "routed": Spread(0.4, 0.3, 0.3),
    "adapter": Spread(0.5, 0.4),
    "cast": Spread(0.5, 0.3),
    "gated_cast": Spread(1.0, 0.0, 1.0),
    "launch_s": Spread(0.7, 1.0, 0.8),
    "link": Spread(0.1, 0.15, generation=0.1),
    "network": Spread(0.3, 0.4, generation=0.2),
    "round_s": Spread(0.7, 0.7),
    "network_round_s": Spread(0.7, 0.7),
    "call_s": Spread(0.7, 1.0),
    "crowding": Spread(0.0, 1.5),
    "tensor_hidden": Spread(1.0, 1.0),
    "context_hidden": Spread(1.0, 1.0),
    "expert_hidden": Spread(1.0, 1.0, 0.7),
    "data_hidden": Spread(1.0, 1.0),
    "pipeline_hidden": Spread(1.0, 1.0),
    "slowdown": Spread(0.5),
    "optimizer": Spread(0.4, 0.5),
    "repeated_products": Spread(1.0, 1.0),
    "gradient_bytes": Spread(0.0, 0.3),
    "stall_s": Spread(0.3, 3.0),
    "micro_s": Spread(1.0, 1.0),
    "step_s": Spread(1.0, 1.0),
    "pace": Spread(**training_efficiency.PACE_SPREADS),
}
# where a family is known to differ, what its factor is thought to be before any row is seen
_ASSUMED = {("stall_s", "nanotron"): 2.0, ("crowding", "nanotron"): 5.0}


@dataclass(frozen=True)
class Data:
    """Rows with their work and speeds as columns [R], and measured seconds [R]."""

    rows: tuple[TrainingRow, ...]
    work: StepWork
    speeds: Speeds
    measured_s: np.ndarray

    def take(self, where: np.ndarray) -> Data:
        """Some rows."""
        rows = tuple(self.rows[at] for at in where)
        work, speeds = (
            _columns([each], lambda column: column[0][where]) for each in (self.work, self.speeds)
        )
        return Data(rows, work, speeds, self.measured_s[where])


def _columns(items: Sequence[Any], change: Callable[[Sequence[Any]], Any]) -> Any:
    """One structure of several alike: `change` of each column that they share."""
    first = items[0]
    if is_dataclass(first) and not isinstance(first, type):
        return type(first)(**_columns([vars(each) for each in items], change))
    if isinstance(first, Mapping):
        return {name: _columns([each[name] for each in items], change) for name in first}
    return change(items)


def read_data(table: Path) -> Data:
    """Rows of a table that may be fitted and say how long a step took."""
    usable = [row for row in read_training(table) if row.is_fitted and row.measured_step_s]
    usable = [row for row in usable if not row.failed and row.row_class != "rl"]
    rows: list[TrainingRow] = []
    works, speeds = [], []
    for batch in batches(usable):
        counted = count_step(batch.shape, batch.plans, batch.machine.devices_per_domain)
        speed = Speeds.of(batch.machine, batch.plans.precision)
        size = (len(batch.rows),)
        for known, each in ((works, counted), (speeds, speed)):
            known.append(_columns([each], lambda column, n=size: np.broadcast_to(column[0], n)))
        rows += batch.rows
    seconds = np.array([row.measured_step_s for row in rows], dtype=float)
    return Data(tuple(rows), *(_columns(each, np.concatenate) for each in (works, speeds)), seconds)


class Factors:
    """The unknowns: log factors of fields at levels, and which rows they move."""

    def __init__(self, rows: Sequence[TrainingRow]) -> None:
        self.start = asdict(StepEfficiency())
        self.names: list[tuple[str, str, str]] = []  # field, level, key
        spreads, masks = [], []
        keys = [_keys(row) for row in rows]
        for field, spread in _SPREADS.items():
            for level, width in spread._asdict().items():
                for key in sorted({each[level] for each in keys}) if width else ():
                    self.names.append((field, level, key))
                    spreads.append(width)
                    masks.append([each[level] == key for each in keys])
        self.spreads = np.array(spreads)
        self.masks = np.array(masks, dtype=float)
        self.fields = np.array([name[0] for name in self.names])
        self.assumed = {
            field: np.array([np.log(_assumed(field, each["family"])) for each in keys])
            for field in _SPREADS
        }

    def efficiency(
        self, logs: np.ndarray, more: Mapping[str, float] | None = None
    ) -> StepEfficiency:
        """Numbers of every row [R]; `more` adds to the log factors of a field."""
        numbers = {}
        for field, value in self.start.items():
            mine = self.fields == field
            log = logs[mine] @ self.masks[mine] + self.assumed[field] + (more or {}).get(field, 0.0)
            numbers[field] = training_efficiency.moved(field, value, np.exp(log))
        return StepEfficiency(**numbers)

    def aligned(self, other: Factors, logs: np.ndarray) -> np.ndarray:
        """The logs of another fit under these names; 0 for what it has not seen."""
        known = dict(zip(other.names, logs, strict=True))
        return np.array([known.get(name, 0.0) for name in self.names])


def _keys(row: TrainingRow) -> dict[str, str]:
    assert row.machine is not None
    return level_keys(row.machine, row.precision, row.software)


def _assumed(field: str, family: str) -> float:
    """The factor that brings the default to what a family is thought to have."""
    default = getattr(StepEfficiency(), field)
    value = _ASSUMED.get((field, family), default)
    if field in SHARES:
        return (value / (1 - value)) / (default / (1 - default))
    return value / default


def predicted_s(data: Data, efficiency: StepEfficiency) -> np.ndarray:
    """Seconds of each row."""
    return np.sum(list(price_step(data.work, data.speeds, efficiency).values()), axis=0)


def fit(data: Data) -> tuple[Factors, np.ndarray]:
    """Factors and their logarithms."""
    factors = Factors(data.rows)
    logs = np.zeros(len(factors.names))
    many = Counter((row.source_id, row.row_class) for row in data.rows)
    counts = np.array([many[row.source_id, row.row_class] for row in data.rows])
    weights = np.minimum(1.0, ROWS_OF_FULL_WEIGHT / counts)
    for scale, steps in _ROUNDS:
        logs = _descend(data, factors, logs, weights, scale, steps)
    return factors, logs


def _descend(
    data: Data, factors: Factors, logs: np.ndarray, weights: np.ndarray, scale: float, steps: int
) -> np.ndarray:
    """Gauss-Newton with damping; columns of the Jacobian by differences, one per field."""

    def errors(at: np.ndarray, more: Mapping[str, float] | None = None) -> np.ndarray:
        return np.log(predicted_s(data, factors.efficiency(at, more)) / data.measured_s)

    def loss(at: np.ndarray, error: np.ndarray) -> float:
        prior = np.sum((at / factors.spreads) ** 2) / 2
        return float(np.sum(weights * np.log1p((error / scale) ** 2)) + prior)

    error, damping, small = errors(logs), 1e-2, 1e-3
    value = loss(logs, error)
    for _ in range(steps):
        slopes = {field: (errors(logs, {field: small}) - error) / small for field in _SPREADS}
        jacobian = np.stack(
            [slopes[f] * m for f, m in zip(factors.fields, factors.masks, strict=True)]
        )
        sharp = weights * 2 / (1 + (error / scale) ** 2) / scale**2
        bend = (jacobian * sharp) @ jacobian.T + np.diag(factors.spreads**-2.0)
        slope = jacobian @ (sharp * error) + logs / factors.spreads**2
        for _ in range(8):
            step = np.linalg.solve(bend + damping * np.diag(np.diag(bend)), -slope)
            there = logs + np.clip(step, -1.0, 1.0)
            error_there = errors(there)
            if loss(there, error_there) < value:
                break
            damping *= 8
        else:
            return logs
        gained = value - loss(there, error_there)
        logs, error, value, damping = there, error_there, value - gained, max(damping / 5, 1e-6)
        if gained < 0.05:
            break
    return logs


def cross_validated_s(data: Data) -> np.ndarray:
    """Seconds that fits say of rows they have not seen."""
    at = {row.line: index for index, row in enumerate(data.rows)}
    everywhere = Factors(data.rows)
    seconds = np.zeros(len(data.rows))
    for seen, unseen in folds(data.rows, FOLDS):
        part, logs = fit(data.take(np.array([at[row.line] for row in seen])))
        here = np.array([at[row.line] for row in unseen])
        known = everywhere.efficiency(everywhere.aligned(part, logs))
        seconds[here] = predicted_s(data, known)[here]
    return seconds


def bars(data: Data, seconds: np.ndarray) -> dict[str, dict[str, Any]]:
    """What 90 % of measured over predicted lie between, by kind and family."""
    groups: dict[str, list[float]] = defaultdict(list)
    for row, ratio in zip(data.rows, data.measured_s / seconds, strict=True):
        kind = _kind(row)
        for name in (f"{kind} with {family_of(row.software)}", kind, "all"):
            groups[name].append(float(ratio))
    return {
        name: {"low": _edge(each, 0.05), "high": _edge(each, 0.95), "rows": len(each)}
        for name, each in sorted(groups.items())
        if len(each) >= _LEAST_ROWS_OF_BAR or name in ("dense", "experts", "lora", "all")
    }


def _edge(values: Sequence[float], share: float) -> float:
    """The value that a further one is below with probability `share`, outer of two neighbours."""
    rank = share * (len(values) + 1)
    at = int(np.floor(rank) if share < 0.5 else np.ceil(rank)) - 1
    return _rounded(sorted(values)[min(max(at, 0), len(values) - 1)])


def _kind(row: TrainingRow) -> str:
    assert row.plans is not None and row.shape is not None
    return kind_of(row.plans.method, row.shape.expert_params > 0)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def scores(data: Data, seconds: np.ndarray, key: Callable[[TrainingRow], str]) -> dict[str, dict]:
    """Per key: what `error_score` says of the rows with their bars."""
    known = bars(data, seconds)
    said: dict[str, list[Estimate]] = defaultdict(list)
    true: dict[str, list[float]] = defaultdict(list)
    for row, value, measured in zip(data.rows, seconds, data.measured_s, strict=True):
        names = (f"{_kind(row)} with {family_of(row.software)}", _kind(row))
        bar = known[next(name for name in names if name in known)]
        said[key(row)].append(Estimate(value, value * bar["low"], value * bar["high"]))
        true[key(row)].append(measured)
    found = {}
    for name in sorted(said):
        figures = asdict(error_score(true[name], said[name]))
        rows = figures.pop("rows")
        found[name] = {"rows": rows} | {k: _rounded(v) for k, v in figures.items() if v is not None}
    return found


def class_scores(data: Data, seconds: np.ndarray) -> dict[str, dict]:
    """Scores by class of rows and of the two large grids, with the median over sources' medians."""
    found = scores(data, seconds, lambda row: row.row_class)
    by_source = scores(data, seconds, lambda row: f"{row.row_class} {row.source_id}")
    of_grids = grid_scores(data, seconds, lambda row: row.row_class)
    for name, each in found.items():
        medians = [one["median"] for key, one in by_source.items() if key.startswith(f"{name} ")]
        each |= {"macro": _rounded(np.median(medians))} | of_grids.get(name, {})
    for name in ("vtrain", "nanotron"):
        where = np.array([at for at, row in enumerate(data.rows) if row.source_id.startswith(name)])
        some, said = data.take(where), seconds[where]
        found[name] = (
            scores(some, said, lambda _: "")[""] | grid_scores(some, said, lambda _: "")[""]
        )
    return found


def grid_scores(
    data: Data, seconds: np.ndarray, key: Callable[[TrainingRow], str]
) -> dict[str, dict[str, float]]:
    """Per key: medians over grids of at least five plans of Spearman and top-1 regret."""
    grids: dict[tuple[str, str], list[int]] = defaultdict(list)
    for at, row in enumerate(data.rows):
        if row.row_class == "grid":
            grids[key(row), row.grid].append(at)
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (name, _), where in grids.items():
        if len(where) >= LEAST_PLANS:
            true, said = data.measured_s[where], seconds[where]
            found[name].append((spearman(true, said), top_regret(true, said)))
    return {
        name: {
            "grids": len(each),
            "spearman": _rounded(np.median([one for one, _ in each])),
            "regret": _rounded(np.median([one for _, one in each])),
        }
        for name, each in sorted(found.items())
    }


def levels(factors: Factors, logs: np.ndarray, rows: Sequence[TrainingRow]) -> dict[str, dict]:
    """The table: level -> key -> rows, sources, factors."""
    found: dict[str, dict] = defaultdict(dict)
    for row in rows:
        for level, key in _keys(row).items():
            entry = found[level].setdefault(key, {"rows": 0, "sources": set(), "factors": {}})
            entry["rows"] += 1
            entry["sources"].add(row.source_id)
    for (field, level, key), log in zip(factors.names, logs, strict=True):
        assumed = _assumed(field, key) if level == "family" else 1.0
        factor = _rounded(np.exp(log) * assumed)
        if abs(factor - 1) >= 5e-4:
            found[level][key]["factors"][field] = factor
    for entries in found.values():
        for entry in entries.values():
            entry["sources"] = sorted(entry["sources"])
    return {level: dict(sorted(entries.items())) for level, entries in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, default=None)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    data = read_data(arguments.table or seen_table("training"))
    unseen_s = cross_validated_s(data)
    by_class = class_scores(data, unseen_s)
    by_source = scores(data, unseen_s, lambda row: f"{row.row_class} {row.source_id}")
    grids = grid_scores(data, unseen_s, lambda row: row.source_id)
    for name, each in (by_class | by_source | grids).items():
        print(f"{name:40}", " ".join(f"{key} {value:<8}" for key, value in each.items()))
    if arguments.write:
        factors, logs = fit(data)
        table = {
            "what": "factors on the assumptions of StepEfficiency; see benchmarks/fit_training.py",
            "cross_validation": {
                "folds": FOLDS,
                "by": "whole groups",
                "classes": by_class,
                "sources": by_source,
                "grids": grids,
            },
            "bars": bars(data, unseen_s),
            "levels": levels(factors, logs, data.rows),
        }
        TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
