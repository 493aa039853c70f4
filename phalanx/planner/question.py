"""What a command line asks of a plan beyond the keys of a job."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite

from phalanx.errors import JobError, shown
from phalanx.planner.importers import ForeignPlan
from phalanx.units import parse_quantity

LARGEST = ("context", "micro-batch")
BASE_BITS = (16, 8, 4)
PRECISIONS = ("bf16", "fp16", "fp8", "fp4")
_COUNT = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([kKM]?)\s*")
_MOST_TOKENS = 1e18
_BINARY = {"": 1, "k": 1024, "K": 1024, "M": 1024**2}


@dataclass(frozen=True, kw_only=True)
class Question:
    """Asked beside a job.

    Attributes:
        on: clusters separated by commas, instead of `plan.on`.
        whole_epoch: one pass over the data where the job says neither steps nor epochs.
        seq_tokens: rows of one length instead of a data file (0: a data file).
        total_tokens: of the whole job, with `seq_tokens` (0: as the job's steps say).
        budget_usd: of the whole job (0: none).
        sizes: how many devices of each kind meet deadline and budget is asked too.
        largest: one of `LARGEST`, or "".
        base_bits: of frozen weights; 0: as the model's name says ("-AWQ"), else 16.
        precision, expert_imbalance, software: as in `planner.training.Training`.
        foreign: what another program's configuration says.
        measured: runs that correct prices, as `planner.corrected.measured_runs` reads them.
    """

    on: str = ""
    whole_epoch: bool = False
    seq_tokens: int = 0
    total_tokens: float = 0.0
    budget_usd: float = 0.0
    sizes: bool = False
    largest: str = ""
    precision: str = "bf16"
    base_bits: int = 0
    expert_imbalance: float = 1.0
    software: str = ""
    foreign: ForeignPlan | None = None
    measured: str = ""

    def __post_init__(self) -> None:
        self._require("--budget", self.budget_usd, 0.0)
        self._require("--tokens", self.total_tokens, 0.0)
        self._require("--expert-imbalance", self.expert_imbalance, 1.0)
        for flag, value, legal in (
            ("--largest", self.largest, ("", *LARGEST)),
            ("--precision", self.precision, PRECISIONS),
            ("--base-bits", self.base_bits or 16, BASE_BITS),
        ):
            if value not in legal:
                near = [each for each in legal if each != ""]
                raise JobError("job/bad-value", flag, value, "is none of these", legal=near)
        if self.total_tokens and not self.seq_tokens:
            rule = "needs --seq: with a data file the length of the job is train.epochs or steps"
            raise JobError("job/bad-value", "--tokens", self.total_tokens, rule)

    def _require(self, flag: str, value: float, low: float) -> None:
        if not (isfinite(value) and value >= low):
            rule = f"must be a number of at least {low:g}"
            raise JobError("job/bad-value", flag, value, rule, legal=[low])


def row_count(text: str, flag: str) -> int:
    """Tokens of rows and batches: "8k" is 8,192 and "16M" 16,777,216, as contexts are counted.

    Raises:
        JobError: `job/bad-value` for what is no whole number of tokens above 0.
    """
    match = _COUNT.fullmatch(text) if len(text) < 40 else None
    value = float(match[1].replace("_", "")) * _BINARY[match[2]] if match else 0.0
    if value < 1 or value != int(value):
        rule = "must be a whole number of tokens above 0; k is 1,024 and M 1,048,576"
        raise JobError("job/bad-value", flag, shown(text), rule, legal=["8k", "8192", "16M"])
    return int(value)


def total_count(text: str) -> float:
    """Tokens of a whole run: "15T" is 15e12.

    Raises:
        JobError: as `parse_quantity`, and `job/bad-value` for less than one.
    """
    value = parse_quantity(text, "tokens", "--tokens")
    if not 1 <= value <= _MOST_TOKENS:
        rule = f"must be from 1 to {_MOST_TOKENS:g}"
        raise JobError("job/bad-value", "--tokens", shown(text), rule, legal=["15T"])
    return value


def dollars_of(text: str) -> float:
    """A budget: "300", "$300", "1.5k".

    Raises:
        JobError: `job/bad-value` for what is no number above 0.
    """
    match = re.fullmatch(r"\s*\$?\s*(\d[\d_,]*(?:\.\d+)?)\s*([kKM]?)\s*(?:USD|\$)?\s*", text[:60])
    scale = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6}
    value = float(re.sub("[_,]", "", match[1])) * scale[match[2]] if match else 0.0
    if value <= 0:
        rule = "must be dollars above 0"
        raise JobError("job/bad-value", "--budget", shown(text), rule, legal=["300", "1.5k"])
    return value
