"""Replicas that differ are found and named; what is cut is not compared."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from phalanx.engines.bind import bind_data
from phalanx.engines.process import Process
from phalanx.engines.weight_check import WeightCheck, bits_hash, check_replicas
from phalanx.mesh import Mesh
from phalanx.policies.data.fsdp import Fsdp
from phalanx.policies.data.replicate import Replicate as Replicated
from phalanx.worlds.logged_group import device_mesh
from tests.models.cases import CONFIGS, random_decoder
from tests.ranks import RankFailed, run_ranks

LAYER = "model.layers.1.mlp.up_proj.weight"


def process_of(axes):
    mesh = device_mesh("cpu", Mesh(axes))
    return Process(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh)


def flip(parameter, at=5, bit=3):
    """One bit of what this rank holds."""
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    with torch.no_grad():
        local.view(-1).view(torch.int32)[at] ^= 1 << bit


def check_flipped(rank, world_size, axes, specs, flipped_ranks, name):
    process = process_of(axes)
    decoder = random_decoder(CONFIGS["grouped_queries"])
    bind_data(decoder, specs, process.mesh)
    check = WeightCheck(decoder, process)
    check.run(6)
    if rank in flipped_ranks:
        flip(dict(decoder.named_parameters())[name])
    return check.run(7)


@pytest.mark.dist
@pytest.mark.parametrize("name", [LAYER, "model.norm.weight"])
def test_one_flipped_bit_on_one_replica_is_named(name):
    with pytest.raises(RankFailed) as info:
        run_ranks(check_flipped, 3, {"replicate": 3}, [Replicated()], (2,), name)
    host = socket.gethostname()
    error = info.value.error
    assert error.code == "train/weights"
    assert error.where == f"{name} after step 7"
    assert error.value == f"on rank 2 (host {host}) not what ranks 0, 1 (host {host}) hold"
    assert len(info.value.errors) == 3  # every rank stops


@pytest.mark.dist
def test_of_two_replicas_none_is_called_the_right_one():
    with pytest.raises(RankFailed, match="different on ranks 0, 1"):
        run_ranks(check_flipped, 2, {"replicate": 2}, [Replicated()], (0,), LAYER)


@pytest.mark.dist
def test_replicas_of_a_shard_are_compared_with_each_other():
    axes, specs = {"replicate": 2, "shard": 2}, [Fsdp(), Replicated()]
    run_ranks(check_flipped, 4, axes, specs, (), LAYER)
    run_ranks(check_flipped, 4, axes, specs, (1, 3), LAYER)  # the same bit in both replicas
    with pytest.raises(RankFailed, match=r"up_proj.*different on ranks 1, 3"):
        run_ranks(check_flipped, 4, axes, specs, (3,), LAYER)


def check_gathered(rank, world_size):
    """Units that stay gathered put other tensors in the place of their shards."""
    process = process_of({"replicate": 2, "shard": 2})
    decoder = random_decoder(CONFIGS["grouped_queries"]).requires_grad_(False)
    bind_data(decoder, [Fsdp(reshard_after_forward=False), Replicated()], process.mesh)
    check = WeightCheck(decoder, process)
    with torch.no_grad():
        decoder(torch.arange(9))
    return check.run(1)["step"]


@pytest.mark.dist
def test_units_that_stay_gathered_are_compared_by_shards():
    assert run_ranks(check_gathered, 4) == [1] * 4


def names_compared(rank, world_size, axes, specs):
    process = process_of(axes)
    decoder = random_decoder(CONFIGS["grouped_queries"])
    bind_data(decoder, specs, process.mesh)
    return WeightCheck(decoder, process).names


@pytest.mark.dist
def test_what_every_axis_cuts_is_not_compared():
    assert run_ranks(names_compared, 2, {"shard": 2}, [Fsdp()])[0] == []
    assert len(run_ranks(names_compared, 2, {"replicate": 2}, [Replicated()])[0]) > 40


class Parts(nn.Module):
    """Parameters cut along no axis, one axis, or both."""

    def __init__(self, process):
        super().__init__()
        value = torch.arange(48.0).view(8, 6)
        self.whole = nn.Parameter(value.clone())
        self.of_tp = nn.Parameter(distribute_tensor(value, process.mesh["tp"], [Shard(1)]))
        both = process.mesh["shard", "tp"]
        self.of_both = nn.Parameter(distribute_tensor(value, both, [Shard(0), Shard(1)]))
        self.of_shard = nn.Parameter(distribute_tensor(value, both, [Shard(0), Replicate()]))


def check_parts(rank, world_size, flipped):
    process = process_of({"shard": 2, "tp": 2})
    parts = Parts(process)
    if rank == 3 and flipped:
        flip(getattr(parts, flipped))
    return check_replicas(parts, process, 1)["step"]


@pytest.mark.dist
def test_axes_that_do_not_cut_a_parameter_hold_replicas_of_it():
    assert run_ranks(check_parts, 4, "") == [1] * 4
    assert run_ranks(check_parts, 4, "of_both") == [1] * 4  # nobody else holds it
    for name, ranks in (("whole", "0, 1, 2"), ("of_tp", "1, 3"), ("of_shard", "2, 3")):
        with pytest.raises(RankFailed, match=rf"{name} after step 1 = .*{ranks} "):
            run_ranks(check_parts, 4, name)


def slow_third(rank, world_size):
    process = process_of({"replicate": world_size})
    check = WeightCheck(nn.Identity(), process)
    check.clock.add(3.0 if rank == 2 else 2.0, 10)
    return check.run(4), check.run(5)


@pytest.mark.dist
def test_the_same_gather_tells_who_is_slow():
    (line, later), *others = run_ranks(slow_third, 3)
    assert all(other == (line, later) for other in others)
    assert line["kind"] == "ranks" and line["step"] == 4
    assert line["rank_s"] == [0.2, 0.2, 0.3] and line["slow"] == [2]
    assert "rank 2" in line["text"] and "1.50 times" in line["text"]
    assert later["rank_s"] == [0.0] * 3 and later["slow"] == []


@pytest.mark.dist
def test_a_single_process_has_nothing_to_compare(tmp_path):
    assert run_ranks(check_alone, 1) == [{"slow": [], "text": ""}]


def check_alone(rank, world_size):
    line = check_replicas(nn.Linear(3, 3), process_of({"shard": 1}), 2)
    return {name: line[name] for name in ("slow", "text")}


@given(
    size=st.integers(1, 700),
    offset=st.integers(0, 9),
    where=st.integers(0, 10**6),
    bit=st.integers(0, 15),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
)
def test_every_bit_matters_and_the_place_in_memory_does_not(size, offset, where, bit, dtype):
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(size, generator=generator).to(dtype)
    elsewhere = torch.zeros(size + offset, dtype=dtype)[offset:]
    elsewhere.copy_(values)
    assert bits_hash(elsewhere) == bits_hash(values)
    elsewhere.view(torch.int16)[where % (size * dtype.itemsize // 2)] ^= (1 << bit) - (
        1 << 16 if bit == 15 else 0
    )
    assert bits_hash(elsewhere) != bits_hash(values)


def test_hashing_reads_nothing_back_from_a_cuda_device():
    with FakeTensorMode():
        found = bits_hash(torch.zeros(700, dtype=torch.bfloat16, device="cuda"))
    assert found.device.type == "cuda" and found.dtype is torch.int64 and found.shape == ()


def test_rows_that_change_places_matter():
    rows = torch.randn(9, 256)
    assert bits_hash(rows) != bits_hash(rows.flip(0))


def test_empty_shards_have_a_hash():
    assert bits_hash(torch.zeros(0, 4)).item() == 0
