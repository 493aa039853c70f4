"""What every rank tells every other about a checkpoint: small JSON records over gloo."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.errors import WorldError
from phalanx.worlds.torch_private import make_backends, plain_group


class Council:
    """All ranks, over a gloo group that nothing else uses: any thread may wait in it.

    All ranks build it at the same time, and call `gather` in the same order.

    Args:
        timeout_s: how long one may wait for the slowest disk.
    """

    def __init__(self, timeout_s: float = 3600.0) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group: dist.ProcessGroup | None = None
        if self.size > 1:
            world = dist.group.WORLD
            assert world is not None
            shared = world.get_group_store()
            # how many this rank has made: the same on all, as all make theirs together
            number = shared.add(f"checkpoint/made/{self.rank}", 1)
            store = dist.PrefixStore(f"checkpoint/{number}", shared)
            wait = timedelta(seconds=timeout_s)
            backends = make_backends("gloo", store, self.rank, self.size, wait)
            self._group = plain_group(store, self.rank, self.size, backends)

    def gather(self, record: Any) -> list[Any]:
        """The record of each rank, by rank.

        Raises:
            WorldError: `world/dead` when a rank is gone or silent for too long.
        """
        if self._group is None:
            return [record]
        data = json.dumps(record).encode()
        try:
            sizes = self._all(torch.tensor([len(data)]))
            longest = max(int(size) for size in sizes)
            padded = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
            return [json.loads(bytes(each.numpy())) for each in self._all(padded)]
        except RuntimeError as error:
            rule = f"a rank went away while a checkpoint was written or read: {error}"
            raise WorldError("world/dead", f"rank {self.rank}", None, rule) from error

    def _all(self, value: torch.Tensor) -> list[torch.Tensor]:
        assert self._group is not None
        found = [torch.empty_like(value) for _ in range(self.size)]
        self._group.allgather([found], [value]).wait()
        return found
