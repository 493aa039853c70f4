"""Reading a checkpoint on any mesh: each rank reads the parts of stored slices that it holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from phalanx.engines.checkpoint.agree import Council
from phalanx.engines.checkpoint.generators import set_generator_states
from phalanx.engines.checkpoint.manifest import (
    OPTIMIZER,
    WEIGHTS,
    Manifest,
    StoredTensor,
    checkpoints_in,
    damaged,
    newest_before,
)
from phalanx.engines.checkpoint.progress import Progress
from phalanx.engines.checkpoint.slices import Slice
from phalanx.engines.checkpoint.state import (
    Entry,
    Form,
    all_forms,
    optimizer_entries,
    weight_entries,
)
from phalanx.engines.optim import ShardedAdamW
from phalanx.engines.process import Process
from phalanx.errors import JobError, nearest_names
from phalanx.job import changes

if TYPE_CHECKING:
    from phalanx.engines.trainer_model import TrainModel

MAPPED_BYTES = 1 << 27


def restore(
    path: str | Path,
    model: TrainModel,
    optimizer: ShardedAdamW,
    process: Process,
    *,
    job_key: str | None = None,
    sections: Mapping[str, Any] | None = None,
    weights_only: bool = False,
    verify: bool = True,
) -> Progress:
    """Fill the trained weights and the optimizer from a checkpoint of any mesh; all ranks call it.

    Args:
        path: a folder that `Checkpoints` wrote.
        job_key: the job's; None: do not ask whether the checkpoint is of this job.
        sections: the job's, to say which key differs, and to know the job of a release that had
            other keys; {}: `job_key` decides alone.
        weights_only: leave the optimizer alone.
        verify: compare the digests of all files, each rank of some.

    Raises:
        JobError: on all ranks. `environment/trust`, `checkpoint/format`, `checkpoint/damaged`
            (naming the newest good one before it), `checkpoint/job`, `model/tensor`.
    """
    path, council = Path(path), Council()
    try:
        manifest = _opened(path, council, weights_only, verify)
    except JobError as error:
        if error.code != "checkpoint/damaged":
            raise
        good = _before(path) if council.rank == 0 else None
        raise _with_legal(error, council.gather(good)[0]) from error
    if job_key is not None and job_key != manifest.job_key:
        _require_same_job(path, manifest, job_key, sections or {})
    entries = weight_entries(optimizer)
    if not weights_only:
        entries |= optimizer_entries(optimizer)
    stored = manifest.tensors
    if weights_only:
        stored = {n: t for n, t in stored.items() if not n.startswith(f"{OPTIMIZER}.")}
    forms = all_forms(council, {name: each.tensor for name, each in entries.items()})
    _require_same(path, forms, stored)
    optimizer.about_to_change()
    read_slices(path, entries, stored)
    for module in model.decoder.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # whole copies of the old weights may lie about
    model.data.finish_update()
    if weights_only:
        optimizer.take_weights()
    if not weights_only and len(manifest.rng) == process.world_size:
        set_generator_states(manifest.rng[process.rank], process.device)
    return Progress.from_dict(manifest.progress)


def restore_latest(
    folder: str | Path,
    model: TrainModel,
    optimizer: ShardedAdamW,
    process: Process,
    *,
    job_key: str | None = None,
    sections: Mapping[str, Any] | None = None,
    on_damaged: Callable[[JobError], None] | None = None,
) -> tuple[Path, Progress] | None:
    """`restore` from the newest checkpoint in `folder` that is not damaged; None: there is none.

    Args:
        on_damaged: gets the error of each newer one, on all ranks; None: a warning.

    Raises:
        JobError: as `restore`, but for damage.
    """
    council = Council()
    names = [path.name for path in checkpoints_in(Path(folder), "step")]
    for name in council.gather(names)[0]:
        path = Path(folder) / name
        try:
            _opened(path, council, weights_only=False)
        except JobError as error:
            if error.code != "checkpoint/damaged":
                raise
            (on_damaged or (lambda each: warnings.warn(str(each), stacklevel=3)))(error)
            continue
        progress = restore(
            path, model, optimizer, process, job_key=job_key, sections=sections, verify=False
        )
        return path, progress
    return None


def _opened(path: Path, council: Council, weights_only: bool, verify: bool = True) -> Manifest:
    """The manifest, once all ranks together have found its files as they were written."""
    manifest, error = None, None
    try:
        manifest = Manifest.load(path)
        manifest.require_files(path)
        if not (weights_only or manifest.has_optimizer):
            rule = "holds weights only, so training cannot go on from it"
            raise JobError("checkpoint/format", "checkpoint", path, rule)
        names = [n for n in sorted(manifest.files) if not weights_only or n.startswith(WEIGHTS)]
        mine = names[council.rank :: council.size] if verify else []
        if (wrong := manifest.wrong_file(path, mine)) is not None:
            raise damaged(path, f"{wrong} is not what was written: its sha256 differs")
    except JobError as found:
        error = found
    told = None if error is None else [error.code, error.where, str(error.value), error.rule]
    first = next((each for each in council.gather(told) if each is not None), None)
    if first is not None:
        raise error or JobError(*first)
    assert manifest is not None
    return manifest


def _before(path: Path) -> str | None:
    good = newest_before(path)
    return None if good is None else str(good)


def _with_legal(error: JobError, good: str | None) -> JobError:
    legal = [] if good is None else [good]
    return JobError(error.code, error.where, error.value, error.rule, legal=legal)


def _require_same(
    path: Path, forms: Mapping[str, Form], stored: Mapping[str, StoredTensor]
) -> None:
    where = f"checkpoint {path}"
    for name in stored:
        if name not in forms:
            legal = nearest_names(name, forms)
            rule = "is no tensor that this job trains"
            raise JobError("model/tensor", where, name, rule, legal=legal)
    for name, form in forms.items():
        if name not in stored:
            legal = nearest_names(name, stored)
            rule = "is trained by this job and is not stored"
            raise JobError("model/tensor", where, name, rule, legal=legal)
        found = stored[name]
        if (found.shape, found.dtype) != form:
            rule = f"{name} must be {form.dtype} of shape {form.shape}"
            raise JobError("model/tensor", where, f"{found.dtype} {found.shape}", rule)


def _require_same_job(
    path: Path, manifest: Manifest, job_key: str, sections: Mapping[str, Any]
) -> None:
    """Of two jobs with different keys; the same one has another key where releases differ."""
    rule = "belongs to another job"
    if manifest.sections and sections:
        different = changes(manifest.sections, sections)
        if not different:
            return
        rule += f": {', '.join(each.told() for each in different[:3])}"
        rule += ", ..." if len(different) > 3 else ""
    else:
        rule += f": its key is {manifest.job_key} and this one's is {job_key}"
    raise JobError("checkpoint/job", "checkpoint", path, rule)


class _Piece(NamedTuple):
    """A part of a stored slice, where it stands there and where in this rank's tensor."""

    name: str
    stored: tuple[slice, ...]
    held: tuple[slice, ...]
    num_bytes: int


