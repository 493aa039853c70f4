"""Checkpoints of a run: taken between two steps, written behind the steps, committed by a rename.

The values are safetensors files and the rest is one JSON manifest (`manifest`). The writers of
torch.distributed.checkpoint are not used: torch's own keeps its metadata as a pickle, and its
safetensors writer neither keeps any for sharded files nor tells the digest of what it wrote. Each
file carries the offsets that torch's `HuggingFaceStorageReader` understands, so
`torch.distributed.checkpoint.load` reads these folders.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.engines.checkpoint import commit
from phalanx.engines.checkpoint.agree import Council
from phalanx.engines.checkpoint.generators import generator_states
from phalanx.engines.checkpoint.progress import Progress
from phalanx.engines.checkpoint.slices import Slice, require_whole, writers
from phalanx.engines.checkpoint.snapshot import Staging
from phalanx.engines.checkpoint.state import (
    Entry,
    Form,
    Sizes,
    all_forms,
    optimizer_entries,
    weight_entries,
)
from phalanx.engines.checkpoint.writer import Snapshot, Writer
from phalanx.engines.optim import ShardedAdamW
from phalanx.engines.process import Process
from phalanx.errors import PlanError, WorldError

if TYPE_CHECKING:
    from phalanx.engines.trainer_model import TrainModel

BEST = "best"


class _Part(NamedTuple):
    """Names whose slice this rank writes, and the forms of all that is written."""

    mine: set[str]
    forms: Mapping[str, Form]


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
        on_failure: gets the error of a save that failed behind the steps, at the next `save`, on
            all ranks; None: it is raised there.
        on_saved: gets progress, name and folder of each checkpoint that is complete, on all ranks,
            in the `save`, `wait` or `close` that first knows.
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
        on_failure: Callable[[WorldError], None] | None = None,
        on_saved: Callable[[Progress, str, Path], None] | None = None,
    ) -> None:
        self.folder, self.process = Path(folder), process
        self.model, self.optimizer, self.keep = model, optimizer, keep
        self.on_failure, self.on_saved = on_failure, on_saved
        self._council = Council()
        self._writer = Writer(self.folder, process, job_key, json.loads(json.dumps(sections or {})))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._staging: dict[str, Staging] = {}
        self._pending: deque[tuple[Snapshot, Future[Path | WorldError]]] = deque()
        self._parts: dict[bool, _Part] = {}
        self._require_all_trained()
        self._sizes = Sizes.of(self._council, optimizer)
        optimizer.before_change.append(self._keep_apart)
        if process.leads:
            commit.recover(self.folder)

    def predicted_bytes(self, *, periodic: bool = True, with_best: bool = False) -> int:
        """Disk space of all checkpoints at their most.

        Args:
            periodic: they are taken during the run, so that while one is written there is one more
                than are kept; False: one, should the run be stopped.
            with_best: "best" is kept beside them, and one more while it is written.
        """
        num_ranks = self.process.world_size
        best = self._sizes.checkpoint_bytes(num_ranks, with_optimizer=False)
        whole = self._sizes.checkpoint_bytes(num_ranks)
        return (self.keep + 1 if periodic else 1) * whole + (2 * best if with_best else 0)

    def require_space(self, *, periodic: bool = True, with_best: bool = False) -> None:
        """Compare `predicted_bytes` with the disk before the first step; all ranks call it.

        Raises:
            JobError: `checkpoint/space`, on all ranks, with folder, bytes needed and free.
        """
        needed_bytes = self.predicted_bytes(periodic=periodic, with_best=with_best)
        commit.require_space(self.folder, needed_bytes, self._council)

    def save(self, progress: Progress, name: str = "step") -> None:
        """Take a snapshot and return; a thread writes it. All ranks call it after the same step.

        It waits only for the one before of the same name, should that still be written. Until the
        thread is done, trained weights may be changed by `optimizer` and `restore` only.

        Args:
            progress: as JSON can hold it.
            name: "best" keeps weights only, and one of its kind; training cannot go on from it.

        Raises:
            WorldError: of an earlier save, as `on_failure` says.
        """
        while any(snapshot.name == name for snapshot, _ in self._pending):
            if (failure := self._finish_oldest()) is None:
                continue
            if self.on_failure is None:
                raise failure
            self.on_failure(failure)
        progress = Progress.from_dict(json.loads(json.dumps(progress.to_dict())))  # of this moment
        entries = weight_entries(self.optimizer)
        if name != BEST:
            entries |= optimizer_entries(self.optimizer)
        part = self._part(name != BEST, entries)
        staging = self._staging.setdefault(name, Staging(self.process.device))
        here = {key: each.local for key, each in entries.items() if key in part.mine}
        values = staging.take(here)
        keep = 1 if name == BEST else self.keep
        rng = generator_states(self.process.device)
        snapshot = Snapshot(name, progress, keep, staging, values, entries, part.forms, rng)
        self._pending.append((snapshot, self._thread.submit(self._writer.write, snapshot)))

    def wait(self) -> None:
        """Until all that was saved is on the disk.

        Raises:
            WorldError: `checkpoint/write` of a save that failed; the ones before it stand.
        """
        failure = None
        while self._pending:
            failure = self._finish_oldest() or failure
        if failure is not None:
            raise failure

    def close(self) -> None:
        """`wait`, and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self.optimizer.before_change.remove(self._keep_apart)

    def _keep_apart(self) -> None:
        """The tensors are about to change, snapshots must not."""
        for snapshot, _ in self._pending:
            snapshot.values.detach()

    def _require_all_trained(self) -> None:
        """What the optimizer does not know would be missing in the checkpoint."""
        for name, parameter in self.model.decoder.named_parameters():
            if parameter.requires_grad and name not in self.optimizer.named_parameters:
                rule = "is trained, but the optimizer does not have it under this name"
                raise PlanError("plan/illegal", "optimizer", name, rule)

    def _finish_oldest(self) -> WorldError | None:
        snapshot, future = self._pending.popleft()
        outcome = future.result()
        if isinstance(outcome, WorldError):
            return outcome
        if self.on_saved is not None:
            self.on_saved(snapshot.progress, snapshot.name, outcome)
        return None

    def _part(self, with_optimizer: bool, entries: Mapping[str, Entry]) -> _Part:
        """What this rank writes; agreed with the others at the first of a kind."""
        if with_optimizer not in self._parts:
            forms = all_forms(self._council, {name: each.tensor for name, each in entries.items()})
            held = [
                {name: Slice(*map(tuple, each)) for name, each in of_rank.items()}
                for of_rank in self._council.gather({n: each.held for n, each in entries.items()})
            ]
            for name, form in forms.items():
                distinct = {of_rank[name] for of_rank in held if name in of_rank}
                require_whole(name, form.shape, sorted(d for d in distinct if d.num_elements))
            num_bytes = {name: form.element_bytes for name, form in forms.items()}
            mine = writers(held, num_bytes)[self.process.rank]
            self._parts[with_optimizer] = _Part(mine, forms)
        return self._parts[with_optimizer]
