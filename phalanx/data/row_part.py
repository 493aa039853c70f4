"""The part of a packed row that one rank computes where several share its tokens.

Legend: S tokens of the part, N targets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.data.batches import MicroBatch


@dataclass(frozen=True)
class RowPart:
    """Some tokens of a `MicroBatch`, with all that belongs to each of them; named as there.

    Attributes:
        tokens_S: int64 ids.
        positions_S: of each token in its document.
        global_tokens_S: place of each among all tokens of the step; below 0 for filler.
        counted_N: rows of hidden states to score, counted in the part.
        targets_N: the tokens to be predicted there, wherever in the row they stand.
    """

    tokens_S: np.ndarray
    positions_S: np.ndarray
    global_tokens_S: np.ndarray
    counted_N: np.ndarray
    targets_N: np.ndarray

    @property
    def document_starts(self) -> tuple[int, ...]:
        """The part as one document: who attends to what is not for the part to know."""
        return (0,)


def cut_row(row: MicroBatch, tokens_S: np.ndarray) -> RowPart:
    """These tokens of a row, in this order.

    A target stays with the token that predicts it, so it is found before anything is permuted and
    parts score all targets of the row once between them.

    Args:
        tokens_S: indices into the row, each once.
    """
    place_T = np.full(len(row.tokens_S), -1, dtype=np.int64)
    place_T[tokens_S] = np.arange(len(tokens_S))
    counted_N = place_T[row.counted_N]
    mine_N = counted_N >= 0
    return RowPart(
        tokens_S=row.tokens_S[tokens_S],
        positions_S=row.positions_S[tokens_S],
        global_tokens_S=row.global_tokens_S[tokens_S],
        counted_N=counted_N[mine_N],
        targets_N=row.targets_N[mine_N],
    )
