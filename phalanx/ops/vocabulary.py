"""A vocabulary cut over the ranks of a model axis: embedding and logits.

Legend: S tokens, N rows, D model, V vocabulary, v a rank's part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phalanx.ops.tensor_exchange import enter, join_columns


@dataclass(frozen=True)
class VocabularyPart:
    """The tokens whose embedding and logits this rank has.

    Args:
        group: ranks that share the vocabulary, in order of their parts.
        num_tokens: V, of all ranks; parts are as long as the first but for the last.
    """

    group: dist.ProcessGroup
    num_tokens: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each rank, the first the most."""
        longest = -(-self.num_tokens // self.group.size())
        firsts = range(0, longest * self.group.size(), longest)
        return tuple(min(longest, self.num_tokens - first) for first in firsts)

    @property
    def first(self) -> int:
        """This rank's first token."""
        return self.sizes[0] * self.group.rank()

    def embed(self, tokens_S: Tensor, embedding_vD: Tensor) -> Tensor:
        """Rows of the tokens that this rank has, zeros for the others: [S, D], to be summed."""
        at_S = tokens_S - self.first
        inside_S = (at_S >= 0) & (at_S < embedding_vD.shape[0])
        rows_SD = F.embedding(at_S.clamp(0, embedding_vD.shape[0] - 1), embedding_vD)
        return rows_SD * inside_S[:, None]

    def logits(self, rows_ND: Tensor, head_vD: Tensor) -> Tensor:
        """Logits [N, V] on every rank, for what all ranks then compute equally."""
        logits_Nv = F.linear(enter(rows_ND, self.group), head_vD)
        return join_columns(logits_Nv, self.group, self.sizes)
