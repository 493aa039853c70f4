"""Errors that a user can act on: where = value, the rule, the nearest legal values.

One class per kind of mistake, one stable code per rule. `assert` stays for facts that only a bug in
Phalanx can break.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from difflib import get_close_matches
from reprlib import Repr

# Codes are an interface: scripts match on them. Never rename one, never reuse one.
CODES: dict[str, str] = {
    "job/unknown-key": "a key that no section knows",
    "job/bad-value": "a value of the wrong type or out of range",
    "job/missing": "a required key is absent",
    "job/syntax": "the file is not valid TOML",
    "job/not-found": "a file or folder that a job names does not exist",
    "unit/unknown": "a quantity whose unit is not known for its dimension",
    "registry/unknown": "a name that is not registered",
    "registry/duplicate": "a name registered twice",
    "mesh/axis": "an axis that the mesh does not have, or an illegal axis",
    "mesh/product": "axis sizes that do not multiply to the number of devices",
    "mesh/rank": "a rank or coordinate outside the mesh",
    "layout/divide": "a dimension that an axis does not divide",
    "layout/rank": "a layout whose rank differs from its tensor's",
    "layout/axis": "an axis that a layout places twice or nowhere",
    "layout/rule": "a rule of cutting that does not exist",
    "layout/mismatch": "layouts of different tensors",
    "order/missing": "a schedule lacks an action",
    "order/doubled": "a schedule has an action twice",
    "order/illegal": "a schedule that cannot exist for these sizes",
    "check/send": "a send without its receive, or the reverse",
    "check/size": "a send and its receive that differ in size",
    "check/collective": "members of a group that disagree on the next collective",
    "check/deadlock": "a program that can never finish",
    "check/cycle": "actions that wait for one another",
    "check/memory": "a rank that needs more memory than it has",
    "check/handle": "memory that is taken twice or given back without being held",
    "check/label": "an action that waits for a label that its rank never has",
    "plan/format": "a file that is no plan, or one of another format version",
    "plan/hardware": "a plan made for other hardware",
    "plan/version": "a plan made with other library versions",
    "plan/job": "a plan made for another job",
    "plan/illegal": "a combination that no engine can run",
    "plan/memory": "a plan that needs more memory than is allowed",
    "world/dead": "a rank that died",
    "world/timeout": "a rank that did not answer in time",
    "world/failed": "a rank that raised an error",
    "world/size": "a message whose size differs from the plan",
    "world/unbound": "an action that this world has no way to carry out",
    "world/membership": "a membership that cannot go on",
    "data/empty": "data without a usable row",
    "data/row": "a row that cannot be used",
    "data/cache": "prepared data that cannot be written",
    "model/unknown": "a model that is not known or not supported",
    "model/tensor": "tensors that do not fit the model",
    "checkpoint/format": "a folder that is no checkpoint, or one of another format version",
    "checkpoint/damaged": "a checkpoint whose files are not what was written",
    "checkpoint/job": "a checkpoint of another job",
    "checkpoint/space": "a disk without room for the checkpoints of a run",
    "checkpoint/write": "a checkpoint that could not be written",
    "environment/missing": "something that has to be installed first",
    "environment/trust": "a file whose format could run code",
    "environment/disk": "a disk without room for what will be written",
    "train/inputs": "ranks of one run that were given different jobs or data",
    "train/nonfinite": "a loss or gradient that is not finite",
    "train/spike": "a gradient norm far above the recent ones",
    "train/callback": "a user's callback or loss that failed",
    "train/weights": "replicas whose weights differ",
    "serve/request": "a request that cannot be served",
    "serve/busy": "a server whose queue is full",
    "serve/engine": "an engine process that ended or does not answer",
    "serve/asleep": "an engine that sleeps, or cannot go to sleep",
    "serve/adapter": "an adapter that cannot be served",
    "serve/port": "an address that cannot be listened on",
    "foreign/unreadable": "a configuration of another program that cannot be read",
    "foreign/ambiguous": "a file that could be of two programs, or of none that is known",
    "foreign/value": "a value in another program's configuration that cannot be meant",
    "emit/impossible": "a plan that the target has no words for",
    "report/gate": "a gated row outside its tolerance",
    "trace/file": "a trace file that cannot be read",
    "trace/rows": "a trace without the rows that a question needs",
    "trace/runs": "runs that cannot be compared",
    "system/published": "a table of published numbers that cannot be read",
    "system/unreproduced": "a system that has no reproduction yet",
    "cli/usage": "a command line that cannot be read",
    "cli/file": "a file that cannot be written",
}


class PhalanxError(Exception):
    """One rule that was broken.

    Args:
        code: a key of `CODES`.
        where: dotted path, file or rank that holds the value.
        value: the value found there (None: there is none).
        rule: the rule in one sentence, without a full stop.
        legal: the nearest legal values, nearest first.
        detail: more lines, such as a grid with the faulty cell marked.
    """

    exit_code = 2

    def __init__(
        self,
        code: str,
        where: str,
        value: object,
        rule: str,
        *,
        legal: Iterable[object] = (),
        detail: str = "",
    ) -> None:
        assert code in CODES, f"unlisted error code {code}"
        self.code, self.where, self.value, self.rule = code, where, value, rule
        self.legal, self.detail = tuple(legal), detail
        super().__init__(self.sentence())

    def sentence(self) -> str:
        """The message: `where = value: rule; nearest legal values: a, b`.

        One line, whatever the value holds; `detail` follows on lines of its own.
        """
        head = self.where if self.value is None else f"{self.where} = {self.value}"
        tail = f"; nearest legal values: {', '.join(map(str, self.legal))}" if self.legal else ""
        line = _on_one_line(f"{head}: {self.rule}{tail}")
        return line + (f"\n{self.detail}" if self.detail else "")

    def __reduce__(
        self,
    ):  # keyword-only arguments do not survive the default pickling of exceptions
        return _rebuild, (
            type(self),
            self.code,
            self.where,
            self.value,
            self.rule,
            self.legal,
            self.detail,
        )


def _on_one_line(text: str) -> str:
    """Line breaks and all else that would not print as escapes."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def _rebuild(cls, code, where, value, rule, legal, detail):
    return cls(code, where, value, rule, legal=legal, detail=detail)


class JobError(PhalanxError):
    """What a user wrote cannot be meant."""


class PlanError(PhalanxError):
    """What was asked cannot be planned, or a plan does not fit here."""


class CheckError(PlanError):
    """A program that would not run to its end."""


class WorldError(PhalanxError):
    """Something happened while running."""


class GateError(PhalanxError):
    """A gated row of a report missed its target."""

    exit_code = 1


class _Shown(Repr):
    """`repr` that ends: long and deep values are cut, huge numbers told by their size."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple = 4, 8, 12, 12
        self.maxstring = self.maxother = 80

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"a number of {x.bit_length()} bits"


def shown(value: object) -> str:
    """A value that somebody else wrote, as an error shows it: short whatever it is."""
    return _Shown().repr(value)


def nearest_names(name: str, legal: Iterable[str], count: int = 3) -> list[str]:
    """Known names that look like `name`; all of them when few, so that the reader has a choice."""
    names = sorted(legal)
    close = get_close_matches(name, names, n=count, cutoff=0.5)
    return close or (names if len(names) <= 8 else [])


def nearest_numbers(value: float, legal: Iterable[float], count: int = 2) -> list[float]:
    """Up to `count` legal numbers around `value`, nearest first."""
    numbers = sorted(legal)
    at = bisect_left(numbers, value)
    around = numbers[max(0, at - count) : at + count]
    return sorted(around, key=lambda number: abs(number - value))[:count]
