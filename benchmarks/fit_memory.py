"""Fits the few free figures of memory profiles to published peaks, and judges them out of fold.

    python benchmarks/fit_memory.py [TABLE] [--only PROFILE] [--write]

A profile's facts (dtypes, what is sharded, which rank logs) are given; `FREE` names what is fitted
and between which bounds, by coordinate descent on the robust error of the logarithm, every source
weighing the same. Context and fragmentation are not seen by allocation counters: they are set by
which runs of a grid crashed. Errors are of folds of whole groups that the fit has not seen.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from phalanx.cost import memory_software
from phalanx.cost.memory_software import MemoryProfile, memory_profile
from phalanx.cost.training_memory import MemoryTerms, training_memory
from phalanx.lab.csv_rows import seen_table
from phalanx.lab.folds import folds
from phalanx.lab.scores import call_score
from phalanx.lab.training_rows import TrainingRow, batches, read_training

PROFILES = Path(memory_software.__file__).with_name("memory_software.json")
TOLERANCE = 0.03  # of a logarithm
FREE = {
    "nanotron": {
        "hidden_extra": (0.0, 30.0),
        "stage_input": (0.0, 20.0),
        "logit_bytes": (4.0, 20.0),
        "working_frac": (0.0, 3.0),
        "token_copies": (0.0, 10.0),
        "late_copies": (0.0, 60.0),
        "grad_bytes": (4.0, 8.0),
    },
    "megatron": {
        "hidden_extra": (0.0, 20.0),
        "logit_bytes": (2.0, 12.0),
        "working_frac": (0.0, 3.0),
    },
    "megatron-deepspeed": {
        "context_bytes": (2e9, 8e9),
    },
    "torch:2.6": {
        "hidden_extra": (0.0, 30.0),
        "logit_bytes": (4.0, 20.0),
        "token_copies": (0.0, 10.0),
        "selective_keeps": (0.3, 1.0),
    },
}
LIMITS = {"nanotron": {"context_bytes": (0.5e9, 12e9)}}
MOST_ROWS = 10  # a source with fewer counts for less
PRIOR_BAR, PRIOR_ROWS = 0.2, 20  # bars start there and move with more rows than so many


def predicted(
    rows: Sequence[TrainingRow], profile: MemoryProfile
) -> list[tuple[TrainingRow, float, float]]:
    """(row, logged bytes, chance that it fits) of rows that a model prices."""
    found = []
    for batch in batches(rows):
        terms: MemoryTerms = training_memory(batch.shape, batch.plans, batch.machine, profile)
        fits = terms.fits_probability()
        found += zip(batch.rows, terms.logged_bytes.tolist(), fits.tolist())
    return found


def log_errors(rows: Sequence[TrainingRow], profile: MemoryProfile) -> dict[str, np.ndarray]:
    """log(predicted / published) by source."""
    errors = defaultdict(list)
    for row, logged, _ in predicted([r for r in rows if r.measured_memory_bytes], profile):
        errors[row.source_id].append(np.log(logged / row.measured_memory_bytes))
    return {source: np.array(values) for source, values in errors.items()}


def loss(rows: Sequence[TrainingRow], profile: MemoryProfile) -> float:
    """Mean over sources of log(1 + (error / tolerance)^2), which follows the many, not the far."""
    by_source = list(log_errors(rows, profile).values())
    weights = [min(1.0, len(errors) / MOST_ROWS) for errors in by_source]
    means = [np.log1p((errors / TOLERANCE) ** 2).mean() for errors in by_source]
    return float(np.average(means, weights=weights))


def crash_loss(rows: Sequence[TrainingRow], profile: MemoryProfile) -> float:
    """Mean of -log of the chance given to what happened."""
    labelled = [row for row in rows if row.failed or row.measured_memory_bytes]
    chances = [(p, row.failed) for row, _, p in predicted(labelled, profile)]
    return float(
        np.mean([-np.log(np.clip(1 - p if bad else p, 0.02, 1)) for p, bad in chances] or [0.0])
    )


def fitted(rows: Sequence[TrainingRow], profile: MemoryProfile, free, cost) -> MemoryProfile:
    """The profile with its free figures moved to where `cost` is least."""
    best, least = profile, cost(rows, profile)
    steps = {name: (high - low) / 8 for name, (low, high) in free.items()}
    while max(steps[n] / (high - low) for n, (low, high) in free.items()) > 0.008:
        before = least
        for name, (low, high) in free.items():
            for sign in (1, -1):
                value = float(np.clip(getattr(best, name) + sign * steps[name], low, high))
                tried = replace(best, **{name: value})
                found = cost(rows, tried)
                if found < least - 1e-9:
                    best, least = tried, found
                    break
        if before - least < 1e-4:
            steps = {name: step / 2 for name, step in steps.items()}
    return best


def whole_fit(rows: Sequence[TrainingRow], profile: MemoryProfile) -> MemoryProfile:
    """All that is fitted of a profile, bars last."""
    made = fitted(rows, profile, FREE[profile.name], loss)
    errors = -np.concatenate(list(log_errors(rows, made).values()))
    low, high = np.quantile(errors, [0.05, 0.95])
    trust = len(errors) / (len(errors) + PRIOR_ROWS)
    made = replace(
        made,
        low_log=float(trust * min(low, 0.0) - (1 - trust) * PRIOR_BAR),
        high_log=float(trust * max(high, 0.0) + (1 - trust) * PRIOR_BAR),
    )
    if profile.name in LIMITS:
        made = fitted(rows, made, LIMITS[profile.name], crash_loss)
    return made


def summary(errors: np.ndarray, bars: np.ndarray) -> dict[str, float]:
    """Of one source; bars are (low, high) logarithms of each row."""
    size = np.abs(np.expm1(errors))
    inside = (-errors >= bars[:, 0]) & (-errors <= bars[:, 1])
    return {
        "rows": len(errors),
        "median": round(float(np.median(size)), 4),
        "p90": round(float(np.quantile(size, 0.9)), 4),
        "bias": round(float(np.median(np.expm1(errors))), 4),
        "in_bar": round(float(inside.mean()), 4),
    }


def out_of_fold(rows: Sequence[TrainingRow], profile: MemoryProfile) -> dict[str, dict]:
    """Errors by source and crashes of a profile, each row judged by a fit that has not seen it."""
    errors, bars, calls = defaultdict(list), defaultdict(list), defaultdict(list)
    naming = {row.source_id for row in rows if row.failed}
    for seen, kept in folds(rows):
        made = whole_fit(seen, profile)
        for row, logged, fits in predicted(kept, made):
            if row.measured_memory_bytes:
                errors[row.source_id].append(np.log(logged / row.measured_memory_bytes))
                bars[row.source_id].append((made.low_log, made.high_log))
            if row.source_id in naming:
                calls[row.source_id].append((fits < 0.5, row.failed))
    found = {name: summary(np.array(e), np.array(bars[name])) for name, e in errors.items()}
    for source, each in calls.items():
        score = call_score(*zip(*each, strict=True))
        if score is not None and source in found:
            found[source] |= {
                "oom_precision": round(score.precision, 4),
                "oom_recall": round(score.recall, 4),
            }
    return found


def macro(sources: dict[str, dict]) -> dict[str, float]:
    """Medians over sources, of crashes over those that name any."""
    found = {"rows": sum(each["rows"] for each in sources.values())}
    for name in ("median", "p90", "bias", "in_bar"):
        found[name] = round(float(np.median([each[name] for each in sources.values()])), 4)
    for name in ("oom_precision", "oom_recall"):
        values = [each[name] for each in sources.values() if name in each]
        if values:
            found[name] = round(float(np.median(values)), 4)
    return found


def main() -> None:
    """Prints, and with --write stores, what was fitted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", nargs="?", type=Path, default=seen_table("training"))
    parser.add_argument("--only", choices=[*FREE], action="append", default=[])
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = [row for row in read_training(arguments.table) if row.is_fitted]
    table = json.loads(PROFILES.read_text())
    found = table.get("cross_validation", {}).get("sources", {})
    for name in arguments.only or FREE:
        start = memory_profile(name)
        mine = [
            row
            for row in rows
            if memory_profile(row.software).name == name
            and (row.failed or row.measured_memory_bytes)
        ]
        made = whole_fit(mine, start)
        moved = [*FREE[name], *LIMITS.get(name, {}), "low_log", "high_log"]
        values = {each: float(f"{getattr(made, each):.3g}") for each in moved}
        found |= out_of_fold(mine, start)
        print(name, len(mine), values)
        fitted_names = [*FREE[name], *LIMITS.get(name, {})]
        table["profiles"][name] |= values | {"fitted": fitted_names, "fitted_rows": len(mine)}
    table["cross_validation"] = {
        "folds": 5,
        "by": "whole groups",
        "classes": {"memory": macro(found)},
        "sources": found,
    }
    for source, numbers in found.items():
        print(source, numbers)
    if arguments.write:
        PROFILES.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
