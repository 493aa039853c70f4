"""Schedules that are written down: what they hold, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import assume, given

from phalanx.errors import PlanError
from phalanx.policies.pipeline.listed import Listed
from phalanx.registry import build
from phalanx.schedule_file import as_rows
from tests.order_strategies import Drawn, orders


@given(orders())
def test_any_schedule_survives_being_written_down(drawn: Drawn):
    lists, placement, num_items = drawn
    assume(all(lists))
    listed = Listed(rows=as_rows(lists))
    assert listed.order(len(lists), num_items) == lists
    assert listed.rank_of_stage(len(lists)) == placement
    assert listed.num_stages(len(lists)) == len(placement)
    assert listed.least_items(len(lists)) == num_items


@pytest.mark.parametrize(
    ("rows", "size", "where", "legal"),
    [
        (["0F0,0B0", "1F0,1B0"], (3, 1), "ranks of the pipeline = 3", (2,)),
        (["0F0,0B0", "1F0,1B0"], (2, 4), "micro-batches of a step = 4", (1,)),
        (["0F0,0B0", "1F0,1X0"], (2, 1), "rows[1], cell 1 = '1X0'", ("0F0",)),
        (["0F0,0B0", "1F-1"], (2, 1), "rows[1], cell 0", ("0F0",)),
        (["", " , "], (2, 1), "rows", ()),
    ],
)
def test_other_sizes_and_cells_are_refused(rows, size, where, legal):
    with pytest.raises(PlanError) as caught:
        build("pipeline", {"name": "listed", "rows": rows}).order(*size)
    assert str(caught.value).startswith(where)
    assert caught.value.legal == legal


def test_a_stage_that_no_row_has_is_refused():
    with pytest.raises(PlanError, match="no row has stage 1") as caught:
        Listed(rows=("0F0,0B0", "2F0,2B0")).rank_of_stage(2)
    assert caught.value.code == "order/missing"
