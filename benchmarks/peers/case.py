"""The work that all peers are given: the same model, the same packed rows, the same targets."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

RANK, LEARNING_RATE = 16, 1e-4
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Row:
    """A packed row.

    Attributes:
        tokens_S: ids; document_starts: first token of each document.
        counted_N: positions whose successor is a target; targets_N: those successors.
    """

    tokens_S: np.ndarray
    document_starts: tuple[int, ...]
    counted_N: np.ndarray
    targets_N: np.ndarray

    @property
    def positions_S(self) -> np.ndarray:
        """0, 1, ... restarting at each document."""
        lengths = np.diff((*self.document_starts, len(self.tokens_S)))
        return np.arange(len(self.tokens_S)) - np.repeat(self.document_starts, lengths)

    @property
    def labels_S(self) -> np.ndarray:
        """For each position the target after it, -100 where there is none."""
        labels_S = np.full(len(self.tokens_S), -100, dtype=np.int64)
        labels_S[self.counted_N] = self.targets_N
        return labels_S


@dataclass(frozen=True)
class Case:
    """Rows of each step, and the model.

    Attributes:
        model: folder.
        steps: the rows of each step; step `n` is `steps[n % len(steps)]`.
        tokens_of_step: real tokens, without filler.
    """

    model: Path
    steps: tuple[tuple[Row, ...], ...]
    tokens_of_step: tuple[int, ...]

    def rows(self, number: int) -> tuple[Row, ...]:
        """All rows of a step."""
        return self.steps[number % len(self.steps)]

    def own_rows(self, number: int) -> tuple[Row, ...]:
        """Those of this process, every n-th."""
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        return self.rows(number)[rank::size]

    def num_counted(self, number: int) -> int:
        """Targets of a step, on all processes."""
        return sum(len(row.targets_N) for row in self.rows(number))

    def save(self, path: Path) -> None:
        """As one .npz file."""
        arrays = {"model": np.asarray(str(self.model)), "tokens": np.asarray(self.tokens_of_step)}
        for at, rows in enumerate(self.steps):
            for index, row in enumerate(rows):
                for name in ("tokens_S", "document_starts", "counted_N", "targets_N"):
                    arrays[f"{at}/{index}/{name}"] = np.asarray(getattr(row, name))
        np.savez(path, allow_pickle=False, **arrays)

    @staticmethod
    def load(path: Path) -> Case:
        """What `save` wrote."""
        with np.load(path) as data:
            steps: dict[int, dict[int, dict[str, np.ndarray]]] = {}
            for key in data.files:
                if key.count("/") == 2:
                    at, index, name = key.split("/")
                    steps.setdefault(int(at), {}).setdefault(int(index), {})[name] = data[key]
            made = [
                tuple(
                    Row(
                        row["tokens_S"],
                        tuple(int(start) for start in row["document_starts"]),
                        row["counted_N"],
                        row["targets_N"],
                    )
                    for _, row in sorted(rows.items())
                )
                for _, rows in sorted(steps.items())
            ]
            tokens = tuple(int(count) for count in data["tokens"])
            return Case(Path(str(data["model"])), tuple(made), tokens)
