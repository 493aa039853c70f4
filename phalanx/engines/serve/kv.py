"""The paged KV cache: one pool per layer kind, separate K and V [block, kv_head, token, channel].

Legend: S new rows (tokens) of a step, R decoding requests, N blocks of the longest of them,
T tokens, K kv heads, C channels per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from phalanx.engines.serve.blocks import BLOCK_TOKENS, BlockTables, num_blocks_of
from phalanx.engines.serve.kv_room import KvLimits, num_sliding_blocks, require_one_request
from phalanx.errors import JobError
from phalanx.models.spec import AttentionKind, DecoderConfig
from phalanx.ops.placed import placed


@dataclass(frozen=True)
class Segment:
    """The rows of one request that computes several tokens: start .. end - 1 of the step.

    Attributes:
        blocks: what its tokens see, from the token at `first` on.
        length: tokens in the cache when the step is done.
    """

    start: int
    end: int
    blocks: Tensor
    first: int
    length: int


@dataclass(frozen=True)
class KindStep:
    """Where the rows of one step live in the pool of one layer kind.

    Attributes:
        rows_SK: row of the pool, seen as [block * kv_head * token, channel], of each new key.
        blocks_RN: blocks that each decoding request sees (they are the first R rows).
        seen_R2: first of those tokens that it sees, and the one behind its last, counted from the
            first token of its first block.
        segments: the other requests.
    """

    rows_SK: Tensor
    blocks_RN: Tensor
    seen_R2: Tensor
    segments: tuple[Segment, ...]


class _Rows(NamedTuple):
    """The requests of a step, and their rows of tokens.

    Attributes:
        rows, lengths, counts: table row, tokens in the cache and new ones of each request.
        of_token, position: table row and position of each new token.
    """

    rows: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray
    of_token: np.ndarray
    position: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[int], lengths: Sequence[int], counts: Sequence[int]) -> _Rows:
        row, length = np.array(rows, dtype=np.int64), np.array(lengths, dtype=np.int64)
        count = np.array(counts, dtype=np.int64)
        if max(counts) == 1:
            return cls(row, length, count, row, length - 1)
        before = length - np.cumsum(count)  # of a request's first token, less its row in the step
        position = np.arange(count.sum()) + np.repeat(before, count)
        return cls(row, length, count, np.repeat(row, count), position)


class KvPool:
    """Keys and values of one layer kind.

    Args:
        kind: heads and window.
        num_layers: layers of this kind that make keys and values of their own.
        tables: who holds which block.
    """

    def __init__(
        self,
        kind: AttentionKind,
        num_layers: int,
        tables: BlockTables,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.kind, self.tables = kind, tables
        shape = (num_layers, tables.num_blocks, kind.num_kv_heads, BLOCK_TOKENS, kind.head_dim)
        # zeros: what a mask hides is still multiplied by its weight 0, so it must be finite
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, layer: int, step: KindStep, k_SKC: Tensor, v_SKC: Tensor) -> None:
        """Store the new rows of the `layer`-th layer of this kind."""
        rows = step.rows_SK.flatten()
        for pool, new_SKC in ((self.keys, k_SKC), (self.values, v_SKC)):
            flat = pool[layer].view(-1, self.kind.head_dim)
            flat.index_copy_(0, rows, new_SKC.reshape(-1, self.kind.head_dim).to(pool.dtype))

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of some blocks [..., N] as [..., K, T, C], gathered."""
        return self._gather(self.keys[layer], blocks), self._gather(self.values[layer], blocks)

    @staticmethod
    def _gather(pool: Tensor, blocks: Tensor) -> Tensor:
        taken = pool.index_select(0, blocks.flatten()).unflatten(0, blocks.shape)
        return taken.transpose(-4, -3).flatten(-3, -2)


