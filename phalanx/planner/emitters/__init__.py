"""Plans as files of other programs: torchtitan, Megatron-LM, vLLM, verl, TRL, SkyPilot, Slurm.

`emitters/<target>.py` writes one; each file says for which version it was written and what of the
plan it does not hold. A plan that a target has no words for is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from phalanx.errors import JobError, nearest_names
from phalanx.planner.emitters.base import Site
from phalanx.planner.emitters.source import plan_of
from phalanx.planner.importers.foreign import ForeignPlan, software_of

TARGETS = ("megatron", "skypilot", "slurm", "torchtitan", "trl", "verl", "vllm")
_NO_TRAINERS = ("skypilot", "slurm", "vllm")
_ALIASES = {"accelerate": "trl", "megatron-lm": "megatron", "sky": "skypilot"}


def targets() -> dict[str, str]:
    """Name -> version that is written."""
    return {name: _module(name).VERSION for name in TARGETS}


def emit(target: str, plan: ForeignPlan, site: Site | None = None) -> Mapping[str, str]:
    """A plan as files of a target.

    Args:
        target: of `TARGETS`.
        plan: made by `plan_of`, or read from another program's file.
        site: where it will run.

    Returns:
        File name -> text.

    Raises:
        JobError: `registry/unknown` for another target.
        PlanError: `emit/impossible` for what the target cannot express.
    """
    return dict(_module(target).write(plan, site or Site()))


def priced_as(target: str) -> str:
    """Key of the efficiency and memory tables of what a target trains on; "" for launchers, which
    start the first program that has words for the plan, and for servers.

    Raises:
        JobError: `registry/unknown` for another target.
    """
    name = _module(target).__name__.rpartition(".")[2]
    return "" if name in _NO_TRAINERS else software_of(name)


def _module(target: str):
    name = _ALIASES.get(target.lower(), target.lower())
    if name not in TARGETS:
        legal = nearest_names(name, TARGETS) or list(TARGETS)
        raise JobError("registry/unknown", "--emit", target, "no such target", legal=legal)
    return import_module(f"phalanx.planner.emitters.{name}")


__all__ = ["TARGETS", "Site", "emit", "plan_of", "priced_as", "targets"]
