"""Data sets of the Hugging Face Hub: which of their files are rows to train on.

`owner/name` names all training files of a data set; `owner/name/path` a file, a folder or a pattern
in it. HF_HOME, HF_TOKEN and offline mode are honoured by huggingface_hub, which keeps the files.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from phalanx.data.readers import READERS
from phalanx.errors import JobError, nearest_names

_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_NOT_ROWS = ("dataset_infos.json", "dataset_dict.json", "dataset_info.json", "state.json")


@lru_cache(maxsize=16)
def hub_files(source: str) -> tuple[Path, ...]:
    """The files that a source names, fetched if they are not here; asked once in a process.

    Args:
        source: owner/name, or owner/name/path.

    Raises:
        JobError: `job/not-found` when there is no such data set, or it cannot be fetched;
            `job/bad-value` when the name does not say which files are meant.
    """
    from huggingface_hub.constants import is_offline_mode

    owner, name, *inside = source.split("/", 2)
    repository, path = f"{owner}/{name}", inside[0].strip("/") if inside else ""
    if is_offline_mode():
        folder = _kept(source, repository)
        here = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
        chosen = choose(here, source, path)
    else:
        chosen, folder = _fetch(source, repository, path)
    return tuple(folder / each for each in chosen)


def _fetch(source: str, repository: str, path: str) -> tuple[list[str], Path]:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    # of the HTTP library that this release uses
    no_connection: type[Any] = HfHubHTTPError.__bases__[0]
    try:
        listed = HfApi().dataset_info(repository).siblings or []
        chosen = choose([each.rfilename for each in listed], source, path)
        patterns = [glob.escape(each) for each in chosen]
        folder = snapshot_download(repository, repo_type="dataset", allow_patterns=patterns)
    except HfHubHTTPError as error:
        rule = f"cannot be fetched from the Hub: {_first_line(error)}"
        raise JobError("job/not-found", "data.source", source, rule) from error
    except (OSError, no_connection) as error:
        rule = f"is no path here, and the Hub cannot be reached ({_first_line(error)})"
        hint = "set HF_HUB_OFFLINE=1 to use the copy that was fetched before"
        raise JobError("job/not-found", "data.source", source, f"{rule}; {hint}") from error
    return chosen, Path(folder)


def _kept(source: str, repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(repository, repo_type="dataset", local_files_only=True))
    except (OSError, HFValidationError) as error:
        rule = "is no path here, and was not fetched before offline mode (HF_HUB_OFFLINE) was set"
        raise JobError("job/not-found", "data.source", source, rule) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def choose(names: Sequence[str], source: str, path: str = "") -> list[str]:
    """Of the files of a repository those that are meant, in order.

    Files and patterns are taken as named. Of the repository or a folder: the files whose path says
    "train"; where none does, those that name no split at all.

    Raises:
        JobError: `data/empty` without data; `job/bad-value` when parts of the repository or copies
            in several formats compete.
    """
    rows = sorted(name for name in names if _is_rows(name))
    if path:
        exact = [name for name in rows if name == path or fnmatchcase(name, path)]
        if exact:
            return exact
        rows = [name for name in rows if name.startswith(f"{path}/")]
    if not rows:
        known = [name for name in names if _is_rows(name)]
        rule = f"has no such data files ({', '.join(READERS)})" if path else "has no data files"
        raise JobError("data/empty", "data.source", source, rule, legal=nearest_names(path, known))
    by_split: dict[str, list[str]] = {}
    for name in rows:
        by_split.setdefault(_split(name), []).append(name)
    chosen = by_split.get("train") or by_split.get("")
    if not chosen:
        rule = f"has no training files, only {', '.join(sorted(by_split))}; name the file"
        raise _ambiguous(source, path, rows, rule)
    _require_one(source, path, chosen)
    return chosen


def _is_rows(name: str) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") for part in path.parts)
    return path.suffix in READERS and path.name not in _NOT_ROWS and not hidden


def _split(name: str) -> str:
    found = [_SPLITS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in _SPLITS]
    return found[-1] if found else ""


def _require_one(source: str, path: str, chosen: list[str]) -> None:
    """Configurations lie in folders of their own, and copies have endings of their own."""
    suffixes = {PurePosixPath(name).suffix for name in chosen}
    if len(suffixes) > 1:
        rule = f"holds {' and '.join(sorted(suffixes))} files; name which of them"
        raise _ambiguous(source, path, [f"*{suffix}" for suffix in sorted(suffixes)], rule)
    depth = len(PurePosixPath(path).parts)
    parts = {PurePosixPath(name).parts[depth] for name in chosen if name.count("/") > depth}
    folders = sorted(part for part in parts if not _split(part))
    if len(folders) > 1:
        rule = f"has {len(folders)} parts; name one"
        raise _ambiguous(source, path, [f"{path}/{each}".lstrip("/") for each in folders], rule)


def _ambiguous(source: str, path: str, inside: Sequence[str], rule: str) -> JobError:
    repository = source.removesuffix("/").removesuffix(f"/{path}") if path else source
    legal = [f"{repository}/{each}" for each in inside[:4]]
    return JobError("job/bad-value", "data.source", source, rule, legal=legal)
