"""A process reads only its part of each stored tensor, whatever cuts the parameter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from phalanx.errors import JobError
from phalanx.models.decoder import Decoder
from phalanx.models.hf import save_folder
from phalanx.models.parameters import initial_values, load_sharded
from phalanx.models.spec import canonical_tensors
from phalanx.models.stored import read_header
from phalanx.models.weight_names import model_weights
from tests.models.cases import CONFIGS
from tests.ranks import run_ranks

CONFIG = CONFIGS["grouped_queries"]  # sizes that 3 does not divide
MIB = 2**20


def values(config=CONFIG) -> dict[str, torch.Tensor]:
    return dict(initial_values(5, canonical_tensors(config).values()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("weights") / "model"
    return save_folder(target, CONFIG, values().items(), max_shard_bytes=30_000)


def filled(rank: int, world_size: int, folder: Path, axes: dict[str, int], dtype: str) -> list[str]:
    """Names of the parameters that differ from the whole one, after a sharded load."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    decoder = Decoder(CONFIG.with_dtype(dtype), device="meta")
    if "tp" in axes:
        plan = {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {"mlp.down_proj": RowwiseParallel(), "self_attn.q_proj": ColwiseParallel()}
        for layer in decoder.model.layers.values():
            parallelize_module(layer, mesh["tp"], plan, src_data_rank=None)
    data = [axis for axis in axes if axis != "tp"]
    if data:
        for module in [*decoder.model.layers.values(), decoder]:
            fully_shard(module, mesh=mesh[tuple(data)])
    decoder.to_empty(device="cpu")
    for parameter in decoder.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        local.detach().fill_(float("nan"))
    load_sharded(decoder, model_weights(folder, CONFIG))
    expected = values(CONFIG.with_dtype(dtype))
    whole = {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
        for name, p in decoder.named_parameters()
    }
    return [name for name in expected if not torch.equal(whole[name], expected[name])]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("axes", "dtype"),
    [
        ({"shard": 3}, "float32"),  # 3 divides few of the sizes
        ({"shard": 4}, "bfloat16"),
        ({"tp": 2}, "float32"),
        ({"shard": 2, "tp": 2}, "float64"),  # rows cut twice: a strided shard
        ({"replicate": 2, "shard": 2}, "float32"),
    ],
)
def test_every_way_of_cutting_reads_its_part_of_the_whole(folder, axes, dtype):
    num_ranks = torch.tensor(list(axes.values())).prod().item()
    for wrong in run_ranks(filled, num_ranks, folder, axes, dtype):
        assert wrong == []


def test_parts_of_plain_parameters_are_read_where_heads_are_shared(tmp_path):
    whole = torch.randn(12, 7)
    save_file({"k.weight": whole, "o.weight": whole.t().contiguous()}, tmp_path / "a.safetensors")
    stored = read_header(tmp_path / "a.safetensors")
    module = nn.ModuleDict({"k": nn.Linear(7, 4, bias=False), "o": nn.Linear(4, 7, bias=False)})
    parts = {"k.weight": ((4, 8), (0, 7)), "o.weight": ((0, 7), (4, 8))}
    load_sharded(module, stored, parts=parts)
    assert torch.equal(module.k.weight, whole[4:8])
    assert torch.equal(module.o.weight, whole.t()[:, 4:8])


def test_scalars_vectors_blocks_and_buffers_are_read(tmp_path):
    tensors = {"s": torch.tensor(3.0), "v": torch.randn(5), "b": torch.randn(2, 3, 4)}
    save_file(tensors, tmp_path / "a.safetensors")
    module = nn.Module()
    module.register_buffer("s", torch.zeros((), dtype=torch.float64))
    module.v = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    module.b = nn.Parameter(torch.zeros(2, 3, 4))
    load_sharded(module, read_header(tmp_path / "a.safetensors"))
    assert module.s.item() == 3.0 and torch.equal(module.b, tensors["b"])
    assert torch.equal(module.v, tensors["v"].bfloat16())


@pytest.mark.parametrize(
    ("shape", "names", "says"),
    [((3, 4), None, r"\(2, 4\).*\(3, 4\)"), ((2, 4), ["weight", "wieght"], "wieght.*weight")],
)
def test_what_does_not_fit_is_refused_before_reading(tmp_path, shape, names, says):
    save_file({"weight": torch.ones(2, 4)}, tmp_path / "a.safetensors")
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(shape))
    module.wieght = nn.Parameter(torch.zeros(1))
    stored = read_header(tmp_path / "a.safetensors")
    with pytest.raises(JobError, match=says) as caught:
        load_sharded(module, stored, names=names or ["weight"])
    assert caught.value.code == "model/tensor"
    assert not module.weight.any()


def peak_of_load(rank: int, world_size: int, path: Path, rows: int) -> tuple[int, bool]:
    """Peak bytes above the level after the imports, and whether the part is right."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from phalanx.engines.process import PeakMemory, resident_bytes

    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(nn.Linear(4, 4), mesh=mesh)  # what its first call takes is none of the load's
    memory = PeakMemory(torch.device("cpu"), resident_bytes())
    with torch.device("meta"):
        module = nn.ParameterDict(
            {name: torch.empty(tensor.shape, dtype=torch.bfloat16)
             for name, tensor in read_header(path).items()}
        )  # fmt: skip
    fully_shard(module, mesh=mesh)
    module.to_empty(device="cpu")
    load_sharded(module, read_header(path))
    peak_bytes = memory.peak_bytes()
    start, stop = rank * rows // world_size, (rank + 1) * rows // world_size
    right = all(
        torch.equal(p.to_local()[:, 0], row_numbers(at, rows)[start:stop])
        for at, p in enumerate(module.parameters())
    )
    return peak_bytes, right


def row_numbers(at: int, rows: int) -> torch.Tensor:
    return ((torch.arange(rows) * 7 + at) % 251).bfloat16()


def write_rows(path: Path, count: int, rows: int, columns: int) -> int:
    """A file of `count` matrices whose rows hold their number; its size."""
    from phalanx.models.stored_write import ShardWriter

    planned = [(f"m{at:03d}", "BF16", (rows, columns)) for at in range(count)]
    writer = ShardWriter(path.parent, planned)
    for at, (name, _, _) in enumerate(planned):
        writer.put(name, row_numbers(at, rows)[:, None].expand(rows, columns))
    writer.close()
    return (path.parent / "model.safetensors").stat().st_size


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world_size", "count", "rows", "slack"),
    [
        (2, 6, 6 * 1024, 64 * MIB),
        pytest.param(3, 100, 6 * 1024, 512 * MIB, marks=pytest.mark.slow),
    ],
)
def test_peak_memory_of_a_load_is_its_share_and_little_more(
    tmp_path, world_size, count, rows, slack
):
    size = write_rows(tmp_path / "x", count, rows, columns=1024)
    results = run_ranks(peak_of_load, world_size, tmp_path / "model.safetensors", rows)
    largest = rows * 1024 * 2
    for peak, right in results:
        print(f"peak {peak / MIB:.0f} MiB, share {size / world_size / MIB:.0f} MiB")
        assert right
        assert peak <= size / world_size + largest + slack, (peak / MIB, size / MIB)
