"""Specs share a mesh: each has an axis of its own."""

import pytest

from phalanx.errors import PlanError
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.registry import build
from phalanx.workload import toy_work


def lowered(mesh: Mesh, *specs):
    return lower(toy_work(4, (3, 5), 8), mesh, build("pipeline", "gpipe"), specs)


@pytest.mark.parametrize(
    ("family", "name"), [("data", "fsdp"), ("data", "replicate"), ("tensor", "megatron")]
)
def test_two_specs_on_one_axis_are_refused(family, name):
    specs = build("data", {"name": "fsdp"}), build(family, {"name": name, "axis": "shard"})
    with pytest.raises(PlanError) as caught:
        lowered(Mesh(shard=2, other=2), *specs)
    assert caught.value.code == "plan/illegal"
    assert caught.value.where == f"policy.{family}.axis" and caught.value.legal == ("other",)


def test_specs_of_one_family_on_axes_of_their_own_compose():
    specs = build("data", "fsdp"), build("data", "replicate")
    used = {a.axis for a in lowered(Mesh(replicate=2, shard=2), *specs).of(0) if hasattr(a, "axis")}
    assert used == {"shard", "replicate"}
