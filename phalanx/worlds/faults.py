"""What goes wrong, where and when: one script for the simulator and for real processes.

Only data and one pure question; the worlds carry it out (`sim_faults`, `faulty`).

| kind      | effect on `ranks`                                                                    |
|-----------|--------------------------------------------------------------------------------------|
| kill      | nothing starts or ends any more; partners hang until a policy hears of the `leave`   |
| restart   | a killed rank is back with nothing to do; policies hear of the `join`                |
| pause     | no progress for `duration_s`: what runs ends that much later, nothing starts         |
| slow      | computes that start within `duration_s` take `factor` times as long                  |
| partition | nothing between `ranks` and the others starts for `duration_s`                       |
| drop      | the next message that the rank sends is lost; with `duration_s`, all within it       |
| duplicate | the same, but the messages arrive twice                                              |

In a file, a script is an array of tables with the fields of `Fault`; times may carry a unit:

    [[faults]]
    kind = "kill"
    ranks = [2]
    at_s = "3 min"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from phalanx.errors import JobError, nearest_names
from phalanx.units import parse_quantity

KINDS = ("kill", "restart", "pause", "slow", "partition", "drop", "duplicate")
_TYPES = {"kind": (str,), "at_step": (int,), "at_label": (str,), "factor": (int, float)}
NEEDS_DURATION = ("pause", "slow", "partition")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that happens to some ranks at one moment.

    Attributes:
        kind: one of `KINDS`.
        ranks: global ranks that it hits (a partition: one side of the cut).
        at_s: when, by the world's clock.
        at_step: or as soon as the rank has done this many steps (0: before its first action):
            loaded programs that it has begun before, or where there are none, committed steps.
        at_label: or when the rank is about to carry out the action of this label.
        duration_s: how long (`inf`: for good).
        factor: of a slow rank, > 0; 2 takes twice as long.

    Raises:
        JobError: `job/bad-value` or `job/missing`, naming the field.
    """

    kind: str
    ranks: tuple[int, ...]
    at_s: float | None = None
    at_step: int | None = None
    at_label: str = ""
    duration_s: float = 0.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            legal = nearest_names(self.kind, KINDS)
            raise JobError(
                "job/bad-value", "fault.kind", repr(self.kind), "no such kind", legal=legal
            )
        if not self.ranks or min(self.ranks) < 0:
            rule = "names at least one rank, none below 0"
            raise JobError("job/bad-value", "fault.ranks", self.ranks, rule)
        moments = (self.at_s is not None) + (self.at_step is not None) + bool(self.at_label)
        if moments != 1:
            rule = f"a fault has exactly one of at_s, at_step and at_label, not {moments}"
            raise JobError("job/missing", f"fault {self.kind}", None, rule)
        for name in ("at_s", "at_step", "duration_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise JobError("job/bad-value", f"fault.{name}", value, "must be >= 0")
        if self.kind in NEEDS_DURATION and self.duration_s == 0:
            rule = f"a {self.kind} lasts for some time"
            raise JobError("job/missing", "fault.duration_s", None, rule)
        if not 0 < self.factor < inf:
            raise JobError("job/bad-value", "fault.factor", self.factor, "must be > 0 and finite")

    def __str__(self) -> str:
        if self.at_s is not None:
            moment = f"{self.at_s:g} s"
        else:
            moment = f"step {self.at_step}" if self.at_step is not None else repr(self.at_label)
        return f"{self.kind} of ranks {', '.join(map(str, self.ranks))} at {moment}"


@dataclass(frozen=True, slots=True)
class FaultScript:
    """Faults in order, and how long the others take to notice.

    Attributes:
        faults: in the order in which faults of the same moment strike.
        detect_s: from a kill to the `leave` event, in virtual time (real worlds measure it).
    """

    faults: tuple[Fault, ...] = ()
    detect_s: float = 0.0

    def due(self, time_s: float, step: int, rank: int, label: str = "") -> tuple[Fault, ...]:
        """The faults of `rank` whose moment has come; a world carries out each once.

        Args:
            time_s: the world's clock; `at_s` is due from then on.
            step: steps that the rank has done; `at_step` is due from then on.
            rank: global rank.
            label: of the action that the rank is about to carry out.
        """

        def has_come(fault: Fault) -> bool:
            if fault.at_s is not None:
                return time_s >= fault.at_s
            if fault.at_step is not None:
                return step >= fault.at_step
            return label == fault.at_label

        return tuple(each for each in self.faults if rank in each.ranks and has_come(each))

    def require_ranks(self, num_ranks: int) -> None:
        """Raise `mesh/rank` for a fault of a rank that the job does not have."""
        for index, fault in enumerate(self.faults):
            for rank in fault.ranks:
                if rank >= num_ranks:
                    rule = f"must lie in 0..{num_ranks - 1}"
                    raise JobError("mesh/rank", f"faults[{index}].ranks", rank, rule)

    @staticmethod
    def from_tables(
        tables: Sequence[Mapping[str, Any]], *, detect_s: float | str = 0.0, where: str = "faults"
    ) -> FaultScript:
        """Read the tables of a TOML file.

        Raises:
            JobError: `job/unknown-key`, `job/bad-value`, `job/missing`, `unit/unknown`.
        """
        if not isinstance(tables, Sequence) or isinstance(tables, str):
            rule = "must be a list of tables, one for each fault"
            raise JobError("job/bad-value", where, repr(tables), rule)
        faults = tuple(_read(table, f"{where}[{i}]") for i, table in enumerate(tables))
        return FaultScript(faults, parse_quantity(detect_s, "s", f"{where}.detect_s"))


def _read(table: Mapping[str, Any], where: str) -> Fault:
    if not isinstance(table, Mapping):
        raise JobError("job/bad-value", where, repr(table), "must be a table with a fault's fields")
    known = [field.name for field in fields(Fault)]
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            legal = nearest_names(key, known)
            rule = "a fault has no such field"
            raise JobError("job/unknown-key", f"{where}.{key}", None, rule, legal=legal)
        if key in ("at_s", "duration_s"):
            value = parse_quantity(value, "s", f"{where}.{key}")
        elif key == "ranks":
            value = _ranks(value, f"{where}.ranks")
        elif not isinstance(value, _TYPES[key]) or isinstance(value, bool):
            kinds = " or ".join(each.__name__ for each in _TYPES[key])
            raise JobError("job/bad-value", f"{where}.{key}", repr(value), f"must be {kinds}")
        values[key] = value
    for key in ("kind", "ranks"):
        if key not in values:
            raise JobError("job/missing", f"{where}.{key}", None, "a fault needs it")
    return Fault(**values)


def _ranks(value: object, where: str) -> tuple[int, ...]:
    ranks = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks):
        raise JobError("job/bad-value", where, repr(value), "must be a rank or a list of ranks")
    return tuple(ranks)
