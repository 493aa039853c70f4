"""A model's step in numbers adds up to the model."""

import pytest

from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.models.operators import operators
from phalanx.models.spec import LoraSpec, lora_tensors, num_params, small_config
from phalanx.planner.work import model_work
from phalanx.registry import build

CONFIG = small_config(
    vocab_size=97,
    hidden_size=24,
    intermediate_size=56,
    num_layers=5,
    num_heads=3,
    num_kv_heads=1,
    head_dim=8,
    window=7,
    full_every=3,
)


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=3, alpha=4.0)])
def test_units_hold_every_parameter_and_all_work_once(lora):
    work = model_work(CONFIG, (11, 13), lora=lora)
    listed = operators(CONFIG, document_tokens=13, lora=lora)
    assert sum(unit.num_params for unit in work.units) == num_params(CONFIG)
    assert len(work.units) == CONFIG.num_layers + 2
    blocks = [block for unit in work.units for block in unit.blocks]
    for kind, name in (("F", "flops_per_token"), ("B", "backward_flops_per_token")):
        total = sum(block.pass_flops_per_token(kind) for block in blocks)
        assert total == pytest.approx(sum(getattr(op, name) for op in listed))
    if lora is not None:
        trained = sum(spec.num_elements for spec in lora_tensors(CONFIG, lora).values())
        assert sum(unit.num_trainable for unit in work.units) == trained


def test_adapters_are_reduced_and_frozen_units_are_not():
    work = model_work(CONFIG, (11,), lora=LoraSpec(rank=3, alpha=4.0))
    program = lower(work, Mesh(shard=2), build("pipeline", "gpipe"), [build("data", "fsdp")])
    reduced = {a.layer for a in program.of(0) if a.operator == "reduce_scatter"}
    gathered = {a.layer for a in program.of(0) if a.operator == "all_gather"}
    assert reduced == {f"model.layers.{at}" for at in range(5)}
    assert gathered == {unit.name for unit in work.units}
