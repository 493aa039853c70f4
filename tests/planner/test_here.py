"""The plan of this machine: what training can run, how long rows are, what does not fit."""

from __future__ import annotations

import pytest

from phalanx.errors import JobError, PlanError
from phalanx.job import load_job
from phalanx.models.spec import small_config, weight_bytes
from phalanx.planner import machine_here
from phalanx.planner import training_shape as shapes
from phalanx.planner.here import row_plan, training_shape, with_layout

CONFIG = small_config(
    vocab_size=100, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4,
    num_kv_heads=1, head_dim=4, dtype="float32",
)  # fmt: skip


def shape(mesh, **plan):
    flags = {"model.name": "tiny", "plan.mesh": mesh}
    job = load_job(None, flags | {f"plan.{key}": value for key, value in plan.items()})
    return job, training_shape(job, CONFIG, job.plan.devices or 4)


def test_ranks_are_data_ranks_times_the_tensor_degree():
    _, found = shape({"replicate": 2, "tp": 2}, data="replicate", tensor="megatron", devices=4)
    assert (found.num_data_ranks, found.tensor_degree, found.splits_tokens) == (2, 2, False)
    assert [table["family"] for table in found.tables] == ["data", "tensor"]


def test_sequence_parallelism_is_read_from_the_rules():
    tensor = {"name": "megatron", "sequence_parallel": True}
    job, found = shape({"shard": 1, "tp": 4}, tensor=tensor, devices=4)
    assert found.splits_tokens
    assert row_plan(job, 10, found, "cuda") == {"row_tokens": 512, "row_multiple": 4}
    assert row_plan(job, 513, found, "cpu") == {"row_tokens": 544, "row_multiple": 32}


@pytest.mark.parametrize(
    ("mesh", "plan", "where"),
    [
        ({"pp": 4}, {}, "plan.mesh.pp"),  # of two layers
        ({"cp": 4}, {}, "plan.mesh.cp"),  # no policy uses it
        ({"shard": 2, "pp": 2}, {}, "plan.data"),  # gathered at every visit of a stage
        ({"tp": 4}, {}, "plan.mesh.tp"),  # no policy uses it
        ({"tp": 3}, {"tensor": "megatron", "devices": 3}, "plan.mesh.tp"),
        ({"shard": 4}, {"tensor": "megatron"}, "plan.tensor"),
        ({"tp": 2, "cp": 4}, {"tensor": "megatron", "context": "ulysses", "devices": 8}, "cp"),
        ({"shard": 4}, {"data": "zero"}, "plan.data"),  # of adapters
        (
            {"a": 2, "b": 2},
            {"context": [{"name": "ring", "axis": "a"}, {"name": "all_gather", "axis": "b"}]},
            "plan.context",
        ),
    ],
)
def test_what_training_cannot_run_is_refused_with_its_place(mesh, plan, where):
    with pytest.raises(PlanError) as raised:
        shape(mesh, **plan)
    assert raised.value.code in ("plan/illegal", "layout/divide") and where in str(raised.value)


def test_a_pipeline_has_a_schedule_and_stages_of_all_layers():
    job, found = shape({"replicate": 2, "pp": 2}, pipeline="1f1b", devices=4)
    assert (found.pipeline_degree, found.num_data_ranks, found.tensor_degree) == (2, 2, 1)
    assert found.order_table == {"family": "pipeline", "name": "1f1b"}
    assert [(stage.start, stage.stop) for stage in found.stages] == [(0, 1), (1, 2)]
    assert [spec.policy_name for spec in found.specs] == ["replicate"]  # though nobody named it
    assert row_plan(job, 10, found, "cuda")["row_multiple"] == 1


def test_context_ranks_deal_the_same_rows_and_sum_their_gradients():
    job, found = shape({"cp": 2}, context="ring", devices=2)
    assert (found.context_degree, found.num_data_ranks) == (2, 1)
    assert [spec.family for spec in found.specs] == ["data", "context"]
    assert row_plan(job, 10, found, "cuda")["row_multiple"] == 4
    tensor = {"name": "megatron", "sequence_parallel": True}
    job, found = shape({"cp": 2, "tp": 2}, context="all_gather", tensor=tensor, devices=4)
    assert row_plan(job, 10, found, "cuda")["row_multiple"] == 8
    two = [{"name": "ulysses", "axis": "heads"}, {"name": "ring", "axis": "cp"}]
    _, found = shape({"cp": 2, "heads": 2}, context=two, devices=4)
    assert found.context_degree == 4 and found.token_parts == 8


