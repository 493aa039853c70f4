"""The words of `phalanx plan` as a job and a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.cli.job import resolve
from phalanx.errors import JobError
from phalanx.job import Job, parse_flags
from phalanx.planner.clusters import asked_clusters
from phalanx.planner.emitters import priced_as
from phalanx.planner.importers import (
    ForeignPlan,
    config_file,
    job_keys,
    read_foreign,
    with_step_rows,
)
from phalanx.planner.question import Question, dollars_of, row_count, total_count
from phalanx.units import parse_quantity

_BATCH = "train.global_batch_tokens"


class Asked:
    """What a command line says, gathered part by part; `job` and `question` come last.

    Args:
        target: job file, or a model.
        arguments: dotted flags.
        emit_to: program that the plan is written for, and a folder behind a colon. Its memory and
            speed count, unless others are asked for.
    """

    def __init__(
        self,
        target: str,
        model: str,
        data: str,
        on: str,
        arguments: Sequence[str],
        emit_to: str = "",
    ) -> None:
        self._file = target if target.endswith(".toml") else ""
        if target and model and not self._file:
            rule = f"the model is named twice: --model says {model}"
            raise JobError("job/syntax", "arguments", target, rule)
        self._arguments, self._on = list(arguments), on
        if on and "plan.on" in parse_flags(self._arguments):
            rule = f"is given twice: a short flag says {on}"
            raise JobError("job/syntax", "--plan.on", parse_flags(arguments)["plan.on"], rule)
        self._keys: dict[str, Any] = {
            "model.name": model if self._file else model or target,
            "data.source": data,
        }
        self._asks: dict[str, Any] = {"on": on, "whole_epoch": not self._file}
        self._foreign: ForeignPlan | None = None
        self._written_for = emit_to.partition(":")[0]

    def method(self, lora: int | None, full: bool, seq: str) -> None:
        """What is trained; rows of one length without a word of it are pretraining.

        Raises:
            JobError: `job/syntax` for two methods.
        """
        if lora is not None and full:
            rule = "contradict each other: train adapters, or all weights"
            raise JobError("job/syntax", "--lora, --full", None, rule)
        own = parse_flags(self._arguments)
        if lora is not None:
            self._keys |= {"train.method": "lora", "train.lora_rank": lora}
        elif full:
            self._keys["train.method"] = "full"
        elif seq and not self._file and "train.method" not in own:
            self._keys["train.method"] = "pretrain"

    def limits(self, deadline: str, budget: str) -> None:
        """Of the whole job.

        Raises:
            JobError: `job/bad-value` for no time and no money.
        """
        if deadline and parse_quantity(deadline, "s", "--deadline") <= 0:
            rule = "must be above 0; without it no time is too long"
            raise JobError("job/bad-value", "--deadline", deadline, rule, legal=["12h"])
        self._keys["limits.time_s"] = deadline
        self._asks["sizes"] = bool(deadline or budget)
        if budget:
            self._asks["budget_usd"] = dollars_of(budget)

    def rows(self, seq: str, global_tokens: str, tokens: str) -> None:
        """Of one length, and the tokens of a step and of the run.

        Raises:
            JobError: `job/syntax` where a data file is named too, and where two flags say how long
                the job is.
        """
        own = parse_flags(self._arguments)
        if tokens and "train.steps" in own:
            rule = f"contradict each other: the length of the job, {tokens} or {own['train.steps']}"
            raise JobError("job/syntax", "--tokens, --train.steps", None, rule)
        if seq and "train.epochs" in own:
            rule = "counts passes over a data file; with --seq say --tokens or --train.steps"
            raise JobError("job/syntax", "--train.epochs", own["train.epochs"], rule)
        if seq and self._keys["data.source"]:
            source = self._keys["data.source"]
            rule = f"contradict each other: rows come from {source}, or all have one length"
            raise JobError("job/syntax", "--seq, --data", seq, rule)
        if global_tokens:
            count = row_count(global_tokens, "--global-tokens")
            self._keys[_BATCH] = count
        if seq:
            self._asks["seq_tokens"] = row_count(seq, "--seq")
        if tokens:
            self._asks["total_tokens"] = total_count(tokens)

    def read(self, path: str) -> None:
        """Another program's configuration: what it states, unless the user's own flags say it.

        Raises:
            JobError: `job/bad-value` for a server's; from `read_foreign`.
        """
        foreign = read_foreign(path)
        if foreign.role != "train":
            rule = "is the configuration of a server; a training plan was asked for"
            raise JobError("job/bad-value", "--from", path, rule)
        if seq := self._asks.get("seq_tokens"):
            told = {**foreign.origin, "row_tokens": "--seq"}
            foreign = replace(foreign, row_tokens=seq, origin=told)
        number = asked_clusters(self._on)[0].cluster.num_devices if self._on else 0
        own = {*parse_flags(self._arguments), *(key for key, it in self._keys.items() if it)}
        for key, value in job_keys(foreign, number).items():
            is_elsewhere = key == "data.source" and not Path(str(value)).exists()
            if key not in own and not is_elsewhere:
                self._keys[key] = value
        if not foreign.model and len(foreign.sizes) > 1 and not (self._file or "model.name" in own):
            self._keys["model.name"] = str(config_file(foreign))
        if "seq_tokens" in self._asks and "train.method" not in {*self._keys, *own}:
            self._keys["train.method"] = "pretrain"
        if foreign.row_tokens and not self._keys["data.source"]:
            self._asks.setdefault("seq_tokens", foreign.row_tokens)
        self._foreign = self._with_batch(foreign, number)

    def _with_batch(self, foreign: ForeignPlan, num_devices: int) -> ForeignPlan:
        """The file's plan and the job with one batch, where rows have one length."""
        row_tokens = self._asks.get("seq_tokens")
        if not row_tokens or not num_devices:
            return foreign
        named = parse_flags(self._arguments).get(_BATCH) or self._keys.get(_BATCH)
        batch_tokens = row_count(str(named), f"--{_BATCH}") if named else 0
        foreign = with_step_rows(foreign, num_devices, row_tokens, batch_tokens)
        if not batch_tokens and foreign.step_rows:
            self._keys[_BATCH] = foreign.step_rows * row_tokens
        return foreign

    def question(self, *, precision: str, base_bits: int, software: str, **more: Any) -> Question:
        """What is asked beside the job's keys.

        Raises:
            JobError: `registry/unknown` for a target that is not known; from `Question`.
        """
        foreign = self._foreign
        target = priced_as(self._written_for) if self._written_for else ""
        own = foreign.software if foreign else target
        return Question(
            **self._asks,
            **more,
            precision=precision or _priced_precision(foreign),
            base_bits=base_bits or (foreign.base_bits if foreign else 0) or 0,
            software=software or own,
            foreign=foreign,
        )

    def job(self) -> Job:
        """The job: its file, dotted flags, short flags.

        Raises:
            JobError: `job/missing` where neither the user nor the file says which model.
        """
        own = parse_flags(self._arguments)
        if self._foreign and not (self._file or self._keys["model.name"] or "model.name" in own):
            rule = f"{self._foreign.path} names no model: put it before --from"
            raise JobError("job/missing", "MODEL", None, rule, legal=["llama-3.1-8b"])
        return resolve(self._file, "", "", self._arguments, self._keys)


def _priced_precision(foreign: ForeignPlan | None) -> str:
    stated = foreign.precision if foreign else None
    return stated if stated not in (None, "fp32") else "bf16"
