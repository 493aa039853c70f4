"""Which device a server takes."""

from __future__ import annotations

import pytest
import torch

from phalanx.engines.serve.start import _device
from phalanx.errors import JobError


def test_a_server_on_a_numbered_gpu_opens_no_other_one(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert [_device(name) for name in ("cuda:3", "cuda", "cpu")] == [
        torch.device("cuda", 3),
        torch.device("cuda"),
        torch.device("cpu"),
    ]
    assert taken == [torch.device("cuda", 3)]
    with pytest.raises(JobError, match=r"cuda:4.*cuda:3"):
        _device("cuda:4")
