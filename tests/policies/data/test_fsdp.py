"""The data policies alone: rules, and what lowering makes of them."""

from __future__ import annotations

from collections import Counter

import pytest

from phalanx.action import Collective
from phalanx.cost import fsdp as formulas
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.policies.data.fsdp import Fsdp
from phalanx.policies.data.replicate import Replicate
from phalanx.policies.pipeline.gpipe import GPipe
from phalanx.registry import build
from phalanx.workload import toy_work

LAYERS = 3


def collectives(specs, mesh, items=(4,)):
    program = lower(toy_work(LAYERS, items), mesh, GPipe(), specs, grain="unit")
    return [action for action in program.of(0) if isinstance(action, Collective)]


@pytest.mark.parametrize("name", ["layers.2", "model.layers.17"])
def test_layers_are_units_under_any_prefix_and_the_rest_is_the_root(name):
    spec = Fsdp()
    assert spec.rule_for(name).reshard
    for rest in ("", "model", "model.embed_tokens", "norm"):
        assert spec.rule_for(rest) == spec.rules()[-1] and not spec.rule_for(rest).reshard


@pytest.mark.parametrize("reshard", [True, False])
def test_lowered_counts_follow_the_formula(reshard):
    found = collectives([Fsdp(reshard_after_forward=reshard)], Mesh(shard=2))
    kinds = Counter(action.collective for action in found)
    expected = formulas.num_collectives(LAYERS, reshard=reshard, num_kept=0)
    assert kinds == Counter({kind: count for kind, count in expected.items() if count})


def test_hybrid_reduces_shards_first_and_replicas_after():
    mesh = Mesh(replicate=2, shard=2)
    found = collectives([Fsdp(), Replicate()], mesh)
    for layer in range(LAYERS):
        of_unit = [a for a in found if a.label.startswith(f"reduce:layers.{layer}")]
        assert [a.collective for a in of_unit] == ["reduce_scatter", "all_reduce"]
        assert of_unit[0].payload_bytes == 2 * of_unit[1].payload_bytes
        assert of_unit[0].label in of_unit[1].after


def test_gradients_travel_once_a_step_unless_every_item_is_reduced():
    def reductions(**options):
        found = collectives([Fsdp(**options)], Mesh(shard=2), (4, 4, 4))
        return sum(action.collective == "reduce_scatter" for action in found)

    assert reductions() == LAYERS and reductions(reduce_every_item=True) == 3 * LAYERS


def test_options_come_from_a_job():
    table = {"name": "fsdp", "reshard_after_forward": False, "units": "*.layers.*", "prefetch": 3}
    spec = build("data", table)
    assert spec == Fsdp(reshard_after_forward=False, units="*.layers.*", prefetch=3)
    assert spec.rule_for("model.layers.0").prefetch == 3
