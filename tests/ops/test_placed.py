"""Laws of copies from the host: shared on a CPU, from pinned memory to a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import phalanx
from phalanx.ops.placed import placed


def test_on_the_cpu_values_are_where_they_were():
    array = np.arange(5)
    found = placed(array, "cpu")
    array[3] = -1
    assert found.tolist() == [0, 1, 2, -1, 4] and found.dtype is torch.int64


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda", 1)])
def test_to_a_gpu_values_go_from_pinned_memory_and_nobody_waits(device, monkeypatch):
    """A copy from pageable memory waits for the stream, whatever `non_blocking` says."""
    done = []

    def pin_memory(tensor):
        done.append("pinned")
        return tensor

    def to(tensor, where, *, non_blocking=False):
        done.append((where, non_blocking))
        return tensor

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    placed(np.arange(3, dtype=np.int32), device)
    assert done == ["pinned", (torch.device(device), True)]


def test_nobody_copies_arrays_to_a_device_in_another_way():
    root = Path(phalanx.__file__).parent
    files = [*root.glob("ops/**/*.py"), *root.glob("engines/**/*.py"), *root.glob("models/*.py")]
    assert len(files) > 100
    direct = re.compile(r"from_numpy\((?:[^()]|\([^()]*\))*\)\s*\.to\(")
    assert [str(file) for file in files if direct.search(file.read_text())] == []
