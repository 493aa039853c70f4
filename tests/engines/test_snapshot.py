"""Where the values of a checkpoint wait for the disk, on a GPU that is the CPU in disguise."""

from __future__ import annotations

import pytest
import torch

from phalanx.engines.checkpoint import snapshot
from phalanx.engines.checkpoint.snapshot import Staging


class Event:
    """Notes that somebody waited."""

    waits = 0

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        Event.waits += 1


@pytest.fixture
def pinned_bytes(monkeypatch):
    """Sizes of the pieces of pinned memory that are asked for."""
    found, empty = [], torch.empty

    def noted(*shape, pin_memory=False, **options):
        made = empty(*shape, **options)
        if pin_memory:
            found.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", noted)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "waits", 0)
    return found


def on_a_gpu(monkeypatch, tensors) -> None:
    theirs = {id(each) for each in tensors}
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: id(self) in theirs))


def values_of(staging: Staging, tensors) -> dict[str, torch.Tensor]:
    """What reaches the disk, though an update follows at once."""
    values = staging.take(tensors)
    staging.wait()
    for each in tensors.values():
        each.fill_(-1.0)
    found = {}
    for name, each in tensors.items():
        pieces: list[bytes] = []
        values.read(name, lambda piece, pieces=pieces: pieces.append(bytes(piece)))
        data = bytearray(b"".join(pieces))
        found[name] = torch.frombuffer(data, dtype=each.dtype) if data else each.flatten()
    return found


def test_only_what_comes_from_the_device_is_pinned_and_memory_is_taken_once(
    monkeypatch, pinned_bytes
):
    """Offloaded states are in host memory already."""
    tensors = {"weight": torch.zeros(2, 3, dtype=torch.bfloat16), "moment": torch.zeros(2, 3)}
    on_a_gpu(monkeypatch, [tensors["weight"]])
    staging = Staging(torch.device("cuda", 0))
    for step in range(2):
        for each in tensors.values():
            each.fill_(float(step))
        found = values_of(staging, tensors)
        assert [each.tolist() for each in found.values()] == [[float(step)] * 6] * 2
    assert pinned_bytes == [64] and Event.waits == 2


def test_pinned_memory_is_taken_in_slabs_since_torch_rounds_each_piece_up(
    monkeypatch, pinned_bytes
):
    monkeypatch.setattr(snapshot, "SLAB_BYTES", 1024)
    sizes = (100, 33, 0, 150, 600, 1, 100)  # of float32: one is larger than a slab
    tensors = {str(at): torch.full((size,), float(at)) for at, size in enumerate(sizes)}
    on_a_gpu(monkeypatch, tensors.values())
    found = values_of(Staging(torch.device("cuda", 0)), tensors)
    for at, size in enumerate(sizes):
        assert found[str(at)].tolist() == [float(at)] * size
    assert pinned_bytes == [448 + 192, 640, 2432, 64 + 448]
