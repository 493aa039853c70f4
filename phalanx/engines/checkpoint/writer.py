"""The part of a checkpoint that happens behind the steps: files, agreement, manifest, rename."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import phalanx
from phalanx.engines.checkpoint import commit
from phalanx.engines.checkpoint.agree import Council
from phalanx.engines.checkpoint.manifest import (
    OPTIMIZER,
    WEIGHTS,
    Manifest,
    StoredFile,
    StoredSlice,
    StoredTensor,
    step_folder,
)
from phalanx.engines.checkpoint.progress import Progress
from phalanx.engines.checkpoint.shard_file import FileRecord, write_shard
from phalanx.engines.checkpoint.snapshot import Staging, Values
from phalanx.engines.checkpoint.state import Entry, Form
from phalanx.engines.process import Process
from phalanx.errors import WorldError


@dataclass(frozen=True)
class Snapshot:
    """What a rank hands to its writing thread.

    Attributes:
        name, progress: of the checkpoint.
        keep: how many of its kind stay.
        staging: whose memory the values are in.
        values: what this rank writes.
        entries: the state of which this rank holds something.
        forms: of the whole state, equal on all ranks.
        rng: states of this rank's generators.
    """

    name: str
    progress: Progress
    keep: int
    staging: Staging
    values: Values
    entries: Mapping[str, Entry]
    forms: Mapping[str, Form]
    rng: dict[str, str]


class Writer:
    """Writes snapshots one after another, always in the same thread; all ranks alike.

    Args:
        folder: that holds the checkpoints.
        process: this process.
        job_key, sections: for the manifest.
    """

    def __init__(
        self, folder: Path, process: Process, job_key: str, sections: Mapping[str, Any]
    ) -> None:
        self.folder, self.process = folder, process
        self.job_key, self.sections = job_key, sections
        self._council = Council()

    def write(self, snapshot: Snapshot) -> Path | WorldError:
        """This rank's files, then the agreement that all have theirs; the same on all ranks."""
        step = snapshot.progress.step
        scratch = commit.scratch_folder(self.folder, snapshot.name, step)
        snapshot.staging.wait()
        try:
            record = self._write_files(scratch, snapshot)
        except OSError as failure:
            record = {"error": _told(failure, scratch)}
        finally:
            snapshot.values.forget()
        records = self._council.gather(record)
        error = _first_error(records)
        if self.process.leads:
            if error is None:
                error = self._commit(snapshot, scratch, records)
            if error is not None:
                shutil.rmtree(scratch, ignore_errors=True)
        error = self._council.gather(error)[0]
        if error is None:
            return step_folder(self.folder, snapshot.name, step)
        rule = f"{error}; the checkpoints before it stand"
        return WorldError("checkpoint/write", f"checkpoint of step {step}", None, rule)

    def _write_files(self, scratch: Path, snapshot: Snapshot) -> dict[str, Any]:
        scratch.mkdir(parents=True, exist_ok=True)
        files: dict[str, FileRecord] = {}
        slices: dict[str, list[Any]] = {}
        for part in (WEIGHTS, OPTIMIZER):
            names = [n for n in snapshot.values.forms if snapshot.entries[n].part == part]
            if not names:
                continue
            file = f"{part}-{self.process.rank:05d}-of-{self.process.world_size:05d}.safetensors"
            held = {name: snapshot.entries[name].held for name in names}
            slices |= {name: [file, *each] for name, each in held.items()}
            offsets = {name: each.offset for name, each in held.items()}
            files[file] = write_shard(scratch / file, snapshot.values, names, offsets)
        return {"files": files, "slices": slices, "rng": snapshot.rng}

    def _commit(
        self, snapshot: Snapshot, scratch: Path, records: list[dict[str, Any]]
    ) -> str | None:
        """Rank 0, when all files are there: manifest, rename, and older ones away."""
        files = {name: StoredFile(*each) for r in records for name, each in r["files"].items()}
        tensors = {}
        for name, form in snapshot.forms.items():
            found = [r["slices"][name] for r in records if name in r["slices"]]
            slices = tuple(StoredSlice(f, tuple(offset), tuple(n)) for f, offset, n in found)
            tensors[name] = StoredTensor(form.shape, form.dtype, slices)
        mesh = self.process.mesh
        manifest = Manifest(
            job_key=self.job_key,
            sections=self.sections,
            mesh=dict(zip(mesh.mesh_dim_names or (), mesh.shape)),
            progress=snapshot.progress.to_dict(),
            tensors=tensors,
            files=files,
            versions={"phalanx": phalanx.__version__, "torch": torch.__version__},
            rng=[record["rng"] for record in records],
        )
        try:
            manifest.save(scratch)
            commit.put(scratch, self.folder, snapshot.name, snapshot.progress.step)
        except OSError as failure:
            return _told(failure, scratch)
        try:
            commit.prune(self.folder, snapshot.name, snapshot.progress.step, snapshot.keep)
        except OSError as failure:
            return f"it stands, but older ones cannot be removed: {_told(failure, self.folder)}"
        return None


def _told(error: OSError, folder: Path) -> str:
    return f"{error.strerror or error}: {error.filename or folder}"


def _first_error(records: list[dict[str, Any]]) -> str | None:
    failed = ((rank, record) for rank, record in enumerate(records) if "error" in record)
    return next((f"rank {rank}: {record['error']}" for rank, record in failed), None)
