"""The layouts of examples/layouts: all are legal, differ in [plan] only, and equal one process."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.job import load_job
from phalanx.mesh import Mesh
from phalanx.models.source import model_source
from phalanx.planner.here import num_ranks_here
from phalanx.planner.training_shape import training_shape

FOLDER = Path(__file__).parent.parent / "examples" / "layouts"
OTHERS = sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != "one")


@pytest.mark.parametrize("name", OTHERS)
def test_a_layout_is_legal_and_changes_nothing_but_the_plan(name):
    job, base = load_job(FOLDER / f"{name}.toml"), load_job(FOLDER / "one.toml")
    assert job.result_key == base.result_key
    num_ranks = num_ranks_here(job)
    assert training_shape(job, model_source(job).config, num_ranks).mesh.size == num_ranks
    text = (FOLDER / f"{name}.toml").read_text()
    (said,) = re.findall(r"\((\d) processes\)", text)
    assert int(said) == num_ranks == Mesh(dict(job.plan.mesh)).size


def test_a_loss_that_is_none_is_never_equal_and_an_unknown_layout_is_told():
    compare = runpy.run_path(str(FOLDER / "compare.py"))
    assert compare["furthest"]([7.0, 6.0], [7.0, 6.5]) == 0.5
    assert compare["furthest"]([7.0, 6.0], [7.0, float("nan")]) == float("inf")
    assert compare["furthest"]([7.0, float("inf")], [7.0, float("inf")]) == float("inf")
    assert compare["main"](["dp-pp"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_losses_of_a_layout_are_those_of_one_process(name):
    command = [sys.executable, str(FOLDER / "compare.py"), name]
    found = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]
    assert f"{name}:" in found.stdout
