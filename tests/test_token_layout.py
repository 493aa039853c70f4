"""Layouts of tokens: a permutation, equal shares, and the pairs that each rank computes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import JobError, PlanError
from phalanx.layout.context_part import ContextPart, key_copies, require_head_split
from phalanx.layout.token_layout import LAYOUTS, KeysSeen, pairs_NN, token_layout


@st.composite
def rows(draw):
    """(layout name, tokens, ranks, bounds of documents, window)."""
    num_ranks = draw(st.integers(1, 5))
    num_tokens = 2 * num_ranks * draw(st.integers(1, 12))
    inner = draw(st.sets(st.integers(1, num_tokens - 1), max_size=6))
    window = draw(st.none() | st.integers(1, num_tokens + 2))
    return (
        draw(st.sampled_from(list(LAYOUTS))),
        num_tokens,
        num_ranks,
        (0, *sorted(inner), num_tokens),
        window,
    )


def dense_seen(queries, keys, bounds, window):
    """The definition, pair by pair."""
    document = np.searchsorted(bounds, np.arange(bounds[-1]), side="right")
    behind = queries[:, None] - keys[None]
    seen = (behind >= 0) & (document[queries][:, None] == document[keys][None])
    return seen if window is None else seen & (behind < window)


@given(rows())
@settings(max_examples=150)
def test_every_token_has_one_holder_and_ranks_hold_equally_many(row):
    name, num_tokens, num_ranks, bounds, _ = row
    layout = token_layout(name, num_tokens, num_ranks, bounds)
    assert sorted(layout.permutation_S) == list(range(num_tokens))
    assert (np.diff(layout.tokens_Nc, axis=1) > 0).all()
    x_S = np.random.default_rng(0).random(num_tokens)
    assert (x_S[layout.permutation_S][layout.inverse_S] == x_S).all()


@given(rows())
@settings(max_examples=150)
def test_two_numbers_a_query_are_the_mask_between_any_two_ranks(row):
    name, num_tokens, num_ranks, bounds, window = row
    layout = token_layout(name, num_tokens, num_ranks, bounds)
    for mine in layout.tokens_Nc:
        for theirs in (*layout.tokens_Nc, np.arange(num_tokens)):
            seen = KeysSeen.between(mine, theirs, bounds, window)
            key_T = np.arange(len(theirs))
            found = (key_T >= seen.first_Q[:, None]) & (key_T < seen.last_Q[:, None])
            expected = dense_seen(mine, theirs, bounds, window)
            assert (found == expected).all()
            assert (np.diff(seen.first_Q) >= 0).all() and (np.diff(seen.last_Q) >= 0).all()
            held = np.flatnonzero(expected.any(axis=0))
            assert seen.span == (range(held[0], held[-1] + 1) if len(held) else range(0))
            assert seen.num_pairs == expected.sum()


def pairs_of_ranks(name, num_tokens, num_ranks, bounds=None):
    return pairs_NN(token_layout(name, num_tokens, num_ranks, bounds), bounds).sum(axis=1)


def test_pair_counts_of_512_tokens_on_4_ranks():
    """Striped Attention, section 3; the head-tail layout of Llama 3 is exact."""
    assert list(pairs_of_ranks("striped", 512, 4)) == [32640, 32768, 32896, 33024]
    assert list(pairs_of_ranks("head_tail", 512, 4)) == [32832] * 4
    contiguous = pairs_of_ranks("contiguous", 512, 4)
    assert (contiguous[0], contiguous[-1]) == (8256, 57408)


@pytest.mark.parametrize(("num_ranks", "length"), [(2, 6), (3, 5), (4, 128), (8, 20)])
def test_pairs_of_a_round_follow_the_closed_forms(num_ranks, length):
    c = length
    rounds = pairs_NN(token_layout("striped", num_ranks * c, num_ranks))
    for j in range(num_ranks):
        for k in range(num_ranks):
            assert rounds[j, k] == (c * (c + 1) // 2 if j >= k else c * (c - 1) // 2)
        assert rounds[j].sum() == num_ranks * c * c / 2 + (2 * j + 2 - num_ranks) * c / 2
    if c % 2 == 0:
        rounds = pairs_NN(token_layout("head_tail", num_ranks * c, num_ranks))
        own = np.eye(num_ranks, dtype=bool)
        assert (rounds[own] == c * (c + 1) // 2).all() and (rounds[~own] == c * c // 2).all()


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_balanced_ring_is_faster_by_ranks_less_half_over_half_the_ranks(num_ranks):
    """In every round the slowest rank counts: N - 1/2 blocks against N / 2."""
    c = 1024

    def slowest(name):
        pairs = pairs_NN(token_layout(name, num_ranks * c, num_ranks))
        origins = (np.arange(num_ranks)[:, None] - np.arange(num_ranks)) % num_ranks
        return np.take_along_axis(pairs, origins, axis=1).max(axis=0).sum()

    expected = (num_ranks - 0.5) / (num_ranks / 2)
    assert slowest("contiguous") / slowest("head_tail") == pytest.approx(expected, abs=0.002)
    assert slowest("contiguous") / slowest("striped") == pytest.approx(expected, abs=0.002)


def test_documents_of_4_and_12_tokens_are_balanced_where_each_is_cut():
    """torch's own layout for documents gives 26 and 62 pairs here."""
    bounds = (0, 4, 16)
    assert list(pairs_of_ranks("per_document", 16, 2, bounds)) == [44, 44]
    assert max(pairs_of_ranks("head_tail", 16, 2, bounds)) > 44


