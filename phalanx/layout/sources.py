"""Which replica of a source slice serves a request for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from phalanx.layout.overlap import Slices


class Pools:
    """How the two rank sets meet, and what each source has to send so far."""

    def __init__(
        self,
        source_ranks: np.ndarray,
        target_ranks: np.ndarray,
        host_of: Callable[[int], object] | None,
    ) -> None:
        self.source_ranks, self.target_ranks = source_ranks, target_ranks
        at_source = {rank: at for at, rank in enumerate(source_ranks.tolist())}
        self.source_of_target = np.array(
            [at_source.get(r, -1) for r in target_ranks.tolist()], dtype=np.int64
        )
        self.load = np.zeros(len(source_ranks), dtype=np.int64)
        self.source_host = self.target_host = None
        if host_of is not None:
            hosts: dict[object, int] = {}
            self.source_host, self.target_host = (
                np.array([hosts.setdefault(host_of(r), len(hosts)) for r in ranks.tolist()])
                for ranks in (source_ranks, target_ranks)
            )


class Tier:
    """Requests that choose among several holders, evenly and by the holders' load.

    Args:
        keys: [requests] what is wanted, in the numbering of `offered`.
        num_bytes: [requests]
        holders, offered: [offers] source mesh ranks and what each can give, sorted by the latter.
    """

    def __init__(
        self, keys: np.ndarray, num_bytes: np.ndarray, holders: np.ndarray, offered: np.ndarray
    ) -> None:
        self.holders, self.offered = holders, offered
        self.first = np.searchsorted(offered, keys, "left")
        self.num_offers = np.searchsorted(offered, keys, "right") - self.first
        by_key = np.lexsort((-num_bytes, keys))  # large pieces first: the rest evens them out
        _, begin, at, alike = np.unique(
            keys[by_key], return_index=True, return_inverse=True, return_counts=True
        )
        self.turn = np.empty(len(keys), dtype=np.int64)
        self.turn[by_key] = np.arange(len(keys)) - begin[at]
        offers = self.num_offers[by_key][begin]
        # after so many tensors every holder has served equally often
        self.period = int((offers // np.gcd(alike, offers)).max(initial=1))

    def choose(self, load: np.ndarray) -> np.ndarray:
        """[requests] source mesh ranks; those with the smallest load are asked first."""
        order = np.lexsort((load[self.holders], self.offered))
        return self.holders[order[self.first + self.turn % self.num_offers]]


def tiers_of(
    have: Slices,
    wanted: np.ndarray,
    num_bytes: np.ndarray,
    own: np.ndarray,
    target_at: np.ndarray,
    pools: Pools,
) -> list[tuple[np.ndarray, Tier]]:
    """Rows that need another rank's slice: those that find one on their host, then the others."""
    rows = np.flatnonzero(own < 0)
    tiers: list[tuple[np.ndarray, Tier]] = []
    if pools.source_host is not None and pools.target_host is not None:
        num_hosts = max(pools.source_host.max(), pools.target_host.max()) + 1
        offered = have.number * num_hosts + pools.source_host[have.holders]
        order = np.argsort(offered, kind="stable")
        keys = wanted[rows] * num_hosts + pools.target_host[target_at[rows]]
        near = np.isin(keys, offered)
        at = rows[near]
        tiers.append((at, Tier(keys[near], num_bytes[at], have.holders[order], offered[order])))
        rows = rows[~near]
    tiers.append((rows, Tier(wanted[rows], num_bytes[rows], have.holders, have.number)))
    return tiers