class PagedKv:
    """The cache of an engine.

    Args:
        config: the model.
        num_tokens: tokens that the pool of full attention holds; a sliding pool holds what its
            windows can need, so that it never runs out first.
        limits: what it is made for.
        dtype: of keys and values.

    Raises:
        JobError: `job/bad-value` for a pool that cannot hold the longest request.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_tokens: int,
        limits: KvLimits,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        require_one_request(num_tokens, limits.max_tokens)
        self.device, self.num_blocks = device, num_blocks_of(num_tokens)
        rows, longest = limits.max_running, limits.max_tokens
        self._lengths: dict[int, int] = {}
        self._row: dict[int, int] = {}
        self._free_rows = list(range(rows - 1, -1, -1))
        # Counts every token whether or not the model has a layer that keeps them all.
        self._every_token = BlockTables(self.num_blocks, rows, longest)
        self.pools: dict[str, KvPool] = {}
        for kind in config.kinds:
            if kind.window is None:
                tables = self._every_token
            else:
                most = num_sliding_blocks(kind.window, self.num_blocks, limits)
                tables = BlockTables(most, rows, longest, kind.window)
            num_layers = len(config.kv_layers(kind.name))
            self.pools[kind.name] = KvPool(kind, num_layers, tables, dtype=dtype, device=device)

    @property
    def num_free(self) -> int:
        """Free blocks of the pool that grows with every token."""
        return self._every_token.num_free

    def length(self, request: int) -> int:
        """Tokens of a request that are in the cache."""
        return self._lengths.get(request, 0)

    def extend(self, requests: Sequence[int], num_new: Sequence[int]) -> None:
        """Make room for the next tokens of some requests, which count from now on.

        Raises:
            PlanError: `plan/illegal` when a pool has too few blocks: the plan was wrong.
        """
        every = self._tables()
        for request, row in self._row.items():
            for tables in every[1:]:
                tables.drop_unseen(row, self._lengths[request])
        for request, new in zip(requests, num_new):
            if request not in self._row:
                self._row[request], self._lengths[request] = self._free_rows.pop(), 0
            self._lengths[request] += new
            for tables in every:
                tables.extend(self._row[request], self._lengths[request])

    def truncate(self, request: int, length: int) -> None:
        """Forget the tokens of a request from `length` on.

        Raises:
            JobError: `serve/request` beyond its tokens, or when the window before is gone.
        """
        if not 0 <= length <= self.length(request):
            rule = f"must lie in 0..{self.length(request)}"
            raise JobError("serve/request", "truncate", length, rule, legal=[self.length(request)])
        for tables in self._tables():
            tables.require_window(self._row[request], length)
        for tables in self._tables():
            tables.truncate(self._row[request], length)
        self._lengths[request] = length

    def release(self, request: int) -> None:
        """Give all blocks of a request back; one that has none is no mistake."""
        row = self._row.pop(request, None)
        if row is None:
            return
        for tables in self._tables():
            tables.release(row)
        self._free_rows.append(row)
        del self._lengths[request]

    def _tables(self) -> list[BlockTables]:
        sliding = [p.tables for p in self.pools.values() if p.tables is not self._every_token]
        return [self._every_token, *sliding]

    def step(self, requests: Sequence[int], query_len: Sequence[int]) -> dict[str, KindStep]:
        """Where the rows of a step live, after `extend`; single-token rows come first.

        Args:
            requests: in the order of their rows.
            query_len: rows of each; all that are 1 stand before the others.
        """
        rows = _Rows.of(
            [self._row[each] for each in requests],
            [self._lengths[each] for each in requests],
            query_len,
        )
        return {name: self._kind_step(pool, rows) for name, pool in self.pools.items()}

    def _kind_step(self, pool: KvPool, rows: _Rows) -> KindStep:
        tables, num_heads = pool.tables, pool.kind.num_kv_heads
        place, inside = np.divmod(rows.position, BLOCK_TOKENS)
        block_S1 = tables.table[rows.of_token, place][:, None]
        rows_SK = (block_S1 * num_heads + np.arange(num_heads)) * BLOCK_TOKENS + inside[:, None]
        num_single = int((rows.counts == 1).sum())
        blocks_RN, seen_R2 = tables.places(rows.rows[:num_single], rows.lengths[:num_single])
        starts = np.cumsum(rows.counts) - rows.counts
        segments = tuple(
            self._segment(
                tables,
                *(int(each[i]) for each in (rows.rows, rows.lengths, starts)),
                int(rows.counts[i]),
            )
            for i in range(num_single, len(rows.counts))
        )
        return KindStep(self._put(rows_SK), self._put(blocks_RN), self._put(seen_R2), segments)

    def _segment(
        self, tables: BlockTables, row: int, length: int, start: int, count: int
    ) -> Segment:
        first = tables.first_token(row)
        places = slice(first // BLOCK_TOKENS, num_blocks_of(length))
        return Segment(start, start + count, self._put(tables.table[row, places]), first, length)

    def _put(self, array: np.ndarray) -> Tensor:
        return placed(np.ascontiguousarray(array), self.device)
