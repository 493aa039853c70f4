"""Which backend carries what islands exchange; the rest is in test_islands and the proofs."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch.distributed import TCPStore

from phalanx.action import Recv, Send
from phalanx.engines import exchange as exchange_module
from phalanx.engines.exchange import EpochExchange
from phalanx.mesh import Mesh
from phalanx.worlds.torch_tensors import RankContext

MESSAGE = {"tensor": "state", "axis": "replica", "payload_bytes": 8, "lane": "state", "label": "s"}


class Noted:
    """Stands in for a group of an epoch: connects nobody, notes what it would be."""

    kinds: ClassVar[dict[str, str]] = {}

    def __init__(self, store, name, my_id, kind, timeout_s) -> None:
        self.kinds[name] = kind

    def form(self, members, epoch):
        return self

    def broadcast(self, tensors, options):
        assert all(tensor.device.type == "cpu" for tensor in tensors)

    def wait(self, work) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_states_travel_on_gloo_whatever_gradients_do(store, monkeypatch):
    """They are copies in host memory, which NCCL cannot send."""
    monkeypatch.setattr(Noted, "kinds", {})
    monkeypatch.setattr(exchange_module, "LogicalGroup", Noted)
    context = RankContext(0, Mesh(replica=2))
    context.tensors["state"] = context.host["state"] = torch.zeros(2)
    exchange = EpochExchange(store, context, kind="nccl")
    exchange.enter(3)
    exchange.form("replica", (0, 1), 3)
    exchange.carry_out(Send(peer=1, **MESSAGE), 3)
    exchange.carry_out(Recv(peer=1, **MESSAGE), 3)
    exchange.close()
    assert Noted.kinds == {"replica": "nccl", "replica.state.1": "gloo", "replica.state.0": "gloo"}