def exponential_documents(num_tokens, mean, seed):
    lengths = np.random.default_rng(seed).exponential(mean, 4 * num_tokens // mean)
    ends = np.cumsum(np.maximum(1, lengths.astype(int)))
    return (0, *ends[ends < num_tokens].tolist(), num_tokens)


@pytest.mark.parametrize(("num_ranks", "imbalance"), [(4, 1.24), (16, 2.0)])
def test_short_documents_unbalance_head_tail_and_balanced_repairs_it(num_ranks, imbalance):
    """Llama 3, section 7: documents of 1K tokens on average in a row of 131,072."""
    worst = {name: [] for name in ("head_tail", "balanced", "per_document")}
    for seed in range(40):
        bounds = exponential_documents(131_072, 1024, seed)
        starts = np.repeat(bounds[:-1], np.diff(bounds))
        pairs_S = np.arange(131_072) - starts + 1
        for name, found in worst.items():
            layout = token_layout(name, 131_072, num_ranks, bounds)
            work = pairs_S[layout.tokens_Nc].sum(axis=1)
            found.append(work.max() / work.mean())
    assert np.mean(worst["head_tail"]) == pytest.approx(imbalance, abs=0.1)
    assert max(worst["balanced"]) < 1.03
    assert max(worst["per_document"]) < 1.002


@given(st.integers(1, 8), st.integers(1, 500), st.integers(0, 5))
@settings(max_examples=50)
def test_balanced_deals_few_long_stretches_however_odd_the_length(num_ranks, length, seed):
    """Kernels take stretches: a prime number of tokens a rank is no reason for one of a token."""
    num_tokens = num_ranks * length
    inner = np.random.default_rng(seed).integers(1, num_tokens + 1, 4)
    layout = token_layout(
        "balanced", num_tokens, num_ranks, tuple(sorted({0, *inner.tolist(), num_tokens}))
    )
    for tokens in layout.tokens_Nc:
        assert (np.diff(tokens) > 1).sum() < 16


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 12))
def test_key_heads_are_sent_so_that_each_rank_has_those_of_its_queries(per_key, num_kv, num_ranks):
    num_heads = per_key * num_kv
    if num_heads % num_ranks:
        return
    copies = key_copies(num_kv, num_ranks)
    sent = np.repeat(np.arange(num_kv), copies).reshape(num_ranks, -1)
    queries = np.arange(num_heads).reshape(num_ranks, -1)
    for of_rank, heads in zip(queries, sent):
        met = np.repeat(heads, len(of_rank) // len(heads))
        assert (met == of_rank // per_key).all()


@given(rows(), st.integers(1, 3))
@settings(max_examples=50)
def test_a_ring_of_groups_holds_what_a_ring_of_ranks_holds(row, size):
    name, num_tokens, num_ranks, bounds, _ = row
    layout = token_layout(name, num_tokens * size, num_ranks, (*bounds[:-1], num_tokens * size))
    divided = layout.divided(size)
    assert divided.num_ranks == num_ranks * size
    assert (divided.joined(size).tokens_Nc == layout.tokens_Nc).all()
    tokens = divided.tokens_Nc[:size].reshape(-1)
    part = ContextPart(divided, 0, bounds)
    assert (tokens[part.order(size)] == part.outer(size).tokens_c).all()


@pytest.mark.parametrize(
    ("name", "num_tokens", "legal"),
    [("head_tail", 1020, (1016, 1024)), ("striped", 1022, (1024, 1020)), ("contiguous", 3, (4,))],
)
def test_rows_that_cannot_be_shared_equally_name_the_nearest_lengths(name, num_tokens, legal):
    with pytest.raises(PlanError) as caught:
        token_layout(name, num_tokens, 4)
    assert caught.value.code == "layout/divide" and caught.value.legal == legal


def test_an_unknown_layout_names_the_known_ones():
    with pytest.raises(JobError) as caught:
        token_layout("head_tial", 16, 2)
    assert caught.value.legal == ("head_tail",)


@pytest.mark.parametrize(
    ("heads", "num_ranks", "legal"),
    [
        ((8, 2), 4, None),
        ((8, 8), 8, None),
        ((8, 2), 1, None),
        ((7, 7), 4, (1, 7)),
        ((8, 2), 16, (8, 4)),
        ((7, 7), 8, (7, 1)),
        ((40, 10), 4, None),
        ((6, 3), 2, None),
        ((6, 2), 3, None),
    ],
)
def test_heads_are_shared_whole_or_refused(heads, num_ranks, legal):
    if legal is None:
        require_head_split(*heads, num_ranks, "plan.context.inner")
        return
    with pytest.raises(PlanError) as caught:
        require_head_split(*heads, num_ranks, "plan.context.inner")
    assert caught.value.code == "layout/divide" and set(caught.value.legal) == set(legal)
