"""What a new sync rule has to show: when it exchanges, how much, and what it costs in time."""

from examples.recipes.sync.local_sgd import LocalSgd
from phalanx.action import Compute, Program
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.mesh import Mesh
from phalanx.worlds.sim import SimWorld


def test_islands_meet_every_period_steps_and_wait_for_it():
    mesh = Mesh(island=3)
    cost = TableCost({"inner": 1.0, "all_reduce": 0.5, "weights.divide": 0.0})
    world = SimWorld(mesh, cost, facts={"model_bytes": 400.0})
    step = Program.alike(mesh, [Compute(op="inner")])
    trace = drive(world, program=step, num_steps=6, reacts=[LocalSgd(period=3)])
    means = trace.where(rank=1, operator="all_reduce")
    assert means.columns["start_s"].tolist() == [3.0, 6.5]
    assert means.columns["payload_bytes"].tolist() == [400.0, 400.0]
    assert trace.end_s == 6 * 1.0 + 2 * 0.5
