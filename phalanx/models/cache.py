"""Keys and values of one sequence. Legend: S new rows, T cached rows, K heads, C channels."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.errors import JobError
from phalanx.models.spec import DecoderConfig


class KvCache:
    """Keys and values of one sequence, per layer [kv_head, token, channel], grown by doubling.

    A decoder call appends to every layer that makes keys and values, then calls `commit`.
    `truncate` takes tokens back, as speculative decoding needs; so sliding layers keep tokens
    behind their window too. Heads and channels are those of the first rows that a layer appends:
    in tensor parallelism a rank has its own heads only.

    Args:
        config: the model.
        capacity: tokens to reserve at once.
        dtype: of the stored keys and values, independent of the weights' dtype.
        device: where they are kept.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        capacity: int = 256,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.length = 0
        self._dtype = dtype or getattr(torch, config.dtype)
        self._capacity, self._device = capacity, device
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def append(self, layer: int, k_SKC: Tensor, v_SKC: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of `layer` with the new rows at their end, [T, K, C] views."""
        return self._extended(self._keys, layer, k_SKC), self._extended(self._values, layer, v_SKC)

    def _extended(self, stores: dict[int, Tensor], layer: int, rows_SKC: Tensor) -> Tensor:
        num_rows, num_heads, channels = rows_SKC.shape
        total = self.length + num_rows
        if layer not in stores:
            shape = (num_heads, self._capacity, channels)
            stores[layer] = torch.empty(shape, dtype=self._dtype, device=self._device)
        store_KTC = stores[layer] = _grown(stores[layer], self.length, total)
        store_KTC[:, self.length : total] = rows_SKC.transpose(0, 1)
        return store_KTC[:, :total].transpose(0, 1).to(rows_SKC.dtype)

    def commit(self, num_tokens: int) -> None:
        """Count `num_tokens` rows that every layer has appended."""
        self.length += num_tokens

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on.

        Raises:
            JobError: `serve/request` for a length that the cache does not have.
        """
        if not 0 <= length <= self.length:
            rule = f"must lie in 0..{self.length}"
            raise JobError("serve/request", "truncate", length, rule, legal=[self.length])
        self.length = length


def _grown(store_KTC: Tensor, used: int, needed: int) -> Tensor:
    if needed <= store_KTC.shape[1]:
        return store_KTC
    num_heads, capacity, channels = store_KTC.shape
    grown = store_KTC.new_empty(num_heads, max(needed, 2 * capacity), channels)
    grown[:, :used] = store_KTC[:, :used]
    return grown
