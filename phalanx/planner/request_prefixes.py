"""Which first tokens of their prompts requests share, by ids of blocks of a stated length.

Two prompts have the same tokens up to the end of a block where their ids up to it are the same, as
in the open traces of Mooncake (FAST 2025: `hash_ids`, 512 tokens each); beyond the last id a prompt
is nobody else's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Prefixes:
    """Named blocks of R prompts.

    Attributes:
        block_tokens: that an id stands for; the last one of a prompt may stand for fewer.
        starts: where the ids of each prompt begin in `chains` [R + 1].
        chains: an id for each block and all before it: equal where these are equal.
    """

    block_tokens: int
    starts: np.ndarray
    chains: np.ndarray

    def every(self, step: int, first: int) -> Prefixes:
        """Of every `step`-th prompt."""
        chosen = range(first, len(self.starts) - 1, step)
        parts = [self.chains[self.starts[at] : self.starts[at + 1]] for at in chosen]
        return _joined(self.block_tokens, parts)

    def block_keys(self, prompt_tokens: np.ndarray, size: int) -> list[np.ndarray]:
        """Of each prompt, a key for each whole block of `size` tokens that its ids cover.

        Keys are small integers from 0 on; equal keys are equal tokens up to the block's end.
        """
        _, chains = np.unique(self.chains, return_inverse=True)
        ids = [chains[at:to] for at, to in zip(self.starts, self.starts[1:])]
        starts = np.arange(max((len(its) for its in ids), default=0) + 1) * self.block_tokens
        most = np.zeros(int(chains.max(initial=-1)) + 1, dtype=np.int64)  # blocks of each chain
        for its, tokens in zip(ids, prompt_tokens.tolist()):
            ends = np.minimum(starts[: len(its) + 1], tokens) // size
            most[its] = np.maximum(most[its], np.diff(ends))
        before = np.cumsum(most) - most
        found = []
        for its, tokens in zip(ids, prompt_tokens.tolist()):
            block = np.arange(min(len(its) * self.block_tokens, tokens) // size)
            last = (block * size + size - 1) // self.block_tokens  # id that its last token is in
            found.append(before[its[last]] + block - starts[last] // size)
        return found


def prefixes_of(ids: Sequence[Sequence[int]], block_tokens: int) -> Prefixes:
    """As a trace names them: the ids of each prompt's blocks, in order."""
    numbers: dict[tuple[int, int], int] = {}
    parts = []
    for its in ids:
        chain, chains = -1, []
        for each in its:
            chain = numbers.setdefault((chain, each), len(numbers))
            chains.append(chain)
        parts.append(np.asarray(chains, dtype=np.int64))
    return _joined(block_tokens, parts)


def _joined(block_tokens: int, parts: Sequence[np.ndarray]) -> Prefixes:
    starts = np.cumsum([0, *(len(part) for part in parts)])
    chains = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    return Prefixes(block_tokens, starts, chains)
