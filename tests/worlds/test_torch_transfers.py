"""What a rank asks of its process group, seen by a group that only notes it."""

from __future__ import annotations

import pytest
import torch

from phalanx.action import Collective
from phalanx.worlds.torch_transfers import issue_collective


class Noting:
    """A group of four."""

    def size(self) -> int:
        return 4

    def barrier(self, options):
        self.options = options
        return "work"


BARRIER = Collective(
    axis="tp", collective="barrier", tensor="", payload_bytes=0, lane="axis:tp", label="meet"
)


@pytest.mark.parametrize(("device", "ids"), [("cuda:3", [3]), ("cuda", [6]), ("cpu", [])])
def test_a_barrier_names_the_gpu_of_its_rank(device, ids, monkeypatch):
    """NCCL would take the one with the number of the rank in the group, which another rank uses."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 6)
    group = Noting()
    assert issue_collective(group, BARRIER, None, torch.device(device)) == ("work", None)
    assert group.options.device_ids == ids and group.options.device == torch.device(device)
