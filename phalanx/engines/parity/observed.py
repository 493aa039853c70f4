"""What is kept of a form's logits: the best two, those of given tokens, a fixed sample of columns.

With 262,144 tokens a whole row of logits is 1 MiB in float32, so no form's rows are kept.

Legend: P positions, R rows at hand, V vocabulary, N sampled columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_COLUMNS = 2048
ROWS = 128  # whose logits exist at once
_SEED = 20  # of the sample


@dataclass(frozen=True, eq=False)
class Sequences:
    """Prompts and the tokens that every form is given after them.

    Attributes:
        prompts: token ids.
        forced: continuation of each prompt, equally long; position i of it is what stands after
            its first i tokens.
    """

    prompts: Sequence[Sequence[int]]
    forced: Sequence[Sequence[int]]

    @property
    def num_new(self) -> int:
        """Tokens of each continuation."""
        return len(self.forced[0])

    @property
    def num_positions(self) -> int:
        """Positions whose logits are compared."""
        return len(self.prompts) * self.num_new

    def inputs(self, at: int) -> list[int]:
        """Tokens of one sequence whose last `num_new` rows are the positions."""
        return [*self.prompts[at], *self.forced[at][:-1]]

    def tokens_P(self) -> Tensor:
        """The forced token of each position."""
        return torch.tensor(self.forced).flatten()


def sampled_columns(vocab_size: int) -> Tensor:
    """The same tokens for every form; all of a small vocabulary."""
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(_SEED))
    return order[:NUM_COLUMNS].sort().values


@dataclass(frozen=True, eq=False)
class Observed:
    """Logits of one form at all positions, as far as they are kept.

    Attributes:
        choice_P: the most probable token.
        best_P, gap_P: its logit, and how far the second best is below it.
        forced_P: logits of the forced tokens.
        columns_PN: logits of `sampled_columns`.
    """

    choice_P: Tensor
    best_P: Tensor
    gap_P: Tensor
    forced_P: Tensor
    columns_PN: Tensor


class Collector:
    """Takes logits row by row, in any order, and gives what is kept of them.

    Args:
        sequences: what the form is given.
        vocab_size: of the model.
        dtype: to keep logits in.
    """

    def __init__(self, sequences: Sequences, vocab_size: int, dtype: torch.dtype) -> None:
        self._columns_N = sampled_columns(vocab_size)
        self._tokens_P = sequences.tokens_P()
        count = sequences.num_positions
        self._seen_P = torch.zeros(count, dtype=torch.bool)
        self._kept = Observed(
            choice_P=torch.zeros(count, dtype=torch.int64),
            best_P=torch.zeros(count, dtype=dtype),
            gap_P=torch.zeros(count, dtype=dtype),
            forced_P=torch.zeros(count, dtype=dtype),
            columns_PN=torch.zeros(count, len(self._columns_N), dtype=dtype),
        )

    def add(self, places: Sequence[int], logits_RV: Tensor, choices: Sequence[int] = ()) -> None:
        """Note rows.

        Args:
            places: position of each row, `at * num_new + index`.
            choices: what the form chose itself, where it does not choose from such rows.
        """
        kept, place_R = self._kept, torch.tensor(places)
        best = logits_RV.topk(2)
        tokens_R1 = self._tokens_P[place_R][:, None]
        kept.choice_P[place_R] = torch.tensor(choices) if choices else best.indices[:, 0]
        kept.best_P[place_R] = best.values[:, 0].to(kept.best_P.dtype)
        kept.gap_P[place_R] = (best.values[:, 0] - best.values[:, 1]).to(kept.gap_P.dtype)
        kept.forced_P[place_R] = logits_RV.gather(1, tokens_R1)[:, 0].to(kept.forced_P.dtype)
        kept.columns_PN[place_R] = logits_RV[:, self._columns_N].to(kept.columns_PN.dtype)
        self._seen_P[place_R] = True

    def observed(self) -> Observed:
        """What was noted; every position must have been."""
        assert bool(self._seen_P.all()), "positions without logits"
        return self._kept
