"""Answers of a cluster, corrected by runs that were measured on such devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from phalanx.plan import locked_versions
from phalanx.planner.answers import Answer, PricedPlan
from phalanx.planner.feedback import Correction, MeasuredRun, correction, recall, recall_all

EVERYTHING = "all"


def measured_runs(text: str) -> Sequence[MeasuredRun]:
    """Runs by the paths of run folders and of files that `remember` wrote, separated by commas;
    "all": those kept without naming a file.

    Raises:
        JobError: from `feedback.recall`.
    """
    if text.strip() == EVERYTHING:
        return recall_all()
    return [run for path in text.split(",") for run in recall(path.strip())]


def corrected(each: Answer, runs: Sequence[MeasuredRun]) -> tuple[Answer, str]:
    """The answer with corrected seconds, and a line that says by what, or why not."""
    training, machine = each.training, each.asked.cluster.machine
    config = training.config
    versions = {name: text for name, text in locked_versions().items() if name != "python"}
    dtype = config.dtype if config is not None else "bfloat16"
    found = correction(runs, machine, versions, method=training.method, dtype=dtype)
    name = each.asked.text
    if found is None:
        rule = "no measured run of such devices, this software, method and dtype: not corrected"
        return each, f"{name}: {rule}"
    names = ("best", "fastest", "runnable", "unproven")
    plans = {id(plan): plan for plan in (getattr(each, name) for name in names) if plan}
    new = {key: _plan(plan, found) for key, plan in plans.items()}  # what is one stays one
    changed: dict[str, Any] = {name: new.get(id(getattr(each, name))) for name in names}
    scaled = replace(
        each,
        **changed,
        unlimited_s=each.unlimited_s * found.factor.value,
        source=f"{each.source}; {found.describe()}",
    )
    return scaled, f"{name}: {found.describe()}"


def _plan(plan: PricedPlan, found: Correction) -> PricedPlan:
    bar = found.step_s(plan.total_s)
    parts = {name: seconds * found.factor.value for name, seconds in plan.parts.items()}
    return replace(plan, parts=parts, low_s=bar.low, high_s=bar.high)
