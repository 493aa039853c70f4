"""Checkpoints of a run: copied between two steps, written behind the steps, committed by a rename.

The values are safetensors files and the rest is one JSON manifest (`manifest`). The writers of
torch.distributed.checkpoint are not used: torch's own keeps its metadata as a pickle, and its
safetensors writer neither keeps any for sharded files nor tells the digest of what it wrote. Each
file carries the offsets that torch's `HuggingFaceStorageReader` understands, so
`torch.distributed.checkpoint.load` reads these folders.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import phalanx
from phalanx.engines.checkpoint import commit
from phalanx.engines.checkpoint.agree import Council
from phalanx.engines.checkpoint.generators import generator_states
from phalanx.engines.checkpoint.manifest import Manifest, StoredFile, StoredSlice, StoredTensor
from phalanx.engines.checkpoint.progress import Progress
from phalanx.engines.checkpoint.shard_file import write_shard
from phalanx.engines.checkpoint.slices import Slice, require_whole, writers
from phalanx.engines.checkpoint.state import (
    Entry,
    Staging,
    optimizer_entries,
    predicted_bytes,
    weight_entries,
)
from phalanx.engines.optim import ShardedAdamW
from phalanx.engines.process import Process
from phalanx.errors import PlanError, WorldError

if TYPE_CHECKING:
    from phalanx.engines.trainer_model import TrainModel

BEST = "best"


@dataclass(frozen=True)
class _Snapshot:
    """What a rank hands to its writing thread."""

    name: str
    progress: Progress
    staging: Staging
    values: dict[str, Tensor]
    entries: Mapping[str, Entry]
    rng: dict[str, str]


class Checkpoints:
    """Writes the checkpoints of a run into `folder`; all ranks build and use it together.

    Args:
        folder: that holds the checkpoints, on a disk that all ranks see.
        model: bound model.
        optimizer: over its trained parameters.
        process: this process.
        keep: how many of the newest stay; "best" is kept beside them.
        job_key: of the job, compared when one is read.
        sections: sections of the job that change the result, to say what differs.
        num_snapshots: how many copies of the state may be in host memory at once: with 2 one is
            taken while the one before is still being written, with 1 `save` waits for it.
        on_failure: gets the error of a save that failed behind the steps, at the next `save`, on
            all ranks; None: it is raised there.
    """

    def __init__(
        self,
        folder: str | Path,
        model: TrainModel,
        optimizer: ShardedAdamW,
        process: Process,
        *,
        keep: int,
        job_key: str,
        sections: Mapping[str, Any] | None = None,
        num_snapshots: int = 1,
        on_failure: Callable[[WorldError], None] | None = None,
    ) -> None:
        self.folder, self.process = Path(folder), process
        self.model, self.optimizer = model, optimizer
        self.keep, self.job_key, self.sections = keep, job_key, dict(sections or {})
        self.on_failure = on_failure
        self._council, self._behind = Council(), Council()  # of this thread and of the writing one
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._free = [Staging(process.device) for _ in range(num_snapshots)]
        self._pending: deque[tuple[Staging, Future[WorldError | None]]] = deque()
        self._mine: dict[bool, set[str]] = {}
        self._require_all_trained()
        if process.leads:
            commit.recover(self.folder)

    def predicted_bytes(self, *, with_best: bool = False) -> int:
        """Disk space of all checkpoints at their most: one more than are kept, while one is
        written."""
        best = 2 * predicted_bytes(self.optimizer, with_optimizer=False) if with_best else 0
        return (self.keep + 1) * predicted_bytes(self.optimizer) + best

    def require_space(self, *, with_best: bool = False) -> None:
        """Compare `predicted_bytes` with the disk before the first step; all ranks call it.

        Raises:
            JobError: `checkpoint/space`, on all ranks, with folder, bytes needed and free.
        """
        commit.require_space(self.folder, self.predicted_bytes(with_best=with_best), self._council)

    def save(self, progress: Progress, name: str = "step") -> None:
        """Take a snapshot and return; a thread writes it. All ranks call it after the same step.

        Args:
            name: "best" keeps weights only, and one of its kind; others cannot be gone on from.

        Raises:
            WorldError: of an earlier save, as `on_failure` says.
        """
        while not self._free:
            self._finish_oldest()
        entries = weight_entries(self.optimizer)
        if name != BEST:
            entries |= optimizer_entries(self.optimizer)
        mine = self._written_here(name != BEST, entries)
        staging = self._free.pop()
        values = staging.copy({key: each.local for key, each in entries.items() if key in mine})
        rng = generator_states(self.process.device)
        snapshot = _Snapshot(name, progress, staging, values, entries, rng)
        self._pending.append((staging, self._thread.submit(self._write, snapshot)))

    def wait(self) -> None:
        """Until all that was saved is on the disk.

        Raises:
            WorldError: `checkpoint/write` of a save that failed; the ones before it stand.
        """
        failure = None
        while self._pending:
            staging, future = self._pending.popleft()
            self._free.append(staging)
            failure = future.result() or failure
        if failure is not None:
            raise failure

    def close(self) -> None:
        """`wait`, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _require_all_trained(self) -> None:
        """What the optimizer does not know would be missing in the checkpoint."""
        for name, parameter in self.model.decoder.named_parameters():
            if parameter.requires_grad and name not in self.optimizer.named_parameters:
                rule = "is trained, but the optimizer does not have it under this name"
                raise PlanError("plan/illegal", "optimizer", name, rule)

    def _finish_oldest(self) -> None:
        staging, future = self._pending.popleft()
        self._free.append(staging)
        failure = future.result()
        if failure is None:
            return
        if self.on_failure is None:
            raise failure
        self.on_failure(failure)

    def _written_here(self, with_optimizer: bool, entries: Mapping[str, Entry]) -> set[str]:
        """Names whose slice this rank writes; agreed with the others at the first of a kind."""
        if with_optimizer not in self._mine:
            record = {name: each.held for name, each in entries.items()}
            held = [
                {name: Slice(*map(tuple, each)) for name, each in of_rank.items()}
                for of_rank in self._council.gather(record)
            ]
            num_bytes = {name: each.tensor.element_size() for name, each in entries.items()}
            for name, each in entries.items():
                distinct = {of_rank[name] for of_rank in held if of_rank[name].num_elements}
                require_whole(name, each.tensor.shape, sorted(distinct))
            self._mine[with_optimizer] = writers(held, num_bytes)[self.process.rank]
        return self._mine[with_optimizer]

    def _write(self, snapshot: _Snapshot) -> WorldError | None:
        """In the thread: this rank's files, then the agreement that all have theirs."""
        step = snapshot.progress.step
        scratch = commit.scratch_folder(self.folder, snapshot.name, step)
        snapshot.staging.wait()
        try:
            record = self._write_files(scratch, snapshot)
        except OSError as error:
            record = {"error": _told(error, scratch)}
        finally:
            snapshot.values.clear()
        records = self._behind.gather(record)
        error = _first_error(records)
        if self.process.leads:
            if error is None:
                error = self._commit(snapshot, scratch, records)
            if error is not None:
                shutil.rmtree(scratch, ignore_errors=True)
        error = self._behind.gather(error)[0]
        if error is None:
            return None
        rule = f"{error}; the checkpoints before it stand"
        return WorldError("checkpoint/write", f"checkpoint of step {step}", None, rule)

    def _write_files(self, scratch: Path, snapshot: _Snapshot) -> dict[str, Any]:
        scratch.mkdir(parents=True, exist_ok=True)
        files, slices = {}, {}
        for part in dict.fromkeys(each.part for each in snapshot.entries.values()):
            tensors = {
                name: snapshot.values.pop(name)
                for name in list(snapshot.values)
                if snapshot.entries[name].part == part
            }
            if not tensors:
                continue
            file = f"{part}-{self.process.rank:05d}-of-{self.process.world_size:05d}.safetensors"
            held = {name: snapshot.entries[name].held for name in tensors}
            slices |= {name: [file, *each] for name, each in held.items()}
            offsets = {name: each.offset for name, each in held.items()}
            files[file] = write_shard(scratch / file, tensors, offsets)
        return {"files": files, "slices": slices, "rng": snapshot.rng}

    def _commit(
        self, snapshot: _Snapshot, scratch: Path, records: list[dict[str, Any]]
    ) -> str | None:
        """Rank 0, when all files are there: manifest, rename, and older ones away."""
        files = {name: StoredFile(*each) for r in records for name, each in r["files"].items()}
        tensors = {}
        for name, entry in snapshot.entries.items():
            found = [r["slices"][name] for r in records if name in r["slices"]]
            slices = tuple(StoredSlice(f, tuple(offset), tuple(n)) for f, offset, n in found)
            dtype = str(entry.tensor.dtype).removeprefix("torch.")
            tensors[name] = StoredTensor(tuple(entry.tensor.shape), dtype, slices)
        mesh = self.process.mesh
        manifest = Manifest(
            job_key=self.job_key,
            sections=self.sections,
            mesh=dict(zip(mesh.mesh_dim_names, mesh.shape)),
            progress=snapshot.progress.to_dict(),
            tensors=tensors,
            files=files,
            versions={"phalanx": phalanx.__version__, "torch": torch.__version__},
            rng=[record["rng"] for record in records],
        )
        try:
            manifest.save(scratch)
            commit.put(scratch, self.folder, snapshot.name, snapshot.progress.step)
        except OSError as error:
            return _told(error, scratch)
        try:
            keep = 1 if snapshot.name == BEST else self.keep
            commit.prune(self.folder, snapshot.name, snapshot.progress.step, keep)
        except OSError as error:
            return f"it stands, but older ones cannot be removed: {_told(error, self.folder)}"
        return None


def _told(error: OSError, folder: Path) -> str:
    return f"{error.strerror or error}: {error.filename or folder}"


def _first_error(records: list[dict[str, Any]]) -> str | None:
    failed = ((rank, record) for rank, record in enumerate(records) if "error" in record)
    return next((f"rank {rank}: {record['error']}" for rank, record in failed), None)
