"""Keys and values of one sequence. Legend: S new rows, T cached rows, K heads, C channels."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.errors import JobError
from phalanx.models.spec import DecoderConfig


class KvCache:
    """Keys and values of one sequence, per layer [kv_head, token, channel], grown by doubling.

    A decoder call appends to every layer and then calls `commit`. `truncate` takes tokens back,
    as speculative decoding needs; so sliding layers keep tokens behind their window too.

    Args:
        config: the model.
        capacity: tokens to reserve at once.
        dtype: of the stored keys and values, independent of the weights' dtype.
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
        self._keys = [
            self._reserve(config, at, capacity, device) for at in range(config.num_layers)
        ]
        self._values = [torch.empty_like(keys_KTC) for keys_KTC in self._keys]

    def _reserve(self, config: DecoderConfig, layer: int, capacity: int, device) -> Tensor:
        kind = config.attention(layer)
        shape = (kind.num_kv_heads, capacity, kind.head_dim)
        return torch.empty(shape, dtype=self._dtype, device=device)

    def append(self, layer: int, k_SKC: Tensor, v_SKC: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of `layer` with the new rows at their end, [T, K, C] views."""
        total = self.length + k_SKC.shape[0]
        for store, rows in ((self._keys, k_SKC), (self._values, v_SKC)):
            store[layer] = _grown(store[layer], self.length, total)
            store[layer][:, self.length : total] = rows.transpose(0, 1)
        return (
            self._keys[layer][:, :total].transpose(0, 1).to(k_SKC.dtype),
            self._values[layer][:, :total].transpose(0, 1).to(v_SKC.dtype),
        )

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
