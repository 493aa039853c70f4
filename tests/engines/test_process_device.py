"""Which device a process of a host takes."""

from __future__ import annotations

import pytest
import torch

from phalanx.engines.process import device_here, start_process
from phalanx.errors import PlanError
from phalanx.mesh import Mesh


@pytest.mark.parametrize(
    ("num_gpus", "local_rank", "index"), [(8, 0, 0), (8, 7, 7), (1, 0, 0), (1, 5, 0)]
)
def test_a_process_takes_the_gpu_of_its_number_or_the_only_one_it_is_shown(
    num_gpus, local_rank, index, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert device_here("cuda", local_rank) == torch.device("cuda", index)
    assert device_here("cpu", local_rank) == torch.device("cpu")


@pytest.mark.parametrize(
    ("num_gpus", "local_rank", "told"),
    [
        (0, 0, "sees 0 GPUs, and none is its own.*cpu"),
        (4, 4, "process 4.*sees 4 GPUs.*4 processes"),
    ],
)
def test_a_process_without_a_gpu_is_told_before_it_joins_the_others(
    num_gpus, local_rank, told, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    with pytest.raises(PlanError, match=told) as info, start_process("cuda", Mesh(replicate=1)):
        raise AssertionError("it has joined")
    assert info.value.code == "plan/hardware" and not torch.distributed.is_initialized()
