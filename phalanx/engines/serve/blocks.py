"""Which blocks of a pool belong to which request. No torch.

A pool has one table row per request: the i-th entry is the block of tokens 16 i .. 16 i + 15. With
a window, blocks that no later token can see are given back while the request goes on.
"""

from __future__ import annotations

import numpy as np

from phalanx.errors import JobError, PlanError

BLOCK_TOKENS = 16


def num_blocks_of(num_tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


class BlockTables:
    """The blocks of one pool.

    Args:
        num_blocks: blocks of the pool.
        max_rows: requests that hold blocks at the same time.
        max_tokens: longest request.
        window: tokens that a query sees, itself included; None: all before it.

    Attributes:
        table: block of each (row, place); 0 where there is none [max_rows, blocks].
    """

    def __init__(
        self, num_blocks: int, max_rows: int, max_tokens: int, window: int | None = None
    ) -> None:
        self.num_blocks, self.window = num_blocks, window
        self.table = np.zeros((max_rows, num_blocks_of(max_tokens)), dtype=np.int64)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._first = [0] * max_rows  # places in front were given back
        self._end = [0] * max_rows

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def num_held(self, row: int) -> int:
        """Blocks that a row holds."""
        return self._end[row] - self._first[row]

    def first_token(self, row: int) -> int:
        """The oldest token that is still there."""
        return self._first[row] * BLOCK_TOKENS

    def drop_unseen(self, row: int, length: int) -> None:
        """Give back the blocks that no token from `length` on can see."""
        if self.window is None:
            return
        place, first = max(0, length - self.window + 1) // BLOCK_TOKENS, self._first[row]
        if place > first:
            self._give_back(row, first, place)
            self._first[row] = place

    def extend(self, row: int, length: int) -> None:
        """Make room for the first `length` tokens of a row.

        Raises:
            PlanError: `plan/illegal` when the pool has too few blocks: the plan was wrong.
        """
        end = num_blocks_of(length)
        needed = end - self._end[row]
        if needed > len(self._free):
            rule = "the step needs more blocks than are free"
            raise PlanError("plan/illegal", "blocks", needed, rule, legal=[len(self._free)])
        for place in range(self._end[row], end):
            self.table[row, place] = self._free.pop()
        self._end[row] = max(end, self._end[row])

    def require_window(self, row: int, length: int) -> None:
        """Raise `serve/request` when what the token at `length` sees was given back already."""
        oldest = 0 if self.window is None else max(0, length - self.window + 1)
        if oldest < self.first_token(row):
            rule = "the tokens that the next one sees were given back already"
            raise JobError("serve/request", "truncate", length, rule)

    def truncate(self, row: int, length: int) -> None:
        """Give back what lies behind the first `length` tokens."""
        end = num_blocks_of(length)
        if end < self._end[row]:
            self._give_back(row, max(end, self._first[row]), self._end[row])
            self._end[row] = max(end, self._first[row])

    def release(self, row: int) -> None:
        """Give everything back."""
        self._give_back(row, self._first[row], self._end[row])
        self._first[row] = self._end[row] = 0

    def _give_back(self, row: int, start: int, end: int) -> None:
        self._free.extend(self.table[row, start:end].tolist())
        self.table[row, start:end] = 0

    def places(self, rows: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Blocks that the last token of each row sees, padded to the longest.

        Args:
            rows: which rows [R].
            lengths: tokens of each, the one that looks included [R].

        Returns:
            Blocks [R, N], and the first token that is seen and the one behind the last, counted
            from the first token of the row's first block [R, 2].
        """
        if not len(rows):
            return np.zeros((0, 0), dtype=np.int64), np.zeros((0, 2), dtype=np.int64)
        low = np.zeros_like(lengths)
        if self.window is not None:
            low = np.maximum(lengths - self.window, 0)
        first = low // BLOCK_TOKENS
        most = int(((lengths - 1) // BLOCK_TOKENS - first).max()) + 1
        columns = np.minimum(first[:, None] + np.arange(most), self.table.shape[1] - 1)
        seen = np.stack([low, lengths], 1) - first[:, None] * BLOCK_TOKENS
        return self.table[rows[:, None], columns], seen
