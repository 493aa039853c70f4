"""Data and tensor policies that do not fit are refused before a process starts."""

from __future__ import annotations

import pytest

from phalanx.errors import PhalanxError
from phalanx.job import load_job
from phalanx.models.spec import small_config
from phalanx.planner.training_shape import training_shape

CONFIG = small_config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=8,
)  # fmt: skip
GRID = {"replicate": 2, "shard": 2}
FULL = {"train.method": "full"}
SINGLE = FULL | {"train.master_dtype": "float32", "model.dtype": "float32"}


def shape(mesh, flags=SINGLE, **plan):
    size = 1
    for degree in mesh.values():
        size *= degree
    given = {"model.name": "m", "plan.mesh": mesh} | {f"plan.{k}": v for k, v in plan.items()}
    return training_shape(load_job(None, given | dict(flags)), CONFIG, size)


@pytest.mark.parametrize(
    ("mesh", "plan", "told"),
    [
        # ranks that nobody sums over would train models of their own, unseen
        (GRID, {"data": "fsdp"}, r"plan.mesh.replicate = 2: no policy .* \['fsdp', 'replicate'\]"),
        (GRID, {"data": "zero"}, "plan.mesh.replicate = 2: no policy"),
        (GRID, {"data": "replicate"}, "plan.mesh.shard = 2: no policy"),
        ({"shard": 2}, {"data": []}, "plan.mesh.shard = 2: no policy"),
        ({"shard": 2}, {"data": ["fsdp", "fsdp"]}, "one axis splits one thing"),
        ({"shard": 2}, {"tensor": {"name": "megatron", "axis": "shard"}}, "one axis splits one"),
        (
            GRID,
            {"data": ["fsdp", {"name": "zero", "axis": "replicate"}], "tensor": "megatron"},
            "megatron: needs an axis 'tp'",
        ),
        (GRID, {"data": ["fsdp", {"name": "zero", "axis": "replicate"}]}, "both cut the optim"),
        ({"tp": 2}, {"data": {"name": "fsdp", "axis": "tp"}}, "rows are dealt over"),
        (
            {"shard": 2, "replicate": 2, "tp": 2},
            {"data": ["fsdp", "replicate"], "tensor": "megatron"},
            "replicate must come before shard",
        ),
        ({"shard": 2}, {"data": {"name": "fsdp", "units": "*blocks*"}}, r"\*blocks\*: names no"),
        (
            {"tp": 2},
            {
                "tensor": {
                    "name": "megatron", "sequence_parallel": True, "vocabulary_parallel": False
                }
            },
            "splits tokens but not the vocabulary",
        ),
        ({"shard": 2}, {"data": {"name": "fsdp", "reduce_dtype": "bf16"}}, "bfloat16"),
        ({"shard": 2}, {"data": {"name": "zero", "reduce_dtype": "half"}}, "reduce_dtype"),
    ],
)  # fmt: skip
def test_policies_that_do_not_fit_are_refused(mesh, plan, told):
    with pytest.raises(PhalanxError, match=told):
        shape(mesh, **plan)


@pytest.mark.parametrize(
    ("mesh", "plan", "found", "names"),
    [
        ({"tp": 2}, {"tensor": "megatron"}, {"shard": 1, "tp": 2}, ["zero"]),
        ({"replicate": 2}, {}, {"replicate": 2, "shard": 1}, ["zero", "replicate"]),
        (
            {"replicate": 2, "pp": 2}, {}, {"replicate": 2, "shard": 1, "pp": 2},
            ["zero", "replicate"],
        ),
        (
            {"tp": 2, "replicate": 2}, {"tensor": "megatron"},
            {"tp": 2, "replicate": 2, "shard": 1}, ["zero", "replicate"],
        ),
        (
            {"replicate": 2, "cp": 2}, {"context": "ring"}, {"replicate": 2, "shard": 1, "cp": 2},
            ["fsdp", "replicate"],
        ),
        # an offloaded update casts what it keeps elsewhere
        ({"replicate": 2}, {"offload": "host"}, {"replicate": 2}, ["replicate"]),
    ],
)  # fmt: skip
def test_a_mesh_alone_suffices_where_masters_have_another_dtype(mesh, plan, found, names):
    given = shape(mesh, FULL, **plan)
    assert list(given.mesh.to_dict().items()) == list(found.items())
    assert [spec.policy_name for spec in given.specs if spec.family == "data"] == names


def test_a_policy_that_casts_nothing_is_refused_with_those_that_do():
    with pytest.raises(PhalanxError, match=r"casts nothing.*fsdp or zero"):
        shape({"replicate": 2}, FULL, data="replicate")
