"""Steps that were measured here, as a correction of steps that are planned here. No torch.

A finished run says what its steps took; the formula says what they should have taken. The ratio of
the two, over the runs of one kind of device, one software and one method, corrects later prices. It
is applied only where a user asks for it, and a plan says so.

Formulas: with ratios r of n runs, factor = exp(mean log r); the bar is factor * exp(+-w) with
w = 1.645 sqrt(s^2 + b^2 / n), where s is the standard deviation of log r and b = 0.12 stands for
what a single run does not show (assumption).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from phalanx.cost.bars import Bar
from phalanx.cost.model_shape import shape_of
from phalanx.cost.training_plans import RECOMPUTE, TrainingPlans
from phalanx.cost.training_step import training_step
from phalanx.data.cached import cache_folder, content_key
from phalanx.errors import JobError, shown
from phalanx.hardware import Machine, machine_called
from phalanx.models.config import parse_config
from phalanx.strict import read_record
from phalanx.whole_file import write_whole

FORMAT_VERSION = 1
PRICED_AS = "torch"  # the software whose efficiencies prices of runs here are made with
_SINGLE_RUN = 0.12
_NINE_OF_TEN = 1.645  # standard deviations
_FEWEST_STEPS = 3
_SHARDS = ("shard", "replicate")
_TENSOR = "tp"


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A finished training run, with what it takes to price it again.

    Attributes:
        name: of the job; key: of its result and its plan.
        device: as the machine calls it, processor or GPU.
        software: versions of Phalanx and torch.
        method: "lora", "full" or "pretrain".
        dtype: that computed.
        config: sizes of the model, as its config.json has them.
        plan: columns of `TrainingPlans`, one plan.
        step_s: median over its steps, at their mean number of tokens, without the first.
        num_steps: that it is the median of.
    """

    name: str
    key: str
    device: str
    software: Mapping[str, str]
    method: str
    dtype: str
    lora_rank: int
    config: Mapping[str, Any]
    plan: Mapping[str, float]
    step_s: float
    num_steps: int

    def plans(self) -> TrainingPlans:
        """The run's plan as a table of one row."""
        columns: dict[str, Any] = {
            name: int(value) if float(value).is_integer() else value
            for name, value in self.plan.items()
        }
        scalars = {"method": self.method, "lora_rank": self.lora_rank, "software": PRICED_AS}
        return TrainingPlans(**columns | scalars)

    def priced_s(self, machine: Machine) -> float:
        """The step by the formula that plans are made with."""
        times = training_step(shape_of(parse_config(dict(self.config))), self.plans(), machine)
        return float(times.total_s[0])


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What planned seconds are multiplied by.

    Attributes:
        factor: measured over priced, with its bar.
        num_runs: behind it.
        where: device, software, method and dtype that it is of.
    """

    factor: Bar
    num_runs: int
    where: str

    def step_s(self, priced_s: float) -> Bar:
        """A corrected step with its bar."""
        return self.factor * priced_s

    def describe(self) -> str:
        """One line, for the plan that it changes."""
        runs = f"{self.num_runs} run{'s' if self.num_runs > 1 else ''}"
        return (
            f"measured {runs}: x{self.factor.value:.2f} "
            f"({self.factor.low:.2f} to {self.factor.high:.2f}); {self.where}"
        )


def read_run(folder: str | Path) -> MeasuredRun:
    """What a run folder tells.

    Raises:
        JobError: `job/not-found` for a folder without a finished run, `job/syntax` for files that
            Phalanx did not write, `job/bad-value` for a run of fewer than three steps or with axes
            that are not priced here.
    """
    folder = Path(folder)
    plan, job, config = (
        _table(folder, name) for name in ("plan.json", "job.json", "export/config.json")
    )
    try:
        program, train = plan["programs"]["train"], job["sections"]["train"]
        steps = _steps(folder / "metrics.jsonl")
        columns = _columns(program, steps, folder)
        versions = {each: str(text) for each, text in plan["versions"].items() if each != "python"}
        method = str(train["method"])
        return MeasuredRun(
            name=str(plan["job"]),
            key=content_key(plan["job_key"], program, [step["step_s"] for step in steps]),
            device=str(plan["hardware"]["machine"]),
            software=versions,
            method=method,
            dtype=str(program["dtypes"]["compute"]),
            lora_rank=int(train["lora_rank"]) if method == "lora" else 0,
            config=config,
            plan=columns,
            step_s=_typical_s(steps),
            num_steps=len(steps),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        rule = f"is not what Phalanx wrote: {type(error).__name__}: {error}"
        raise JobError("job/syntax", str(folder), None, rule) from None


def remember(run: MeasuredRun, store: Path | None = None) -> Path:
    """Add a run to those of its device and software, once; returns the file.

    Args:
        store: file to add to; None: one under `~/.cache/phalanx/measured`.

    Raises:
        JobError: from `recall`; `data/cache` where the file cannot be written.
    """
    path = store or _cached(run.device, run.software)
    runs = {each.key: each for each in (recall(path) if path.exists() else ())} | {run.key: run}
    table = {"format_version": FORMAT_VERSION, "runs": [asdict(each) for each in runs.values()]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(table, indent=1) + "\n")
    except OSError as error:
        raise JobError("data/cache", str(path), None, error.strerror or str(error)) from None
    return path


def recall(source: str | Path) -> Sequence[MeasuredRun]:
    """The runs of a file that `remember` wrote, or the run of a run folder.

    Raises:
        JobError: as `read_run`; `job/syntax` or `job/bad-value` for a file of another form.
    """
    path = Path(source)
    if path.is_dir():
        return [read_run(path)]
    if not path.exists():
        rule = "is neither a run folder nor a file of measured runs"
        raise JobError("job/not-found", "measured run", str(path), rule)
    table = _table(path.parent, path.name)
    runs = table.get("runs")
    if table.get("format_version") != FORMAT_VERSION or not isinstance(runs, list):
        rule = f"holds no measured runs of format {FORMAT_VERSION}"
        raise JobError("job/syntax", str(path), None, rule)
    return [
        read_record(MeasuredRun, run, f"{path.name}: runs[{at}]") for at, run in enumerate(runs)
    ]


def recall_all() -> Sequence[MeasuredRun]:
    """All runs that were remembered without naming a file, oldest files first."""
    files = sorted(cache_folder("measured").glob("*.json"), key=lambda path: path.stat().st_mtime)
    return [run for path in files for run in recall(path)]


def correction(
    runs: Iterable[MeasuredRun],
    machine: Machine,
    software: Mapping[str, str],
    *,
    method: str,
    dtype: str,
) -> Correction | None:
    """The correction of prices for a machine; None where no run is of it.

    Args:
        software: versions that will run, of Phalanx and torch; runs with others do not count.
        method: "lora", "full" or "pretrain".
        dtype: that will compute.
    """
    alike = [
        run
        for run in {run.key: run for run in runs}.values()
        if is_device(run.device, machine)
        and (run.method, run.dtype) == (method, dtype)
        and dict(run.software) == {name: software.get(name) for name in run.software}
    ]
    if not alike:
        return None
    logs = [math.log(run.step_s / run.priced_s(machine)) for run in alike]
    spread = stdev(logs) if len(logs) > 1 else 0.0
    width = _NINE_OF_TEN * math.sqrt(spread**2 + _SINGLE_RUN**2 / len(logs))
    middle = fmean(logs)
    versions = ", ".join(f"{name} {version}" for name, version in alike[0].software.items())
    return Correction(
        factor=Bar(*(math.exp(middle + each) for each in (0.0, -width, width))),
        num_runs=len(logs),
        where=f"{alike[0].device}, {versions}, {method} in {dtype}",
    )


def is_device(name: str, machine: Machine) -> bool:
    """Whether a device that calls itself so is one of the machine's: the one that its name says, or
    the processor that a calibrated machine's title starts with."""
    called = machine_called(name.split(",")[0])  # memory and driver of a GPU follow
    if called is not None:
        return called.name == machine.name
    return bool(name) and machine.title.startswith(name)


