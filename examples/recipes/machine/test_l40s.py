"""What a new machine has to show: it reads, and a step on it costs what its rates say."""

from pathlib import Path

import pytest

from phalanx.hardware import Cluster, read_machine
from phalanx.job import load_job
from phalanx.planner import make_plan
from phalanx.planner.simulate import simulate

MACHINE = Path(__file__).with_name("l40s.toml")


def test_every_number_has_a_source_and_a_date():
    machine = read_machine(str(MACHINE))
    assert machine.memory.value == 48e9
    assert all(figure.source and figure.date for figure in machine.figures().values())


def test_a_large_product_takes_flops_over_rate():
    flags = {
        "model.name": "toy",
        "model.layers": "1",
        "model.width": "4096",
        "train.item_tokens": "[4096]",
        "plan.data": "''",
        "plan.mesh": "{pp=1}",
    }
    planned = make_plan(load_job(None, flags), on=str(MACHINE))
    assert planned.cluster == Cluster(read_machine(str(MACHINE)), 1)
    seconds = simulate(planned).trace.where(operator="mlp.F").columns["dur_s"]
    block_flops = 2 * 2 * 4096 * 4 * 4096 * 4096
    assert seconds.tolist() == pytest.approx([block_flops / 362e12 + 5e-6] * 2)
