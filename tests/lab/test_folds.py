"""Cross-validation never shows a fit a part of what it is judged by."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from phalanx.lab.folds import folds


@dataclass(frozen=True)
class Row:
    group: str
    at: int


GROUPS = st.lists(st.text("abcdefg", min_size=1, max_size=2), max_size=60)


@given(GROUPS, st.integers(2, 6))
def test_every_row_is_judged_once_by_a_fit_that_saw_nothing_of_its_group(names, count):
    rows = [Row(name, at) for at, name in enumerate(names)]
    made = folds(rows, count)
    assert sorted(row.at for _, judged in made for row in judged) == list(range(len(rows)))
    for fitted, judged in made:
        assert not {row.group for row in fitted} & {row.group for row in judged}
        assert len(fitted) + len(judged) == len(rows)


@given(GROUPS)
def test_folds_do_not_depend_on_the_order_of_rows(names):
    rows = [Row(name, at) for at, name in enumerate(names)]
    one, other = folds(rows), folds(rows[::-1])
    assert [{r.group for r in judged} for _, judged in one] == [
        {r.group for r in judged} for _, judged in other
    ]


def test_no_fold_is_larger_than_its_share_and_the_largest_group():
    rows = [Row(f"g{n}", k) for n in range(30) for k in range(n % 7 + 1)]
    sizes = [len(judged) for _, judged in folds(rows)]
    assert max(sizes) <= len(rows) / 5 + 7
