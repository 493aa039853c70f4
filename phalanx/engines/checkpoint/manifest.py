"""`manifest.json` of a checkpoint: what it holds, in which files, and what these must be. No torch.

    step-00000037/manifest.json
    step-00000037/weights-00000-of-00004.safetensors
    step-00000037/optimizer-00000-of-00004.safetensors
    ...

A folder with this name and a manifest is a checkpoint; it gets the name when all is on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.errors import JobError, shown

FORMAT, FORMAT_VERSION = "phalanx-checkpoint", 1
FILE = "manifest.json"
WEIGHTS, OPTIMIZER = "weights", "optimizer"
PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".distcp", ".ckpt")


@dataclass(frozen=True)
class StoredSlice:
    """A slice of a tensor: in which file, and where in the whole."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A whole tensor, in slices."""

    shape: tuple[int, ...]
    dtype: str
    slices: tuple[StoredSlice, ...]


@dataclass(frozen=True)
class StoredFile:
    """What a file must be."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All about a checkpoint but the values.

    Attributes:
        job_key: of all sections of the job that change the result.
        sections: those sections, which decide where the keys differ; {}: not known.
        mesh: axis sizes of the run that wrote it; information only, any other mesh can read it.
        progress: `Progress.to_dict`.
        tensors: canonical names; moments are "optimizer.exp_avg.<name>" and so on.
        files: by name.
        versions: of the programs that wrote it.
        rng: by rank, the states of torch's generators by device type, in base64.
    """

    job_key: str
    mesh: Mapping[str, int]
    progress: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]
    sections: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    rng: Sequence[Mapping[str, str]] = ()

    @property
    def has_optimizer(self) -> bool:
        """Whether training can go on from it."""
        return any(name.startswith(OPTIMIZER) for name in self.files)

    def save(self, folder: Path) -> None:
        """Write it, durably, with its own digest."""
        table = {"format": FORMAT, "format_version": FORMAT_VERSION} | asdict(self)
        table["manifest_sha256"] = _digest(table)
        with (folder / FILE).open("x", encoding="utf-8") as file:
            json.dump(table, file, indent=1)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, folder: str | Path) -> Manifest:
        """Read it, without looking at the files.

        Raises:
            JobError: `environment/trust` for pickles, `checkpoint/format` for what is no checkpoint
                or one of another version, `checkpoint/damaged`.
        """
        folder = Path(folder)
        _require_no_pickle(folder)
        try:
            text = (folder / FILE).read_text(encoding="utf-8")
            table = json.loads(text)
        except FileNotFoundError:
            rule = f"is no checkpoint: it has no {FILE}"
            raise JobError("checkpoint/format", "checkpoint", folder, rule) from None
        except ValueError as error:
            raise damaged(folder, f"{FILE} cannot be read: {error}") from error
        if not isinstance(table, dict) or table.get("format") != FORMAT:
            raise JobError("checkpoint/format", "checkpoint", folder, f"its {FILE} is another's")
        if table.get("format_version") != FORMAT_VERSION:
            where, value = f"{folder / FILE}: format_version", table.get("format_version")
            rule = "this version of Phalanx cannot read it"
            raise JobError("checkpoint/format", where, shown(value), rule, legal=[FORMAT_VERSION])
        if table.pop("manifest_sha256", None) != _digest(table):
            raise damaged(folder, f"{FILE} is not what was written")
        return cls._from_table(table)

    @classmethod
    def _from_table(cls, table: dict[str, Any]) -> Manifest:
        tensors = {
            name: StoredTensor(
                tuple(each["shape"]),
                each["dtype"],
                tuple(
                    StoredSlice(s["file"], tuple(s["offset"]), tuple(s["shape"]))
                    for s in each["slices"]
                ),
            )
            for name, each in table["tensors"].items()
        }
        files = {name: StoredFile(**each) for name, each in table["files"].items()}
        known = ("job_key", "mesh", "progress", "sections", "versions", "rng")
        return cls(tensors=tensors, files=files, **{key: table[key] for key in known})

    def require_files(self, folder: Path) -> None:
        """Raise `checkpoint/damaged` for an absent file or one of another size; reads nothing."""
        for name, file in self.files.items():
            path = folder / name
            size = path.stat().st_size if path.is_file() else None
            if size != file.num_bytes:
                found = "is missing" if size is None else f"has {size} bytes"
                raise damaged(folder, f"{name} {found}, written were {file.num_bytes}")

    def wrong_file(self, folder: Path, names: list[str]) -> str | None:
        """The first of these files whose content is not what was written; None: all are."""
        for name in names:
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != self.files[name].sha256:
                    return name
        return None


def damaged(folder: Path, what: str) -> JobError:
    """The error for a checkpoint that must not be used."""
    return JobError("checkpoint/damaged", "checkpoint", folder, what)


def newest_before(folder: Path) -> Path | None:
    """The newest undamaged checkpoint of the same kind before this one."""
    older = (path for path in _by_age(folder.parent, _name_of(folder)) if path.name < folder.name)
    return next((path for path in older if _is_good(path, verify=True)), None)


def latest(folder: str | Path, name: str = "step", *, verify: bool = True) -> Path | None:
    """The newest checkpoint that is complete and undamaged; None: there is none.

    Args:
        folder: that holds checkpoints.
        name: "step", or "best" for the weights of the lowest held-out loss.
        verify: read all files and compare digests; False: names and sizes only.
    """
    candidates = _by_age(Path(folder), name)
    return next((path for path in candidates if _is_good(path, verify=verify)), None)


def step_folder(folder: Path, name: str, step: int) -> Path:
    """Where the checkpoint of a step is kept."""
    return folder / f"{name}-{step:08d}"


def checkpoints_in(folder: Path, name: str) -> list[Path]:
    """Finished checkpoints, newest first, damaged or not."""
    return list(_by_age(folder, name))


def _name_of(folder: Path) -> str:
    return folder.name.rpartition("-")[0] or folder.name


def _by_age(folder: Path, name: str) -> Iterator[Path]:
    found = (path for path in folder.glob(f"{name}-*") if path.name[len(name) + 1 :].isdigit())
    yield from sorted(found, key=lambda path: int(path.name[len(name) + 1 :]), reverse=True)


def _is_good(path: Path, *, verify: bool) -> bool:
    try:
        manifest = Manifest.load(path)
        manifest.require_files(path)
    except JobError:
        return False
    return not verify or manifest.wrong_file(path, list(manifest.files)) is None


def _digest(table: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def _require_no_pickle(folder: Path) -> None:
    if (folder / ".metadata").exists():
        rule = (
            "is a folder of torch.distributed.checkpoint, whose .metadata is a pickle and could "
            "run code; write the weights as safetensors and start from those"
        )
        raise JobError("environment/trust", "checkpoint", folder, rule)
    for path in folder.glob("*"):
        if path.suffix in PICKLES:
            rule = "a checkpoint holds safetensors and JSON only; pickles can run code"
            raise JobError("environment/trust", "checkpoint", path, rule)
