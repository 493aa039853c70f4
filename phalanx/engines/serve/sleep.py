"""Sleep: an engine between two uses gives its memory back and keeps its process and its place.

    level   given back            before it computes again
    0       nothing
    1       the KV cache          wake
    2       cache and weights     weights by `update_weights` or `wake`, then awake

Adapters stay: they are small. Levels as vLLM's sleep mode counts them; there level 1 moves weights
to host memory, here they stay where they are.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

import torch

from phalanx.engines.serve.kv import PagedKv
from phalanx.engines.serve.model import PackedDecoder
from phalanx.errors import JobError, WorldError

AWAKE, WITHOUT_CACHE, WITHOUT_WEIGHTS = 0, 1, 2


class Sleeper:
    """What of an engine's memory is there.

    Args:
        model, kv: whose memory it is.

    Attributes:
        level: how deep the engine sleeps.
    """

    def __init__(self, model: PackedDecoder, kv: PagedKv) -> None:
        self._model, self._kv = model, kv
        self.level = AWAKE

    @property
    def has_weights(self) -> bool:
        """Whether there are weights that a part could be replaced of."""
        return self.level != WITHOUT_WEIGHTS

    def require_awake(self) -> None:
        """Raise `serve/asleep` unless requests can be computed."""
        if self.level != AWAKE:
            rule = "the engine sleeps: wake it first"
            raise WorldError("serve/asleep", "sleep level", self.level, rule, legal=[AWAKE])

    def fall_asleep(self, level: int, num_live: int) -> None:
        """Give memory back to the system; nothing happens if it sleeps that deep already.

        Raises:
            JobError: `serve/request` for a level that does not exist.
            WorldError: `serve/asleep` while requests are live: they would lose their cache.
        """
        if level not in (WITHOUT_CACHE, WITHOUT_WEIGHTS):
            legal = [WITHOUT_CACHE, WITHOUT_WEIGHTS]
            raise JobError("serve/request", "sleep level", level, "is no level", legal=legal)
        if num_live:
            rule = "requests are live: let them end, or cancel them, before the engine sleeps"
            raise WorldError("serve/asleep", "live requests", num_live, rule, legal=[0])
        if self.level < WITHOUT_CACHE:
            self._free_cache()
        if self.level < level == WITHOUT_WEIGHTS:
            self._model.free()
        self.level = max(self.level, level)
        give_memory_back()

    def fill_weights(self, fill: Callable[[], None]) -> None:
        """Carry out an update of all weights, which get their memory again if it was given back.

        An update that fails leaves a level 2 sleeper as it was.
        """
        if self.level != WITHOUT_WEIGHTS:
            fill()
            return
        self._model.allocate()
        try:
            fill()
        except BaseException:
            self._model.free()
            give_memory_back()
            raise
        self.level = WITHOUT_CACHE

    def wake(self) -> None:
        """Take the cache's memory again; nothing happens if it is awake.

        Raises:
            WorldError: `serve/asleep` at level 2: there are no weights.
        """
        if self.level == WITHOUT_WEIGHTS:
            rule = "the weights were given back: update them first"
            raise WorldError("serve/asleep", "sleep level", self.level, rule, legal=[1])
        if self.level == WITHOUT_CACHE:
            self._take_cache()
        self.level = AWAKE

    def _free_cache(self) -> None:
        for pool in self._kv.pools.values():
            for tensor in (pool.keys, pool.values):
                tensor.untyped_storage().resize_(0)

    def _take_cache(self) -> None:
        for pool in self._kv.pools.values():
            for tensor in (pool.keys, pool.values):
                tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                tensor.zero_()


def give_memory_back() -> None:
    """Return what Python and torch have freed to the system, so that others can have it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)