def _cached(device: str, software: Mapping[str, str]) -> Path:
    return cache_folder("measured") / f"{content_key(device, dict(software))}.json"


def _table(folder: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8"))
    except OSError as error:
        rule = f"holds no finished run ({name}: {error.strerror})"
        raise JobError("job/not-found", "measured run", str(folder), rule) from None
    except ValueError as error:
        raise JobError("job/syntax", str(folder / name), None, str(error)) from None
    if not isinstance(found, dict):
        rule = "is not what Phalanx wrote: must be a table"
        raise JobError("job/syntax", str(folder / name), None, rule)
    return found


def _steps(path: Path) -> list[dict[str, Any]]:
    """Lines of steps, without the first, which warms up."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        rule = f"holds no finished run ({path.name}: {error.strerror})"
        raise JobError("job/not-found", "measured run", str(path.parent), rule) from None
    steps = [line for line in lines if line["kind"] == "step" and line["step"] > 1]
    if len(steps) < _FEWEST_STEPS:
        rule = f"must have at least {_FEWEST_STEPS} steps after the first"
        raise JobError("job/bad-value", "measured run", str(path.parent), rule)
    for step in steps:
        if not (0.0 < step["step_s"] < math.inf and step["tokens"] > 0):
            raise JobError("job/syntax", str(path), shown(step["step_s"]), "is no time of a step")
    return steps


def _typical_s(steps: Sequence[Mapping[str, Any]]) -> float:
    token_s = median(step["step_s"] / step["tokens"] for step in steps)
    return float(token_s * fmean(step["tokens"] for step in steps))


def _columns(
    program: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], folder: Path
) -> dict[str, float]:
    """Of `TrainingPlans`; micro-batches are taken as equal rows of the mean number of tokens."""
    mesh = {str(axis): int(size) for axis, size in program["mesh"].items()}
    for axis in mesh:
        if axis not in (*_SHARDS, _TENSOR):
            rule = f"has an axis {axis!r} that is not priced here"
            raise JobError("job/bad-value", "measured run", str(folder), rule)
    data = math.prod(mesh.get(axis, 1) for axis in _SHARDS)
    num_micro = fmean(step["micro_batches"] for step in steps)
    tokens = fmean(step["tokens"] for step in steps)
    specs = {str(spec["family"]): spec for spec in program["specs"]}
    shard = mesh.get("shard", 1)
    return {
        "tensor": mesh.get(_TENSOR, 1),
        "data": data,
        "shard": shard,
        "zero": 3 if shard > 1 else 0,
        "keeps_gathered": int(specs.get("data", {}).get("reshard_after_forward") is False),
        "num_micro": num_micro,
        "row_tokens": tokens / data / num_micro,
        "counted_frac": fmean(step["counted_tokens"] / step["tokens"] for step in steps),
        "recompute": RECOMPUTE.index(program["recompute"]),
    }
