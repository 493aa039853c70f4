"""What all emitters share: a plan with nothing left open, the header, and refusals."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml

from phalanx import __version__
from phalanx.data.sources import BUILT_IN
from phalanx.errors import PlanError
from phalanx.models.known import hub_name_of
from phalanx.planner.importers.convert import IMPOSSIBLE, foreign_plans
from phalanx.planner.importers.foreign import ForeignPlan

_WIDTH = 96
_WORDS = {
    "zero": "stage of sharding",
    "keeps_gathered": "weights kept gathered",
    "row_tokens": "tokens of a row",
    "micro_rows": "rows of a micro-batch",
}


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a plan will run, as far as a launcher has to know.

    Attributes:
        accelerator: as clouds call it ("H100"); "" where the target needs none.
        devices_per_node: of one machine.
    """

    accelerator: str = ""
    devices_per_node: int = 8


class Writing:
    """One plan on its way to a target.

    Args:
        target, version: what is written for.
        plan: must say how many devices there are, and be of `role`.

    Attributes:
        row: columns of `TrainingPlans` with nothing left open.

    Raises:
        PlanError: `emit/impossible`.
    """

    def __init__(self, target: str, version: str, plan: ForeignPlan, role: str = "train") -> None:
        self.target, self.version, self.plan = target, version, plan
        self._missing: list[str] = []
        if plan.role != role:
            rule = f"{target} {'trains' if role == 'train' else 'serves'}; this plan does not"
            raise PlanError(IMPOSSIBLE, "role", plan.role, rule, legal=[role])
        self.row: dict[str, Any] = {}
        if role == "train":
            if not plan.devices:
                raise PlanError(IMPOSSIBLE, "devices", None, "are not stated: name a cluster")
            self.row = {
                name: int(value) if float(value).is_integer() else value
                for name, value in foreign_plans(plan, plan.devices).row(0).items()
            }
            self.row["replicate"] = self.row["data"] * self.row["context"] // self.row["shard"]

    @property
    def devices(self) -> int:
        """Of the whole plan."""
        assert self.plan.devices
        return self.plan.devices

    @property
    def step_rows(self) -> int:
        """Of all data ranks."""
        return self.row["micro_rows"] * self.row["num_micro"] * self.row["data"]

    def require(self, holds: bool, name: str, rule: str, legal: Sequence[Any] = ()) -> None:
        """Refuse a plan that the target cannot express.

        Raises:
            PlanError: `emit/impossible`: value, what the target can, the nearest.
        """
        if holds:
            return
        value = getattr(self.plan, name, None)
        value = self.row.get(name) if value is None else value
        where = f"{self.target}: {_WORDS.get(name, name)}"
        raise PlanError(IMPOSSIBLE, where, value, rule, legal=legal)

    def only(self, name: str, legal: Collection[Any]) -> None:
        """The target has one of these values and no other."""
        value = self.row.get(name, getattr(self.plan, name, None))
        self.require(value in legal, name, f"{self.target} has no other", sorted(legal, key=str))

    def model(self) -> str:
        """The plan's model as other programs find it: a short name of Phalanx is none of the Hub's.

        Raises:
            PlanError: `emit/impossible` where the plan names none.
        """
        name = self.plan.model
        if not name:
            raise PlanError(IMPOSSIBLE, f"{self.target}: model", None, "is not stated: name one")
        if "/" in name or Path(name).exists():
            return name
        found = hub_name_of(name)
        if found:
            self.lacks(f"how the Hub spells {found}: capitals may differ, or an ending such as -hf")
            return found
        self.lacks(f"where {name} is found: its folder, or its name on the Hub")
        return name

    def data(self) -> str:
        """The plan's data; "" where it has none that other programs find."""
        name = self.plan.data or ""
        if name in BUILT_IN:
            self.lacks(f"the data: {name} comes with Phalanx and is known to no other program")
            return ""
        return name

    def torchrun(self, site: Site) -> str:
        """How the launcher of PyTorch is started on each node, up to the program."""
        nodes = -(-self.devices // site.devices_per_node)
        each = (
            f"torchrun --nnodes {nodes} --nproc-per-node {min(self.devices, site.devices_per_node)}"
        )
        return each if nodes == 1 else f"{each} --node-rank i --master-addr HOST"

    def lacks(self, *lines: str) -> None:
        """What has no counterpart and is not needed to start; told in the header."""
        self._missing += lines

    def lacks_fields(self, *names: str) -> None:
        """Fields of the plan that the target does not hold, where the plan has them."""
        stated = self.plan.stated()
        self._missing += [f"{name} = {stated[name]}" for name in names if name in stated]

    def header(self, how: str, comment: str = "# ") -> str:
        """Who wrote the file, for which version, how to start it, and what it does not say."""
        lines = [f"Written by Phalanx {__version__} for {self.target} {self.version}."]
        lines.append(how)
        if self._missing:
            lines += ["Not expressed here:", *(f"- {each}" for each in self._missing)]
        return "".join(
            f"{comment}{part}\n"
            for line in lines
            for part in wrap(line, _WIDTH, subsequent_indent="  ")
        )


def peft_expression(targets: Sequence[str]) -> str:
    """Targets of which some are patterns, as the one expression that PEFT matches with modules; ""
    where all are plain names, which it takes as a list."""
    if not any(set(each) & set("*?[") for each in targets):
        return ""
    parts = [
        _expression(each) if set(each) & set("*?[") else rf".*\.{re.escape(each)}"
        for each in targets
    ]
    return "|".join(part.replace(r"experts\.", r"experts\.(\d+\.)?") for part in parts)


def _expression(pattern: str) -> str:
    """A pattern of file names as a regular expression."""
    plain = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    one_of = re.compile(r"\\\[(!?)(.+?)\\\]")
    return one_of.sub(lambda m: f"[{'^' if m[1] else ''}{m[2].replace(chr(92), '')}]", plain)


class _BlockDumper(yaml.SafeDumper):
    """Text of several lines as a block, as people write scripts into YAML."""


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockDumper.add_representer(str, _text_node)


def yaml_text(table: Mapping[str, Any]) -> str:
    """A mapping as YAML, in its own order."""
    return yaml.dump(dict(table), Dumper=_BlockDumper, sort_keys=False, width=1000)
