"""A table of whole numbers that grows by options and shrinks by rules: how plans are listed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Options = Mapping[str, Sequence[Any] | np.ndarray]


@dataclass(frozen=True)
class Table:
    """Columns of one length.

    Attributes:
        columns: name -> values [N].
    """

    columns: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def keep(self, where: np.ndarray) -> Table:
        """Rows by mask or indices."""
        return Table({name: column[where] for name, column in self.columns.items()})

    def joined(self, **columns: np.ndarray) -> Table:
        """With more columns."""
        return Table(dict(self.columns) | columns)

    def without(self, *names: str) -> Table:
        """With fewer columns."""
        return Table({name: each for name, each in self.columns.items() if name not in names})

    def stacked(self, below: Table) -> Table:
        """Rows of both; they have the same columns."""
        return Table(
            {name: np.concatenate([column, below[name]]) for name, column in self.columns.items()}
        )

    def cross(self, options: Options) -> Table:
        """Every row with every option; options are columns of one length of their own."""
        made = {name: np.asarray(values) for name, values in options.items()}
        count = len(next(iter(made.values())))
        rows = {name: np.repeat(column, count) for name, column in self.columns.items()}
        return Table(rows | {name: np.tile(values, len(self)) for name, values in made.items()})

    def cross_by(self, key: str, options_of: Callable[[int], Options]) -> Table:
        """Every row with the options of its value of `key`; none of them is empty of columns."""
        values, group = np.unique(self[key], return_inverse=True)
        found = [
            {name: np.asarray(column) for name, column in options_of(int(value)).items()}
            for value in values
        ]
        if not found:
            return self
        counts = np.array([len(next(iter(each.values()))) for each in found])
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        times = counts[group]
        ends = np.cumsum(times)
        within = np.arange(ends[-1]) - np.repeat(ends - times, times)
        at = np.repeat(starts[group], times) + within
        rows = {name: np.repeat(column, times) for name, column in self.columns.items()}
        joined = {name: np.concatenate([each[name] for each in found])[at] for name in found[0]}
        return Table(rows | joined)

    def obey(self, illegal: Counter[str], rules: Mapping[str, np.ndarray]) -> Table:
        """Rows that break no rule; others are counted under the first one that they break.

        Args:
            illegal: reason -> rows, added to.
            rules: reason -> which rows break it, a mask [N].
        """
        legal = np.ones(len(self), dtype=bool)
        for reason, is_broken in rules.items():
            count = int((legal & is_broken).sum())
            if count:
                illegal[reason] += count
            legal &= ~is_broken
        return self.keep(legal)
