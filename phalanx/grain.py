"""A log as a coarser executor would have told it: what contract tests compare.

A real world executes at the coarsest grain that keeps a policy's decision (`registry.Entry.grain`):
torch's pipelining runtime knows stages, `fully_shard` units, an engine steps. Simulated logs are
finer. `project` takes out what the coarser executor cannot show and renames the rest.

| rows of a log (labels as `lower` writes them) | step | stage     | unit               | operator |
|-----------------------------------------------|------|-----------|--------------------|----------|
| computes "0F1/layers.2.mlp"                   | -    | one "0F1" | one "0F1/layers.2" | all      |
| exchanges inside a unit "0F1/layers.2.mlp@tp" | -    | -         | -                  | all      |
| gathers, reductions "gather:layers.2:F1"      | -    | -         | all                | all      |
| transfers between stages "0SEND_F1"           | -    | all       | all                | all      |
| memory: alloc, free                           | -    | -         | -                  | all      |
| the optimizer "O", what policies decided      | all  | all       | all                | all      |
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from phalanx.errors import PlanError
from phalanx.registry import GRAINS

LogRow = tuple[str, str]  # operator, action_id: a row of `Trace.log`

_COMPUTE = re.compile(r"(\d+([FBIW])\d+)(?:/([^@]+))?(@.*)?")
_UNIT = re.compile(r".*?\d+(?=\.|$)")
_TRANSFER = re.compile(r"\d+(SEND|RECV)_[FB]\d+")
_OF_PARAMETERS = ("gather:", "reduce:")
_MEMORY = ("alloc", "free")


def project(log: Sequence[LogRow], grain: str) -> list[LogRow]:
    """The rows that an executor of this grain would have logged, in the same order.

    Rows that become one keep the place of the first. A unit is the part of a module's name up to
    its first number ("layers.2" of "layers.2.mlp"), or all of it. A log that is coarser already
    stays as it is; projecting in two steps, coarser and coarser, is projecting once.

    Args:
        log: (operator, action_id) in order of issue, as `Trace.log` gives it.
        grain: one of `registry.GRAINS`.

    Raises:
        PlanError: `plan/illegal` for another grain.
    """
    if grain not in GRAINS:
        raise PlanError("plan/illegal", "grain", repr(grain), "no such grain", legal=GRAINS)
    out: list[LogRow] = []
    for row in log:
        shown, is_merged = _shown(*row, grain)
        if shown is not None and not (is_merged and out[-1:] == [shown]):
            out.append(shown)
    return out


def _shown(operator: str, label: str, grain: str) -> tuple[LogRow | None, bool]:
    """What becomes of a row, and whether it may be one of several that become one."""
    if grain == "operator":
        return (operator, label), False
    compute = _COMPUTE.fullmatch(label)
    if compute is not None:
        return _compute(operator, label, grain, compute), True
    fine = operator.split(".")[0] in _MEMORY
    fine |= grain in ("stage", "step") and label.startswith(_OF_PARAMETERS)
    fine |= grain == "step" and _TRANSFER.fullmatch(label) is not None
    return (None if fine else (operator, label)), False


def _compute(operator: str, label: str, grain: str, match: re.Match[str]) -> LogRow | None:
    step, kind, module, exchange = match.groups()
    if exchange or grain == "step":
        return None
    if not module:
        return operator, label
    if grain == "stage":
        return f"stage.{kind}", step
    unit = _UNIT.match(module)
    return f"unit.{kind}", f"{step}/{unit[0] if unit else module}"
