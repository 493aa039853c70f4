"""ZeRO stages 1 and 2 alone: what they refuse, and what they send."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.action import Collective
from phalanx.cost.collectives import wire_bytes
from phalanx.errors import PlanError
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.policies.data.fsdp import Fsdp
from phalanx.policies.data.replicate import Replicate
from phalanx.policies.data.zero import Zero
from phalanx.policies.pipeline.gpipe import GPipe
from phalanx.policy import Spec
from phalanx.registry import build
from phalanx.workload import Block, Module, StepWork, Unit

LAYERS = 3


def work(rows: int, num_items: int) -> StepWork:
    """Units of `2 * rows` x 4 weights."""
    shapes = (Module("up", (rows, 4)), Module("down", (rows, 4)))
    names = [f"layers.{at}" for at in range(LAYERS)]
    units = [Unit(name=n, blocks=(Block(name=n, op="layer", modules=shapes),)) for n in names]
    return StepWork(units=tuple(units), item_tokens=(3,) * num_items, param_bytes=2, grad_bytes=2)


def sent_bytes(spec: Spec, degree: int, num_items: int = 1) -> float:
    """What a rank sends in a step, of a model whose dims the degree divides."""
    mesh = Mesh({spec.axis: degree})
    program = lower(work(degree, num_items), mesh, GPipe(), [spec], grain="unit")
    exchanged = (action for action in program.of(0) if isinstance(action, Collective))
    return sum(wire_bytes(a.collective, a.payload_bytes, degree) for a in exchanged)


@settings(max_examples=20, deadline=None)
@given(degree=st.integers(2, 64))
def test_volumes_are_2_2_and_3_psi(degree):
    """Section 7 of the paper: stages 1 and 2 send what plain data parallelism does, stage 3 1.5
    times as much, here with a finite number of ranks."""
    psi_bytes = LAYERS * 2 * degree * 4 * 2
    once = psi_bytes * (degree - 1) / degree
    volumes = [sent_bytes(spec, degree) for spec in (Replicate(), Zero(), Zero(stage=2), Fsdp())]
    assert volumes == pytest.approx([2 * once, 2 * once, 2 * once, 3 * once])


@pytest.mark.parametrize(("stage", "reductions"), [(1, 1), (2, 5)])
def test_gradients_travel_once_or_with_every_micro_batch_and_weights_once(stage, reductions):
    once = sent_bytes(Zero(), 4) / 2
    assert sent_bytes(Zero(stage=stage), 4, num_items=5) == (reductions + 1) * once


def test_a_rank_keeps_whole_weights_and_its_part_of_the_rest():
    program = lower(work(4, 1), Mesh(shard=4), GPipe(), [Zero()], grain="unit")
    whole = LAYERS * 2 * 4 * 4
    assert program.notes["local_params"] == (whole,)
    assert program.notes["local_trainable"] == (whole // 4,)


@pytest.mark.parametrize("stage", [0, 3])
def test_other_stages_are_other_policies(stage):
    with pytest.raises(PlanError, match="fsdp shards them") as caught:
        Zero(stage=stage)
    assert caught.value.code == "plan/illegal" and caught.value.legal == (1, 2)


def test_options_come_from_a_job():
    spec = build("data", {"name": "zero", "stage": 2, "axis": "replicate"})
    assert spec == Zero(stage=2, axis="replicate")
    assert spec.rule_for("model.layers.3").placement == spec.rule_for("").placement == "update"
