"""What will be done: the plan, a lockfile (`plan.json`).

A plan holds everything that decides how the job runs: pools of devices, one program per role, the
transitions between roles, the hardware and the library versions that it was made for, and the
numbers that were predicted before anything ran. Loading it elsewhere is refused, naming what
differs.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from phalanx.errors import PlanError, nearest_names, shown
from phalanx.job import Job, changes
from phalanx.mesh import Mesh
from phalanx.registry import build
from phalanx.strict import LOCKFILE, read_record
from phalanx.whole_file import write_whole

FORMAT_VERSION = 1
# Libraries whose version can change what a plan means: minor releases of these are not mixed.
LOCKED_LIBRARIES = ("phalanx-parallel", "torch")


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A set of devices. Two roles may name the same pool: then they share it in time.

    Attributes:
        machine: kind of device.
        devices: global device ids.
    """

    machine: str
    devices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RoleProgram:
    """What one role does (train, serve, prefill, decode, rollout, reference ...).

    Attributes:
        pool: name of its pool.
        mesh: axis sizes, outermost first; their product is the number of the pool's devices.
        specs: Spec policies as tables with family, name and options.
        order: Order policy as a table, or {}.
        reacts: React policies as tables.
        batch: sizes that the engine needs (micro-batch tokens, accumulation, ...).
        dtypes: params, compute, reduce, master.
        recompute: activations that are computed again in the backward pass: none, selective, full.
        device: "cpu" or "cuda"; backend follows ("gloo" or "nccl").
    """

    pool: str
    mesh: Mapping[str, int]
    specs: Sequence[Mapping[str, Any]] = ()
    order: Mapping[str, Any] = field(default_factory=dict)
    reacts: Sequence[Mapping[str, Any]] = ()
    batch: Mapping[str, Any] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    recompute: str = "none"
    device: str = "cpu"

    def policies(self, tables: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The policies that these tables describe."""
        return [_policy(table) for table in tables]

    def built_specs(self) -> list[Any]:
        """Spec policies, in order."""
        return self.policies(self.specs)

    def built_order(self) -> Any:
        """The Order policy, or None."""
        return _policy(self.order) if self.order else None

    def built_reacts(self) -> list[Any]:
        """React policies, in order."""
        return self.policies(self.reacts)

    def grid(self) -> Mesh:
        """The mesh."""
        return Mesh(dict(self.mesh))


@dataclass(frozen=True, kw_only=True)
class Transition:
    """Tensors that pass from one role to another.

    Attributes:
        source, target: roles.
        tensors: which ("merged weights", "adapter", "kv").
        trigger: when ("end of training", "every step", "request admitted").
        payload_bytes, predicted_s: priced by the reshard planner and the cost model.
    """

    source: str
    target: str
    tensors: str
    trigger: str
    payload_bytes: float = 0.0
    predicted_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The lockfile.

    Attributes:
        job: name of the job; job_key: `Job.result_key`; asked: `Job.result_table`, {}: not known.
        hardware: what `Cluster.to_dict` says, or the calibration of this machine.
        versions: library -> version.
        pools, programs, transitions: what will be done.
        predictions: report rows (as tables) written before anything ran.
    """

    job: str
    job_key: str
    hardware: Mapping[str, Any]
    pools: Mapping[str, Pool]
    programs: Mapping[str, RoleProgram]
    transitions: Sequence[Transition] = ()
    predictions: Sequence[Mapping[str, Any]] = ()
    versions: Mapping[str, str] = field(default_factory=lambda: locked_versions())
    asked: Mapping[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def program(self, role: str) -> RoleProgram:
        """The program of a role.

        Raises:
            PlanError: `plan/illegal` naming the roles that there are.
        """
        if role not in self.programs:
            legal = nearest_names(role, self.programs) or list(self.programs)
            raise PlanError(
                "plan/illegal", "role", repr(role), "the plan has no such role", legal=legal
            )
        return self.programs[role]

    def save(self, path: str | Path) -> None:
        """Write the lockfile; whole or not at all.

        Keys stay in their order: that of a mesh's axes decides which rank stands where.
        """
        write_whole(Path(path), self.to_text())

    def to_text(self) -> str:
        """The lockfile's content."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a lockfile.

        Raises:
            PlanError: `plan/format` for another version, a file that is no plan, and any entry
                that is missing, unknown or of the wrong kind.
        """
        try:
            table = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise PlanError(
                "plan/format", str(path), None, f"not a readable plan: {error}"
            ) from None
        found = table.get("format_version") if isinstance(table, dict) else None
        if found != FORMAT_VERSION:
            rule = "this version of Phalanx reads another plan format; plan the job again"
            where = f"{path}: format_version"
            raise PlanError("plan/format", where, shown(found), rule, legal=[FORMAT_VERSION])
        return read_record(Plan, {"asked": {}} | table, f"{path}: ", LOCKFILE)

    def require_here(self, hardware: Mapping[str, Any], job: Job | None = None) -> None:
        """Refuse to run on other hardware, with other libraries, or for another job.

        Args:
            hardware: the same table made on this machine.
            job: that is about to run (None: do not compare).

        Raises:
            PlanError: `plan/hardware`, `plan/version` or `plan/job`, naming the first difference.
        """
        for name in ("machine", "num_devices"):
            if self.hardware.get(name) != hardware.get(name):
                rule = f"the plan was made for {self.hardware.get(name)!r}; plan the job again here"
                raise PlanError("plan/hardware", f"hardware.{name}", hardware.get(name), rule)
        here = locked_versions()
        for library, wanted in self.versions.items():
            if _minor(here.get(library, "")) != _minor(wanted):
                rule = f"the plan was made with {wanted}"
                raise PlanError(
                    "plan/version", library, here.get(library, "missing"), rule, legal=[wanted]
                )
        if job is not None and job.result_key != self.job_key:
            self._require_same(job)

    def _require_same(self, job: Job) -> None:
        """Of a job with another key: that of the plan has another where releases differ."""
        if not self.asked:
            rule = f"the plan was made for the job with key {self.job_key}; plan this job again"
            raise PlanError("plan/job", "job", job.result_key, rule)
        for change in changes(self.asked, job.result_table):
            rule = "is not what the plan was made for; plan this job again"
            was = [shown(change.was)]
            raise PlanError("plan/job", change.key, shown(change.now), rule, legal=was)


def locked_versions() -> dict[str, str]:
    """Installed versions of the locked libraries and of Python."""
    found = {"python": platform.python_version()}
    for library in LOCKED_LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def _minor(text: str) -> str:
    return ".".join(text.split("+")[0].split(".")[:2])


def _policy(table: Mapping[str, Any]) -> Any:
    if "family" not in table:
        raise PlanError("plan/format", "policy", shown(table), "names no family")
    return build(table["family"], {name: table[name] for name in table if name != "family"})
