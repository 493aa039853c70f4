"""Cross-validation over whole groups: rows that share a group are never on both sides.

A fit judged by rows it has seen, or by their neighbours in the same table, says little about a
table it has never seen. Fit scripts split with this, by the names of groups alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar
from zlib import crc32

from phalanx.errors import JobError


class Grouped(Protocol):
    """What can be split."""

    @property
    def group(self) -> str:
        """Key of what must stay together."""


Row = TypeVar("Row", bound=Grouped)


def folds(rows: Sequence[Row], count: int = 5) -> list[tuple[list[Row], list[Row]]]:
    """`count` pairs of rows to fit and rows to judge by; every row is judged exactly once.

    Groups are dealt out largest first to the fold with the fewest rows, ties broken by a hash of
    the group, so that no fold is all one source's large grids.

    Raises:
        JobError: `job/bad-value` for fewer than two.
    """
    if count < 2:
        raise JobError("job/bad-value", "folds", count, "must be at least 2", legal=[2])
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.group] = sizes.get(row.group, 0) + 1
    filled = [0] * count
    fold_of = {}
    for group in sorted(sizes, key=lambda name: (-sizes[name], crc32(name.encode()))):
        fold = min(range(count), key=lambda at: (filled[at], at))
        fold_of[group] = fold
        filled[fold] += sizes[group]
    return [
        (
            [row for row in rows if fold_of[row.group] != at],
            [row for row in rows if fold_of[row.group] == at],
        )
        for at in range(count)
    ]
