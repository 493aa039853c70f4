"""Where the values of a checkpoint wait for the disk, on a GPU that is the CPU in disguise."""

from __future__ import annotations

import torch

from phalanx.engines.checkpoint.snapshot import Staging


class Event:
    """Notes that somebody waited."""

    waits = 0

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        Event.waits += 1


def test_only_what_comes_from_the_device_is_pinned_and_memory_is_taken_once(monkeypatch):
    """Offloaded states are in host memory already; torch rounds pinned memory up to powers of
    two."""
    weight, moment = torch.arange(6.0).bfloat16(), torch.arange(6.0)
    pinned, empty = [], torch.empty

    def noted(shape, *, dtype, pin_memory=False):
        pinned.append((dtype, pin_memory))
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: self is weight))
    staging = Staging(torch.device("cuda", 0))
    for step in range(2):
        weight.fill_(step)
        moment.fill_(step)
        values = staging.take({"weight": weight, "moment": moment})
        staging.wait()
        weight.fill_(-1.0)  # the next update
        moment.fill_(-1.0)
        found: list[bytes] = []
        for name in ("weight", "moment"):
            values.read(name, lambda piece, found=found: found.append(bytes(piece)))
        told = [torch.frombuffer(bytearray(found[0]), dtype=torch.bfloat16).tolist()]
        told += [torch.frombuffer(bytearray(found[1]), dtype=torch.float32).tolist()]
        assert told == [[float(step)] * 6] * 2
    wanted = [(torch.bfloat16, True), (torch.float32, False)]
    assert [each for each in pinned if each[0] != torch.uint8] == wanted and Event.waits == 2
