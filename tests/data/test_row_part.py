"""Parts of a packed row: between them they hold every token once and score every target once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.batches import MicroBatch
from phalanx.data.row_part import cut_row
from phalanx.layout.token_layout import LAYOUTS, token_layout


@st.composite
def rows(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    starts = tuple(int(end) for end in np.cumsum([0, *lengths[:-1]]))
    tokens_S = np.arange(100, 100 + sum(lengths))
    counted_S = np.array(
        draw(st.lists(st.booleans(), min_size=len(tokens_S), max_size=len(tokens_S)))
    )
    counted_S[list(starts)] = False
    at_N = np.flatnonzero(counted_S)
    offsets = tuple(draw(st.integers(0, 1000)) for _ in lengths)
    return MicroBatch(
        tokens_S, starts, at_N - 1, tokens_S[at_N], tuple(range(len(lengths))), offsets
    )


@settings(max_examples=60, deadline=None)
@given(rows(), st.sampled_from(sorted(LAYOUTS)), st.integers(1, 4))
def test_parts_are_the_row(row, layout, num_ranks):
    row = row.extended(2 * num_ranks)
    bounds = (*row.document_starts, len(row.tokens_S))
    held = token_layout(layout, len(row.tokens_S), num_ranks, bounds).tokens_Nc
    parts = [cut_row(row, tokens) for tokens in held]
    place = np.argsort(np.concatenate(list(held)))
    for name in ("tokens_S", "positions_S", "global_tokens_S"):
        joined = np.concatenate([getattr(part, name) for part in parts])[place]
        assert joined.tolist() == getattr(row, name).tolist(), name
    found = [
        (int(tokens[at]), int(target))
        for tokens, part in zip(held, parts)
        for at, target in zip(part.counted_N, part.targets_N)
    ]
    assert sorted(found) == list(zip(row.counted_N.tolist(), row.targets_N.tolist()))
    assert {part.document_starts for part in parts} == {(0,)}


def test_filler_has_no_place_in_the_step():
    row = MicroBatch(np.arange(5), (0, 3), np.array([0]), np.array([1]), (0, 1), (7, 0))
    assert row.extended(4).global_tokens_S[:5].tolist() == [7, 8, 9, 0, 1]
    assert (row.extended(4).global_tokens_S[5:] < 0).all()
