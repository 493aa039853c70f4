"""The simulated step of a plan for this machine: as long as predicted, named as a measured one."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from phalanx.cost.local_shapes import local_config
from phalanx.cost.training import Workload, rate_key
from phalanx.job import load_job
from phalanx.models.operators import operators
from phalanx.models.spec import LoraSpec, small_config
from phalanx.plan import Plan
from phalanx.planner import machine_here
from phalanx.planner.here import plan_here, training_shape
from phalanx.planner.timeline import AGREES_FRAC, step_forecast

CONFIG = small_config(
    vocab_size=100, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=4, dtype="bfloat16",
)  # fmt: skip
FSDP = {"name": "fsdp", "reshard_after_forward": False}
LAYOUTS = {
    "one rank": ({"shard": 1}, {}),
    "sharded": ({"shard": 4}, {}),
    "sharded, kept": ({"shard": 2}, {"data": FSDP}),
    "replicated": ({"replicate": 3}, {}),
    "hybrid": ({"replicate": 2, "shard": 2}, {"data": ["fsdp", "replicate"]}),
    "tensor": ({"shard": 2, "tp": 2}, {"tensor": "megatron"}),
    "sequence": (
        {"shard": 2, "tp": 2},
        {"tensor": {"name": "megatron", "sequence_parallel": True}},
    ),
    "recomputed": ({"shard": 2}, {"recompute": "full"}),
    "zero": ({"shard": 4}, {"data": {"name": "zero", "stage": 1}}),
    "pipeline": ({"pp": 2}, {"pipeline": "1f1b"}),
    "pipeline, replicas": ({"replicate": 2, "pp": 2}, {"pipeline": "gpipe"}),
    "pipeline, uneven": ({"pp": 2}, {"pipeline": "1f1b", "stages": [1, 2]}),
    "chunks": ({"pp": 2}, {"pipeline": {"name": "interleaved", "virtual": 2}}),
    "weight gradients apart": ({"pp": 3}, {"pipeline": "zero_bubble"}),
    "pipeline, tensor": ({"pp": 2, "tp": 2}, {"pipeline": "1f1b", "tensor": "megatron"}),
    "ring": ({"cp": 2}, {"context": "ring"}),
    "gathered keys": ({"shard": 2, "cp": 2}, {"context": "all_gather"}),
    "heads": ({"cp": 2}, {"context": "ulysses"}),
    "pipeline, context": ({"pp": 2, "cp": 2}, {"pipeline": "1f1b", "context": "ring"}),
}


def rates(lora=None):
    """Awkward rates, so that no two operators take the same time."""
    keys = {rate_key(op, CONFIG) for op in operators(CONFIG, document_tokens=8, lora=lora)}
    for degree in (2,):
        local = local_config(CONFIG, degree)
        keys |= {rate_key(op, local) for op in operators(local, document_tokens=8, lora=lora)}
    table = {
        f"{key}.{phase}": 1e-5 + 1e-7 * at for at, key in enumerate(sorted(keys)) for phase in "FB"
    }
    table |= {"all_gather": 3e6, "reduce_scatter": 4e6, "all_reduce": 5e6, "optimizer": 1e-8}
    table |= {"p2p": 6e6, "add": 7e6, "add.wide": 8e6, "copy": 9e6}
    table |= {"runtime": 5e6, "kernels": 1e6, "baseline": 1e6}
    return {"rates": {key: {"value": value} for key, value in table.items()}}


def forecast(layout, *, num_items=2.0, lora=False, monkeypatch=None):
    mesh, plan = LAYOUTS[layout]
    spec = LoraSpec(rank=3, alpha=6.0) if lora else None
    flags = {"model.name": "tiny", "plan.mesh": mesh, "train.method": "lora" if lora else "full"}
    job = load_job(None, flags | {f"plan.{key}": value for key, value in plan.items()})
    shape = training_shape(job, CONFIG, int(np.prod(list(mesh.values()))))
    work = Workload(
        tokens=64.0 * num_items, counted=20.0 * num_items, num_items=num_items, row_tokens=64,
        row_counted=20, longest_row=64, document_tokens=8, num_trained=1000,
        lora_rank=3 if lora else 0, lora_alpha=6.0, lora_targets=spec.targets if spec else (),
        tensor_degree=shape.tensor_degree, splits_tokens=shape.splits_tokens, row_limit=64,
        context_degree=shape.context_degree,
        num_steps=10,
    )  # fmt: skip
    planned = plan_here(job, CONFIG, work, rates(spec), shape.mesh.size)
    return planned, work, step_forecast(planned, CONFIG, work)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Plans of these tests are for a machine without a GPU."""
    monkeypatch.setattr(machine_here, "gpus_here", lambda: ())


