"""What a new schedule has to show: its order, and a number by hand."""

import pytest

from examples.recipes.schedule.last_in_first_out import LastInFirstOut
from phalanx.check import check_order
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.workload import toy_work
from phalanx.worlds.sim import SimWorld


def test_backward_passes_come_in_reverse_order():
    lists = LastInFirstOut().order(2, 3)
    assert [str(step) for step in lists[1]] == ["1F0", "1F1", "1F2", "1B2", "1B1", "1B0"]
    check_order(lists, 2, 3, (0, 1))


@pytest.mark.parametrize(("num_ranks", "num_items"), [(2, 3), (4, 5), (3, 1)])
def test_step_time_is_that_of_gpipe(num_ranks, num_items):
    mesh = Mesh(pp=num_ranks)
    work = toy_work(num_ranks, (4,) * num_items)
    program = lower(work, mesh, LastInFirstOut(), grain="stage")
    cost = TableCost({"stage.F": 1.0, "stage.B": 2.0, "send": 0.0, "optimizer": 0.0})
    trace = drive(SimWorld(mesh, cost), program=program)
    assert trace.end_s == (num_items + num_ranks - 1) * (1.0 + 2.0)
