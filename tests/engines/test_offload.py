"""Optimizer states outside the device: the bits of the update on the device."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from phalanx.engines import offload
from phalanx.engines.offload import HostMemory, MappedFile, OffloadedAdamW, make_optimizer
from phalanx.engines.optim import ShardedAdamW
from phalanx.engines.process import process_bytes
from phalanx.errors import JobError
from tests.engines.late_device import LateDevice

SHAPES = ((7, 5), (1,), (3, 1), (0, 4), (33,), (64, 9))
OPTIONS = {"weight_decay": 0.1, "clip_norm": 0.7}


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    draw = torch.Generator().manual_seed(5)
    values = [torch.randn(shape, generator=draw) for shape in SHAPES]
    return {f"w{at}": nn.Parameter(value.to(dtype)) for at, value in enumerate(values)}


def train(optimizer: ShardedAdamW, after=lambda: None) -> None:
    """Five steps, of which one is skipped."""
    draw = torch.Generator().manual_seed(6)
    for step in range(5):
        for parameter in optimizer.parameters:
            grad = torch.randn(parameter.shape, generator=draw).bfloat16()
            parameter.grad = grad.to(parameter.dtype)
        optimizer.step(1e-2, skip=torch.tensor(float(step == 2)))
        after()


def stores(folder):
    return {"host": HostMemory(), "file": MappedFile(folder)}


@pytest.mark.parametrize("place", ["host", "file"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_states_elsewhere_change_no_bit(tmp_path, monkeypatch, place, dtype):
    monkeypatch.setattr(offload, "PIECE_BYTES", 300)  # some pieces of several tensors, one larger
    here = ShardedAdamW(parameters(dtype).items(), **OPTIONS)
    there = OffloadedAdamW(parameters(dtype).items(), store=stores(tmp_path)[place], **OPTIONS)
    train(here)
    train(there)
    for name, parameter in here.named_parameters.items():
        assert torch.equal(there.named_parameters[name], parameter)
    kinds = there.state_dict()
    for kind, tensors in here.state_dict().items():
        assert all(torch.equal(kinds[kind][name], each) for name, each in tensors.items())
    assert "master" not in kinds and not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["host", "file"])
def test_masters_apart_train_as_float32_weights_that_are_rounded_for_use(tmp_path, place):
    rounded, exact = parameters(torch.bfloat16), parameters(torch.bfloat16)
    store = stores(tmp_path)[place]
    there = OffloadedAdamW(rounded.items(), store=store, master=torch.float32, weight_decay=0.1)
    wide = {name: nn.Parameter(each.detach().float()) for name, each in exact.items()}
    here = ShardedAdamW(wide.items(), weight_decay=0.1)
    train(there)
    train(here)
    masters = there.state_dict()["master"]
    for name, parameter in wide.items():
        assert torch.equal(masters[name], parameter)
        assert torch.equal(rounded[name], parameter.bfloat16())


def test_a_device_copies_while_the_host_updates_and_nothing_is_read_before_it_is_there(
    monkeypatch,
):
    """Of each piece one wait; gradients and weights travel in 16 bits, masters stay."""
    monkeypatch.setattr(offload, "PIECE_BYTES", 300)
    here, there = (
        OffloadedAdamW(
            parameters(torch.bfloat16).items(), store=HostMemory(), master=torch.float32, **OPTIONS
        )
        for _ in range(2)
    )
    train(here)
    with monkeypatch.context() as patched:
        device = LateDevice(patched)
        train(there, after=device.finish)
    for name, parameter in here.named_parameters.items():
        assert torch.equal(there.named_parameters[name], parameter)
    kinds = there.state_dict()
    for kind, tensors in here.state_dict().items():
        assert all(torch.equal(kinds[kind][name], each) for name, each in tensors.items())
    num_pieces = 2 + 1  # matrices (the large one alone), vectors
    elements = sum(each.numel() for each in here.parameters)
    assert device.num_waits == 5 * num_pieces and device.pinned_bytes == 5 * 2 * 2 * elements


def test_state_is_what_the_optimizer_goes_on_from(tmp_path):
    """What a checkpoint copies into the state is the state."""
    first = make_optimizer(
        parameters(torch.bfloat16).items(), offload="file", folder=tmp_path, master=torch.float32
    )
    train(first)
    second = make_optimizer(
        parameters(torch.bfloat16).items(), offload="file", folder=tmp_path, master=torch.float32
    )
    with torch.no_grad():
        for kind, tensors in second.state_dict().items():
            for name, each in tensors.items():
                each.copy_(first.state_dict()[kind][name])
        for mine, theirs in zip(second.parameters, first.parameters):
            mine.copy_(theirs)
    train(first)
    train(second)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters, second.parameters))


def test_masters_follow_weights_that_are_set_without_states(tmp_path):
    optimizer = make_optimizer(
        parameters(torch.bfloat16).items(), offload="file", folder=tmp_path, master=torch.float32
    )
    train(optimizer)
    with torch.no_grad():
        for parameter in optimizer.parameters:
            parameter.fill_(3.0)
    optimizer.take_weights()
    assert all((each == 3.0).all() for each in optimizer.state_dict()["master"].values())
    per_element = optimizer.state_element_bytes(optimizer.parameters[0])
    counts = 4 * len(SHAPES)
    elements = sum(each.numel() for each in optimizer.parameters)
    assert optimizer.state_bytes() == per_element * elements + counts == 12 * elements + counts


def test_a_file_takes_states_out_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "PIECE_BYTES", 1 << 22)
    named = {f"w{at}": nn.Parameter(torch.ones(1 << 10, 1 << 10)) for at in range(24)}
    optimizer = make_optimizer(named.items(), offload="file", folder=tmp_path)
    for parameter in optimizer.parameters:
        parameter.grad = torch.ones_like(parameter)
    before = process_bytes().rss
    optimizer.step(1e-3)
    grads_bytes = 24 << 22
    assert optimizer.state_bytes() >= 2 * grads_bytes
    assert process_bytes().rss - before < 0.25 * grads_bytes  # gradients are forgotten, too


def test_a_full_disk_is_told_before_the_first_update(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    optimizer = make_optimizer(parameters(torch.float32).items(), offload="file", folder=tmp_path)
    with pytest.raises(JobError, match="has no room for") as caught:
        optimizer.state_dict()
    assert caught.value.code == "environment/disk"