def test_stages_keep_masters_where_computing_takes_another_dtype():
    for mesh, name in (({"pp": 2}, "zero"), ({"cp": 2}, "fsdp")):
        flags = {"model.name": "m", "plan.mesh": mesh, "train.method": "full"}
        flags |= {"plan.context": "ring"} if "cp" in mesh else {}
        found = training_shape(load_job(None, flags), CONFIG, 2)
        assert found.mesh.to_dict() == {"shard": 1} | mesh
        assert [spec.policy_name for spec in found.specs if spec.family == "data"] == [name]


def test_stages_as_the_job_names_them():
    named = {"model.name": "m", "plan.mesh": {"pp": 2}, "plan.stages": [2, 0]}
    found = training_shape(load_job(None, named | {"train.method": "full"}), CONFIG, 2)
    assert [(stage.start, stage.stop) for stage in found.stages] == [(0, 2), (2, 2)]
    with pytest.raises(PlanError, match=r"without anything to train.*\[1, 1\]"):
        training_shape(load_job(None, named), CONFIG, 2)


def test_rows_shorter_than_a_document_are_refused():
    job, found = shape({"shard": 4}, row_tokens=100)
    assert row_plan(job, 100, found, "cuda")["row_tokens"] == 100
    with pytest.raises(JobError, match="101"):
        row_plan(job, 101, found, "cuda")


def test_one_rank_gathers_nothing_unless_weights_are_cast():
    _, alone = shape({"shard": 1}, devices=1)
    assert not alone.tables  # 'tiny' is bfloat16 with float32 masters: adapters only need no cast


def choice(monkeypatch, room_bytes, **flags):
    """Mesh and data policy of a job that names neither."""
    monkeypatch.setattr(shapes, "memory_of_rank", lambda num_ranks: room_bytes)
    job = load_job(None, {"model.name": "m"} | {k.replace("__", "."): v for k, v in flags.items()})
    plan = with_layout(job, CONFIG, 4).plan
    return dict(plan.mesh), plan.data


def test_a_layout_that_nobody_named_is_chosen_by_memory(monkeypatch):
    whole = weight_bytes(CONFIG)
    kept, given_back = (
        {"name": "fsdp", "reshard_after_forward": gives_back} for gives_back in (False, True)
    )
    assert choice(monkeypatch, 2 * whole) == ({"replicate": 4}, "replicate")
    assert choice(monkeypatch, 2 * whole - 1) == ({"shard": 4}, given_back)
    full = {"train__method": "full"}
    assert choice(monkeypatch, 4 * whole, **full) == ({"shard": 4}, kept)
    assert choice(monkeypatch, 4 * whole - 1, **full) == ({"shard": 4}, given_back)


def test_a_layout_that_somebody_named_stays(monkeypatch):
    for named in ({"plan.data.prefetch": 0}, {"plan.mesh.shard": 4}, {"plan.tensor": "megatron"}):
        job = load_job(None, {"model.name": "m"} | named)
        assert with_layout(job, CONFIG, 4) is job


def test_gpus_are_used_where_there_are_some(monkeypatch):
    found = [f"NVIDIA H200, {size} MiB, driver 570" for size in (143_771, 143_000)]
    monkeypatch.setattr(machine_here, "gpus", lambda: found)
    job = load_job(None, {"model.name": "m"})
    for visible, count in ((None, 2), ("1", 1), ("", 0), ("-1", 0)):
        machine_here.gpus_here.cache_clear()
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert machine_here.device_here() == ("cuda" if count else "cpu")
        assert machine_here.num_ranks_here(job) == (count or machine_here.num_cores())
        assert ("H200" in machine_here.hardware_here(1)["machine"]) == bool(count)
    machine_here.gpus_here.cache_clear()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert machine_here.memory_of_rank(2) == 143_000 * 2**20
    monkeypatch.undo()
    machine_here.gpus_here.cache_clear()
