"""Pictures of a simulated step show what its trace says."""

from __future__ import annotations

import pytest

from phalanx.cli.app import run
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.errors import JobError
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.planner.order_picture import draw_order, order_spans, order_text
from phalanx.planner.step_picture import _shades, draw_step, pass_spans, timeline_text
from phalanx.policies.pipeline.one_f_one_b import OneFOneB
from phalanx.registry import build
from phalanx.schedule_file import read_schedule
from phalanx.workload import toy_work
from phalanx.worlds.sim import SimWorld

COST = TableCost({"stage.F": 1.0, "stage.B": 2.0, "send": 0.0, "optimizer": 1.0})


def spans_of(mesh: Mesh, num_items: int, fold: bool = False):
    work = toy_work(mesh.degree("pp"), [1] * num_items)
    world = SimWorld(mesh, COST, fold=fold)
    trace = drive(world, program=lower(work, mesh, OneFOneB(), grain="stage"))
    return pass_spans(trace, mesh)


def test_the_timeline_of_1f1b_is_the_one_of_its_paper():
    """Two ranks, three micro-batches, a backward pass twice as long: 12 s and the optimizer."""
    text = timeline_text(spans_of(Mesh(pp=2), 3), width=13).splitlines()
    assert text[0].split() == ["rank", "0", "01..aa2bb.ccO"]
    assert text[1].split() == ["rank", "1", ".0aa1bb2ccO.."]
    assert "13 s" in text[2]


def test_one_rank_stands_for_each_place_of_the_pipeline():
    alone = spans_of(Mesh(pp=3), 2)
    many = spans_of(Mesh(replicate=40, pp=3), 2, fold=True)
    assert many == alone
    assert {span.place for span in many} == {0, 1, 2}


def test_a_mesh_without_a_pipeline_is_one_row():
    assert {span.place for span in spans_of(Mesh(shard=4), 2)} == {0}


def test_nothing_simulated_is_nothing_drawn():
    assert timeline_text([]) == ""


def test_long_pipelines_say_what_they_leave_out():
    text = timeline_text(spans_of(Mesh(pp=5), 1), most_places=3)
    assert "(2 more ranks not shown)" in text


@pytest.mark.parametrize(("ending", "head"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_ending_says_in_which_form_the_picture_is(tmp_path, ending, head):
    path = tmp_path / f"step.{ending}"
    draw_step(spans_of(Mesh(pp=2), 2), "two ranks", str(path))
    assert path.read_bytes().startswith(head)


@pytest.mark.parametrize("name", ["step.docx", "no/such/folder/step.png"])
def test_a_picture_that_cannot_be_written_is_one_clear_error(tmp_path, name):
    with pytest.raises(JobError) as caught:
        draw_step(spans_of(Mesh(pp=2), 1), "", str(tmp_path / name))
    assert caught.value.code == "cli/file"


def test_the_verb_prints_the_timeline_and_writes_the_picture(tmp_path, capsys):
    path = tmp_path / "step.svg"
    interleaved = "{name='interleaved', virtual=2}"
    arguments = ["--plan.pipeline", interleaved, "--picture", str(path)]
    assert run(["simulate", "examples/toy-4d.toml", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "0-9 forward, a-z backward" in shown and "rank 1   ." in shown
    timeline = [line for line in shown.splitlines() if line.startswith(("rank ", "         0 s"))]
    assert timeline and max(map(len, timeline)) <= 100
    assert path.stat().st_size > 1000


def test_a_schedule_is_drawn_before_any_job(tmp_path):
    """ZB-H1 on two ranks: weight gradients are capitals and fill the wait of 1F1B."""
    order = build("pipeline", "zero_bubble")
    text = order_text(order, 2, 3, width=20).splitlines()
    assert text[0].split() == ["rank", "0", "0011..aaAA22bbBBccCC"]
    assert text[1].split() == ["rank", "1", "..00aa11bbAA22ccBBCC"]
    assert "A-Z weight gradient" in text[2]
    for name in ("zbv", "dualpipe_v", {"name": "hanayo", "waves": 2}):
        path = tmp_path / "order.svg"
        draw_order(build("pipeline", name), 2, 4, str(path))
        assert path.read_bytes().startswith(b"<?xml")


def test_later_chunks_of_a_rank_are_darker():
    spans = order_spans(build("pipeline", "zbv"), 2, 3)
    shades = dict(zip([span.name for span in spans if span.place == 0],
                      _shades([span for span in spans if span.place == 0])))  # fmt: skip
    assert sum(shades["3F0"]) < sum(shades["0F0"]), "the rank's last chunk, the rank's first"


def test_the_verb_writes_the_schedule_as_it_is_read_back(tmp_path):
    path = tmp_path / "schedule.csv"
    waves = "{name='hanayo', waves=1}"
    assert run(["simulate", "examples/toy-4d.toml", "--plan.pipeline", waves,
                "--schedule", str(path)]) == 0  # fmt: skip
    lists = read_schedule(path)
    assert lists == build("pipeline", {"name": "hanayo", "waves": 1}).order(2, len(lists[0]) // 4)
    listed = f"{{name='listed', file='{path}'}}"
    assert run(["simulate", "examples/toy-4d.toml", "--plan.pipeline", listed]) == 0
