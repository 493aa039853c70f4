"""Fresh values depend on seed and name only; filling demands every tensor in its shape."""

from __future__ import annotations

import pytest
import torch

from phalanx.errors import JobError
from phalanx.models.decoder import Decoder
from phalanx.models.parameters import initial_value, initial_values, load_parameters
from phalanx.models.spec import canonical_tensors
from tests.models.cases import CONFIGS
from tests.ranks import run_ranks

CONFIG = CONFIGS["grouped_queries"]


def test_initial_value_is_a_function_of_seed_and_name():
    first = initial_value(3, "a.weight", (7, 5), torch.float32)
    torch.manual_seed(99)
    assert torch.equal(first, initial_value(3, "a.weight", (7, 5), torch.float32))
    assert not torch.equal(first, initial_value(4, "a.weight", (7, 5), torch.float32))
    assert not torch.equal(first, initial_value(3, "b.weight", (7, 5), torch.float32))


def test_initial_value_is_rounded_from_float32():
    wide = initial_value(1, "x", (300,), torch.float32, std=0.5)
    assert torch.equal(wide.bfloat16(), initial_value(1, "x", (300,), torch.bfloat16, std=0.5))
    assert wide.std().item() == pytest.approx(0.5, rel=0.15)


def test_norms_start_as_the_identity_and_matrices_do_not():
    values = dict(initial_values(0, canonical_tensors(CONFIG).values()))
    for name, value in values.items():
        assert bool(value.any()) == ("norm" not in name), name


def test_every_parameter_must_be_filled_in_its_shape():
    decoder = Decoder(CONFIG)
    values = dict(initial_values(0, canonical_tensors(CONFIG).values()))
    values.pop("model.norm.weight")
    with pytest.raises(JobError, match=r"model\.norm\.weight") as caught:
        load_parameters(decoder, values.items())
    assert caught.value.code == "model/tensor"
    load_parameters(decoder, values.items(), strict=False)
    values["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(JobError, match="48") as caught:
        load_parameters(decoder, values.items())
    assert caught.value.code == "model/tensor"


def sharded_values(rank: int, world_size: int) -> list[float]:
    """This rank's sum of each parameter, gathered, after filling a sharded decoder."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    decoder = Decoder(CONFIG, device="meta")
    for layer in decoder.model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(decoder, mesh=mesh)
    decoder.to_empty(device="cpu")
    load_parameters(decoder, initial_values(5, canonical_tensors(CONFIG).values()))
    whole = {name: p.full_tensor() for name, p in decoder.named_parameters()}
    expected = dict(initial_values(5, canonical_tensors(CONFIG).values()))
    return [float(torch.equal(whole[name], expected[name])) for name in expected]


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [1, 3])  # 3 divides few of the shapes
def test_sharded_decoder_is_filled_with_slices_of_the_whole(world_size):
    for equal in run_ranks(sharded_values, world_size):
        assert len(equal) == len(canonical_tensors(CONFIG)) and all(equal)
