"""Schedules in CSV files: written, read by torch and by us, and refused with row, column, cell."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from phalanx.errors import JobError, PhalanxError
from phalanx.registry import build
from phalanx.schedule_file import (
    as_rows,
    parse_schedule,
    read_schedule,
    with_rows,
    write_schedule,
)
from tests.order_strategies import Drawn, orders

GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
NAMES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipe_v", "hanayo")


def lists_of(name: str, p: int = 2, m: int = 5):
    return build("pipeline", name).order(p, m)


def refused(content: str) -> PhalanxError:
    with pytest.raises(PhalanxError) as caught:
        parse_schedule(content, "s.csv")
    return caught.value


@given(orders())
def test_any_legal_order_is_read_as_it_was_written(drawn: Drawn):
    lists, _, _ = drawn
    assume(all(lists))
    assert parse_schedule("\n".join(as_rows(lists)), "s.csv") == lists


@pytest.mark.parametrize("name", NAMES)
def test_torch_reads_the_file_as_the_same_schedule(tmp_path, name):
    """By the method that its runtime loads a schedule with, its own checks included."""
    order, path = build("pipeline", name), tmp_path / "schedule.csv"
    write_schedule(path, lists_of(name))
    runtime = SimpleNamespace(
        pipeline_order={}, pp_group_size=2, _num_stages=order.num_stages(2), _n_microbatches=5
    )
    runtime._stages = []
    runtime._validate_adjacent_stage_communication = lambda: None
    placed = PipelineScheduleMulti._validate_and_set_stage_mapping
    runtime._validate_and_set_stage_mapping = lambda actions: placed(runtime, actions)
    PipelineScheduleMulti._load_csv(runtime, str(path))
    read = [[str(action) for action in runtime.pipeline_order[rank]] for rank in (0, 1)]
    assert read == [[str(step) for step in steps] for steps in lists_of(name)]
    holders = [runtime.stage_index_to_group_rank[stage] for stage in range(order.num_stages(2))]
    assert tuple(holders) == order.rank_of_stage(2)


def test_idle_cells_and_overlapped_pairs_of_torch_are_read(tmp_path):
    path = tmp_path / "s.csv"
    path.write_text(',0F0, 0F1 ,"(0F2;0B0)OVERLAP_F_B",0B1,,0B2\n1F0,1B0,1F1,1B1,1F2,1B2,\n\n')
    first = read_schedule(path)[0]
    assert [str(step) for step in first] == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (GOOD.replace(",1B0", ""), "order/missing", "s.csv, row 2, column 4 = 1B0: is missing"),
        (
            GOOD.replace("0B1", "0B0"),
            "order/doubled",
            "s.csv, row 1, column 4 = 0B0: comes twice",
        ),
        (
            GOOD.replace("1F1", "1G1"),
            "order/illegal",
            "s.csv, row 2, column 3 = '1G1': is no pass",
        ),
        (GOOD.replace("1F0", "1SEND_B0"), "order/illegal", "save the schedule as compute_only"),
        (
            GOOD.replace("1F1", ",0F1"),
            "order/illegal",
            "s.csv, row 2, column 4 = 0F1: rank 0 holds stage 0",
        ),
        (
            "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
            "check/deadlock",
            "s.csv, row 1, column 2 = 0B0: can never start",
        ),
        (GOOD.replace("1", "2"), "order/missing", "no row has stage 1"),
        ("0F0,0B0\n\n1F0,1B0\n", "order/missing", "s.csv, row 2: every rank has a row"),
        ("", "order/missing", "s.csv: holds no pass"),
        ('0F0,"0B0\n', "order/illegal", "is no CSV"),
    ],
)
def test_what_cannot_run_is_refused_with_its_cell(content, code, says):
    error = refused(content)
    assert error.code == code
    assert says in str(error)


def test_a_missing_pass_is_shown_in_the_grid():
    error = refused("0F0,0B0\n1F0\n")
    assert "rank 1 1F0 [?]" in " ".join(error.detail.split())


@given(st.text(alphabet='0123FBIW,;()\n" _SENDOVRLAP', max_size=60))
def test_any_text_is_read_or_refused(content):
    try:
        lists = parse_schedule(content, "s.csv")
    except PhalanxError as error:
        assert error.code.startswith(("order/", "check/"))
    else:
        assert parse_schedule("\n".join(as_rows(lists)), "s.csv") == lists


def test_a_policys_file_becomes_its_rows(tmp_path):
    write_schedule(tmp_path / "s.csv", lists_of("hanayo"))
    options = with_rows({"name": "listed", "file": "s.csv"}, tmp_path)
    assert build("pipeline", options).order(2, 5) == lists_of("hanayo")
    assert with_rows("1f1b") == "1f1b"
    assert with_rows({"name": "hanayo", "waves": 1}) == {"name": "hanayo", "waves": 1}


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"file": "none.csv"}, "job/not-found"),
        ({"file": 3}, "job/bad-value"),
        ({"file": "s.csv", "rows": ["0F0,0B0"]}, "job/unknown-key"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path, options, code):
    with pytest.raises(JobError) as caught:
        with_rows({"name": "listed"} | options, tmp_path)
    assert caught.value.code == code


def test_a_file_that_cannot_be_written_is_one_clear_error(tmp_path):
    with pytest.raises(JobError) as caught:
        write_schedule(tmp_path / "no" / "s.csv", lists_of("gpipe"))
    assert caught.value.code == "cli/file"


def test_a_file_that_is_no_text_is_one_clear_error(tmp_path):
    (tmp_path / "s.csv").write_bytes(b"\xff\xfe0F0")
    with pytest.raises(JobError) as caught:
        read_schedule(tmp_path / "s.csv")
    assert caught.value.code == "job/not-found"
