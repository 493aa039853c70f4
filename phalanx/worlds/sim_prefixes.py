"""Blocks of prompts that stay in a simulated engine's pool after their requests have ended.

A block is an integer key that stands for all tokens of a prompt up to the block's end, so equal
keys are equal caches. Requests hold blocks; one that nobody holds stays until its place is wanted,
the one released longest ago first, and of one request its last block first, so that a prefix never
loses its beginning before its end.

Source: automatic prefix caching of vLLM (docs, "Automatic Prefix Caching"); sharing of blocks,
PagedAttention, arXiv 2309.06180, section 4.4.
"""

from __future__ import annotations

from collections import deque

import numpy as np


class PrefixCache:
    """Which keyed blocks are there, and how many requests hold each.

    Args:
        num_keys: keys lie in 0..num_keys - 1.

    Attributes:
        num_held: blocks that requests hold, each counted once.
        num_idle: blocks that nobody holds.
    """

    def __init__(self, num_keys: int) -> None:
        self._is_here = np.zeros(num_keys, dtype=bool)
        self._holders = np.zeros(num_keys, dtype=np.int32)
        self._released_in = np.zeros(num_keys, dtype=np.int32)  # number of the release
        self._releases: deque[tuple[int, np.ndarray]] = deque()
        self._num_releases = 0
        self.num_held = self.num_idle = 0

    def num_leading(self, keys: np.ndarray) -> int:
        """How many blocks are here before the first that is not."""
        absent = np.flatnonzero(~self._is_here[keys])
        return int(absent[0]) if absent.size else len(keys)

    def num_held_of(self, keys: np.ndarray) -> int:
        """How many of these blocks are held."""
        return int(np.count_nonzero(self._holders[keys]))

    def hold(self, keys: np.ndarray) -> None:
        """One more request holds these blocks, which are here; each key once."""
        fresh = len(keys) - self.num_held_of(keys)
        self.num_held += fresh
        self.num_idle -= fresh
        self._holders[keys] += 1

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Blocks that a request has computed; those that were not here yet, held by it from now."""
        new = keys[~self._is_here[keys]]
        self._is_here[new] = True
        self._holders[new] = 1
        self.num_held += len(new)
        return new

    def release(self, keys: np.ndarray) -> None:
        """A request gives its blocks back, in the order of its prompt; they stay here."""
        self._holders[keys] -= 1
        idle = keys[self._holders[keys] == 0][::-1]
        self.num_held -= len(idle)
        self.num_idle += len(idle)
        self._num_releases += 1
        self._released_in[idle] = self._num_releases
        self._releases.append((self._num_releases, idle))

    def drop(self, count: int) -> None:
        """Give up `count` idle blocks, at most `num_idle`: those released longest ago."""
        self.num_idle -= count
        while count > 0:
            release, keys = self._releases.popleft()
            is_idle = (self._released_in[keys] == release) & (self._holders[keys] == 0)
            keys = keys[is_idle]  # others were wanted again since
            self._is_here[keys[:count]] = False
            if len(keys) > count:
                self._releases.appendleft((release, keys[count:]))
            count -= min(count, len(keys))