@torch.no_grad()
def read_slices(
    path: Path, entries: Mapping[str, Entry], stored: Mapping[str, StoredTensor]
) -> None:
    """Fill what this rank holds of each tensor, file by file, one overlap at a time."""
    wanted: dict[str, list[_Piece]] = {}
    for name, entry in entries.items():
        for each in stored[name].slices:
            source = Slice(each.offset, each.shape)
            if (overlap := source.overlap(entry.held)) is not None:
                num_bytes = overlap.num_elements * entry.tensor.element_size()
                places = overlap.within(source), overlap.within(entry.held)
                wanted.setdefault(each.file, []).append(_Piece(name, *places, num_bytes))
    for file, pieces in sorted(wanted.items()):
        try:
            for batch in _batches(pieces):
                with safe_open(path / file, "pt") as reader:
                    for piece in batch:
                        value = _read(reader, piece.name, piece.stored)
                        entries[piece.name].local[piece.held].copy_(value)
        except SafetensorError as error:
            raise damaged(path, f"{file} cannot be read: {error}") from error


def _batches(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """What is read before the file is opened again: its pages stay in memory until then."""
    batch: list[_Piece] = []
    for piece in pieces:
        batch.append(piece)
        if sum(each.num_bytes for each in batch) >= MAPPED_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def _read(reader: safe_open, name: str, index: Sequence[slice]) -> Tensor:
    return reader.get_slice(name)[tuple(index)] if index else reader.get_tensor(name)
