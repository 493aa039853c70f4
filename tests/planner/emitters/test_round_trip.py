"""A plan that is written and read again is the same plan."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from phalanx.errors import PlanError
from phalanx.planner.emitters import Site, emit
from phalanx.planner.importers import foreign_plans, read_text
from phalanx.planner.importers.merge import merged
from tests.planner.emitters.plans import served, serving_plans, trained, training_plans

SITE = Site(accelerator="H100")
TOLD = ("method", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets", "base_bits")
TOLD += ("steps", "epochs", "lr", "precision", "master_dtype", "data")
# files of a target that together say the plan, and fields that its files cannot hold
PAIRS = {
    "torchtitan": (("torchtitan.toml",), {"method"}),
    "megatron": (("megatron.sh",), set()),
    "trl": (("accelerate.yaml", "sft.yaml"), {"method"}),
}


def read_again(files, names):
    first, *more = (read_text(files[name], name) for name in names)
    return merged(first, *more) if more else first


@pytest.mark.parametrize("target", PAIRS)
@settings(max_examples=50)
@given(plan=training_plans())
def test_every_training_plan_that_is_written_is_read_back_unchanged(target, plan, tmp_path_factory):
    names, lost = PAIRS[target]
    try:
        files = emit(target, plan, SITE)
    except PlanError as refusal:
        assert refusal.code == "emit/impossible"
        return
    read = read_again(files, names)
    assert foreign_plans(read, plan.devices).row(0) == foreign_plans(plan, plan.devices).row(0)
    for name in set(TOLD) - lost:
        assert getattr(read, name) == getattr(plan, name), name
    assert read.model == plan.model
    assert not [note for note in read.notes if note.kind == "unknown"]


@settings(max_examples=50)
@given(plan=serving_plans())
def test_every_server_that_is_written_is_read_back_unchanged(plan):
    try:
        files = emit("vllm", plan, SITE)
    except PlanError as refusal:
        assert refusal.code == "emit/impossible"
        return
    read = read_again(files, ["serve.sh"])
    stated = {name: value for name, value in plan.stated().items() if value is not None}
    wanted = stated | ({"expert_tensor": plan.tensor} if plan.expert == 1 else {})
    wanted["precision"] = wanted.get("precision")
    assert {name: getattr(read, name) for name in wanted} == wanted
    assert not [note for note in read.notes if note.kind == "unknown"]


@pytest.mark.parametrize("target", PAIRS)
def test_most_targets_write_the_usual_plan(target):
    assert emit(target, trained(), SITE)


def test_a_file_that_was_read_is_written_for_another_program():
    read = read_again(emit("torchtitan", trained()), ["torchtitan.toml"])
    files = emit("trl", replace(read, devices=16))
    again = read_again(files, ["accelerate.yaml", "sft.yaml"])
    assert foreign_plans(again, 16).row(0) == foreign_plans(trained(), 16).row(0)


def test_a_server_of_two_replicas_keeps_its_limits():
    read = read_again(emit("vllm", served()), ["serve.sh"])
    assert (read.max_tokens, read.max_running, read.devices) == (32_768, 64, 8)