# adapters have no update worth cutting, and no stage without a layer
ALL_TRAINED = {"zero", "chunks"}
CASES = [
    pytest.param(name, lora, id=f"{name}-{'lora' if lora else 'full'}")
    for name in LAYOUTS
    for lora in (False, True)
    if name != "one rank" and not (lora and name in ALL_TRAINED)
]


@pytest.mark.parametrize(("layout", "lora"), CASES)
def test_the_simulated_step_ends_when_the_plan_says(layout, lora):
    planned, _, found = forecast(layout, lora=lora)
    said = next(r["value"] for r in planned.predictions if r["quantity"] == "training/step time")
    assert found.prediction.step_s == pytest.approx(said)
    assert abs(found.gap_frac) <= AGREES_FRAC and found.why == ""


def test_a_step_that_does_not_agree_says_why():
    _, _, found = forecast("sharded", num_items=0.5)
    assert abs(found.gap_frac) > AGREES_FRAC
    assert "whole micro-batches" in found.why


def test_one_rank_talks_to_nobody_and_the_sum_counts_its_copies():
    _, _, found = forecast("one rank")
    assert set(found.trace.column("axis")) == {""}
    assert found.prediction.seconds["gather"] > 0 and "talks to nobody" in found.why
    _, _, frozen = forecast("one rank", lora=True)
    assert frozen.why == ""


def test_overlap_of_an_accelerator_is_the_reason_for_an_earlier_end(tmp_path):
    planned, work, _ = forecast("sharded")
    table = asdict(planned)
    table["programs"]["train"]["device"] = "cuda"
    planned.save(tmp_path / "plan.json")
    there = Plan.load(tmp_path / "plan.json")
    changed = type(there)(**{**vars(there), "programs": _on_cuda(there)})
    found = step_forecast(changed, CONFIG, work)
    assert found.gap_frac < 0 and "overlaps" in found.why


def _on_cuda(plan):
    train = plan.program("train")
    return {"train": type(train)(**{**vars(train), "device": "cuda"})}


def test_rows_are_named_as_a_measured_step_names_them():
    _, _, found = forecast("sharded")
    trace = found.trace
    assert trace.source == "simulated" and set(trace.column("role")) == {"train"}
    for rank in range(4):
        spans = trace.where(rank=rank, lane="compute").column("action_id").tolist()
        assert spans == ["F0", "B0", "F1", "B1", "O"]
        (step,) = trace.where(rank=rank, lane="step").rows()
        assert step["action_id"] == "step1" and step["start_s"] == 0.0
        assert step["dur_s"] == pytest.approx(trace.end_s)
    talk = trace.where(lane="axis:shard")
    assert set(talk.column("operator")) == {"all_gather", "reduce_scatter"}
    assert (talk.columns["payload_bytes"] > 0).all()


def test_operators_fill_their_passes_and_sum_up_to_the_prediction():
    _, _, found = forecast("recomputed")
    lane = found.trace.where(rank=1, lane="operators")
    sums: dict[str, float] = {}
    for row in lane.rows():
        sums[row["operator"]] = sums.get(row["operator"], 0.0) + row["dur_s"]
    said = dict(found.prediction.seconds)
    again = said.pop("recompute")
    for exchange in ("gather", "reduce"):
        said.pop(exchange)
    assert sum(sums.values()) == pytest.approx(sum(said.values()) + again)
    assert sums["head"] == pytest.approx(said["head"])
    starts, ends = lane.columns["start_s"], lane.columns["start_s"] + lane.columns["dur_s"]
    order = np.argsort(starts, kind="stable")
    assert (starts[order][1:] >= ends[order][:-1] - 1e-12).all(), "one at a time"


def test_frozen_units_that_stay_gathered_do_not_travel_again():
    _, _, found = forecast("sharded, kept", lora=True)
    assert "all_gather" not in found.trace.column("operator").tolist()
    _, _, whole = forecast("sharded, kept")
    assert "all_gather" in whole.trace.column("operator").tolist()
