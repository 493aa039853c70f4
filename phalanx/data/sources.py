"""Where rows come from: built-in `python-docs`, a file, a folder of files, or the Hub."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from phalanx.data.readers import READERS, read_rows
from phalanx.data.rows import Example, Message, examples_of
from phalanx.errors import JobError, nearest_names

BUILT_IN = ("python-docs",)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(/.*)?")


def read_examples(source: str) -> Iterator[Example]:
    """All rows of a source in its order, one at a time.

    Args:
        source: "python-docs"; a .jsonl, .json, .parquet or .txt file; a folder of them, read in the
            order of their names; or a data set of the Hub (`data.hub`).

    Raises:
        JobError: `job/not-found`, `data/empty`, or `data/row` naming the line that cannot be used.
    """
    if source in BUILT_IN:
        yield from _built_in()
        return
    for path in files_of(source):
        yield from examples_of(read_rows(path))


def distinct(examples: Iterable[Example]) -> Iterator[Example]:
    """The first of every content."""
    seen: set[int] = set()
    for example in examples:
        key = example.key
        if key not in seen:
            seen.add(key)
            yield example


def content_hash(source: str) -> str:
    """Hash of all that `read_examples` would read."""
    if source in BUILT_IN:
        from phalanx.data.python_docs import fingerprint

        return fingerprint()
    digest = hashlib.sha256()
    for path in files_of(source):
        digest.update(f"{path.name}\0".encode())
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            rule = f"cannot be read: {(error.strerror or str(error)).lower()}"
            raise JobError("job/not-found", "data.source", path, rule) from error
    return digest.hexdigest()


def files_of(source: str) -> list[Path]:
    """The files of a source, in the order in which they are read.

    Raises:
        JobError: `job/not-found`; `data/empty` for a folder without data; `job/bad-value` for a
            file with another ending.
    """
    path = Path(source)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:  # longer than a path may be, or with a NUL
        raise JobError("job/not-found", "data.source", source, str(error)) from None
    if is_folder and source:
        return _files_in(path)
    if is_file:
        if path.suffix not in READERS:
            rule = f"is a file of no known kind ({path.suffix or 'without an ending'})"
            raise JobError("job/bad-value", "data.source", source, rule, legal=READERS)
        return [path]
    if _HUB_NAME.fullmatch(source) and not path.parent.is_dir():
        from phalanx.data.hub import hub_files

        return list(hub_files(source))
    near = nearest_names(path.name, _known_names(path.parent))
    rule = f"is no file, folder, Hub name (owner/name) or built-in data ({', '.join(BUILT_IN)})"
    raise JobError("job/not-found", "data.source", source, rule, legal=near or BUILT_IN)


def _known_names(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return [each.name for each in folder.iterdir() if each.suffix in READERS or each.is_dir()]


def _files_in(folder: Path) -> list[Path]:
    try:
        paths = sorted(folder.rglob("*"))
    except OSError as error:
        rule = f"cannot be read: {(error.strerror or str(error)).lower()}"
        raise JobError("job/not-found", "data.source", folder, rule) from error
    found = []
    for path in paths:
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or path.suffix not in READERS or path.is_dir():
            continue
        if not path.is_file():
            raise JobError("job/not-found", "data.source", path, "is a link to nothing")
        found.append(path)
    if not found:
        rule = f"is a folder without data ({', '.join(READERS)})"
        raise JobError("data/empty", "data.source", folder, rule)
    return found


def _built_in() -> Iterator[Example]:
    from phalanx.data.python_docs import question_answer_pairs

    for pair in question_answer_pairs():
        turns = (Message("user", pair.question), Message("assistant", pair.answer))
        yield Example(turns, "", pair.name)
