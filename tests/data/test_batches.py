"""Order, steps, dealing to ranks, packing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data import batches
from phalanx.data.samples import Sample, Samples
from phalanx.errors import JobError


def make_samples(lengths, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for key, length in enumerate(lengths):
        counted = np.zeros(length, dtype=bool)
        counted[max(1, length // 2) :] = True
        made.append(Sample(rng.integers(0, 99, length), counted, key))
    return Samples.of(made)


LENGTHS = [5, 17, 2, 9, 30, 11, 3, 3, 28, 14, 7]


@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=40),
    num_ranks=st.integers(1, 5),
    batch=st.integers(1, 150),
    row=st.integers(40, 90),
    seed=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_each_sample_once_an_epoch_on_any_world_size(lengths, num_ranks, batch, row, seed):
    stream = batches.SampleStream(make_samples(lengths), seed)
    seen, start = Counter(), 0
    while start < len(lengths):
        parts = [
            batches.step_batch(
                stream,
                start,
                global_batch_tokens=batch,
                row_tokens=row,
                num_ranks=num_ranks,
                rank=rank,
                counted_weight=1.5,
            )
            for rank in range(num_ranks)
        ]
        assert len({len(part.micro_batches) for part in parts}) == 1
        micro = [each for part in parts for each in part.micro_batches]
        counters = [counter for each in micro for counter in each.samples]
        assert sorted(counters) == list(range(start, parts[0].next_sample))
        assert sum(len(each.targets_N) for each in micro) == parts[0].num_counted_global
        assert all(len(each.tokens_S) <= row for each in micro)
        places = [at for each in micro if each.samples for at in each.global_tokens_S]
        assert sorted(places) == list(range(parts[0].num_tokens_global))
        tokens = sum(len(each.tokens_S) for each in micro if each.samples)
        assert tokens == parts[0].num_tokens_global
        assert tokens <= batch or parts[0].next_sample == start + 1
        seen.update(counters)
        start = parts[0].next_sample
    whole = [stream.index(counter) for counter in range(len(lengths))]
    assert sorted(whole) == list(range(len(lengths)))
    assert set(seen) >= set(range(len(lengths))) and max(seen.values()) == 1


def test_steps_do_not_depend_on_ranks_or_rows():
    stream = batches.SampleStream(make_samples(LENGTHS))
    ends = set()
    for num_ranks, row in ((1, 30), (2, 40), (3, 99)):
        part = batches.step_batch(
            stream, 3, global_batch_tokens=60, row_tokens=row, num_ranks=num_ranks, rank=0
        )
        ends.add((part.next_sample, part.num_counted_global, part.num_tokens_global))
    assert len(ends) == 1


def test_epochs_differ_and_the_order_is_fixed():
    stream = batches.SampleStream(make_samples(LENGTHS), seed=7)
    n = len(LENGTHS)
    orders = [[stream.index(epoch * n + at) for at in range(n)] for epoch in (0, 1)]
    # written down once: a resumed run must meet the same samples with every later version
    assert orders == [[3, 4, 1, 10, 8, 0, 2, 7, 6, 5, 9], [9, 5, 2, 4, 10, 3, 7, 8, 6, 1, 0]]


def test_packed_row_restarts_positions_and_predicts_within_documents():
    samples = make_samples([4, 3, 6])
    stream = batches.SampleStream(samples)
    by_sample = {stream.index(counter): counter for counter in range(3)}
    row = batches.pack(stream, [by_sample[0], by_sample[1], by_sample[2]], [20, 0, 10])
    assert row.document_starts == (0, 4, 7)
    assert row.positions_S.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert row.global_tokens_S.tolist() == [20, 21, 22, 23, 0, 1, 2, 10, 11, 12, 13, 14, 15]
    counted = [2, 3, 5, 6, 10, 11, 12]
    assert (row.counted_N + 1).tolist() == counted
    assert row.targets_N.tolist() == samples.tokens_T[counted].tolist()


def test_filler_completes_a_row_and_teaches_nothing():
    stream = batches.SampleStream(make_samples([4, 3, 6]))
    row = batches.pack(stream, [0, 1, 2], [0, 4, 7])
    full = row.extended(8)
    assert len(full.tokens_S) == 16 and full.tokens_S[:13].tolist() == row.tokens_S.tolist()
    assert full.document_starts == (*row.document_starts, 13)
    assert full.positions_S[13:].tolist() == [0, 1, 2]
    assert full.counted_N.tolist() == row.counted_N.tolist() and full.samples == row.samples
    assert row.extended(13) is row


def test_document_longer_than_a_row_is_refused():
    with pytest.raises(JobError, match="row_tokens = 16: a document has 17 tokens"):
        batches.deal([5, 17], [1.0, 1.0], row_tokens=16, num_ranks=2)


def test_dealing_balances_work():
    rng = np.random.default_rng(3)
    lengths = rng.integers(20, 200, 64).tolist()
    rows = batches.deal(lengths, lengths, row_tokens=1200, num_ranks=4)
    per_rank = [sum(lengths[index] for row in rows[rank::4] for index in row) for rank in range(4)]
    assert max(per_rank) <= 1.05 * sum(lengths) / 4


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    num_ranks=st.integers(1, 3),
    least=st.integers(1, 7),
)
def test_ranks_get_the_rows_that_they_need_at_least_without_losing_a_document(
    lengths, num_ranks, least
):
    sizes = {"row_tokens": 40, "num_ranks": num_ranks}
    rows = batches.deal(lengths, lengths, **sizes, least_rows=least)
    fewest = len(batches.deal(lengths, lengths, **sizes))
    assert len(rows) == max(fewest, least * num_ranks)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    stream = batches.SampleStream(make_samples([max(2, each) for each in lengths]))
    step = batches.step_batch(stream, 0, global_batch_tokens=60, rank=0, **sizes, least_rows=least)
    assert len(step.micro_batches) >= least


def test_no_sample_is_refused():
    with pytest.raises(JobError) as caught:
        batches.SampleStream(make_samples([]))
    assert caught.value.code == "data/empty"


def test_whole_pass_covers_every_sample_once():
    stream = batches.SampleStream(make_samples(LENGTHS))
    parts = [
        batches.whole_pass(stream, len(LENGTHS), row_tokens=50, num_ranks=2, rank=rank)
        for rank in range(2)
    ]
    seen = [c for part in parts for each in part.micro_batches for c in each.samples]
    assert sorted(seen) == list(range(len(LENGTHS)))


def one_by_one(stream, start, num_tokens):
    """Where a step ends, from its definition."""
    counter, total = start, 0
    while True:
        total += stream.length(counter)
        if total > num_tokens and counter > start:
            return counter
        counter += 1
        if total >= num_tokens:
            return counter


@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=12),
    start=st.integers(0, 50),
    num_tokens=st.integers(1, 400),
)
@settings(max_examples=100, deadline=None)
def test_a_step_takes_as_many_as_fit_across_epochs(lengths, start, num_tokens):
    stream = batches.SampleStream(make_samples(lengths))
    end = stream.step_end(start, num_tokens)
    assert end == one_by_one(stream, start, num_tokens)
    counters = range(start, end)
    assert stream.indices(counters).tolist() == [stream.index(at) for at in counters]
    assert stream.lengths(counters).tolist() == [stream.length(at) for at in counters]
    assert stream.counted(counters).tolist() == [stream.num_counted(at) for at in counters]


def run(stream, start, num_steps, num_ranks, **options):
    """Counters of each step on this world, and where the next one starts."""
    steps = []
    for _ in range(num_steps):
        parts = [
            batches.step_batch(stream, start, num_ranks=num_ranks, rank=rank, **options)
            for rank in range(num_ranks)
        ]
        seen = [c for part in parts for each in part.micro_batches for c in each.samples]
        assert len({part.next_sample for part in parts}) == 1
        steps.append(sorted(seen))
        start = parts[0].next_sample
    return steps, start


@given(
    lengths=st.lists(st.integers(2, 40), min_size=2, max_size=25),
    worlds=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=5),
    batch=st.integers(20, 120),
    rows=st.lists(st.integers(40, 90), min_size=5, max_size=5),
    seed=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_a_run_that_changes_its_world_sees_the_samples_of_one_that_does_not(
    lengths, worlds, batch, rows, seed
):
    num_steps = sum(steps for _, steps in worlds)
    stream = batches.SampleStream(make_samples(lengths), seed)
    whole, _ = run(stream, 0, num_steps, 1, global_batch_tokens=batch, row_tokens=90)
    resumed, start = [], 0
    for (num_ranks, steps), row in zip(worlds, rows):
        fresh = batches.SampleStream(make_samples(lengths), seed)  # as a new process has it
        options = {"global_batch_tokens": batch, "row_tokens": row}
        part, start = run(fresh, start, steps, num_ranks, **options)
        resumed += part
    assert resumed == whole
    assert [c for step in resumed for c in step] == list(range(start))


@pytest.mark.parametrize("epochs", [0.3, 1.0, 2.5])
def test_steps_of_epochs_see_every_sample_so_often(epochs):
    stream = batches.SampleStream(make_samples(LENGTHS))
    number = batches.num_steps(stream, epochs, 30)
    steps, end = run(stream, 0, number, 2, global_batch_tokens=30, row_tokens=40)
    wanted = epochs * len(LENGTHS)
    assert steps[-1][0] < wanted <= end
    with pytest.raises(JobError, match="must be above 0"):
        batches.num_steps(stream, 0.0, 30)


def test_very_many_documents_are_dealt_without_looking_at_every_row(monkeypatch):
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(5, 0.8, 3000).astype(int), 8, 1024).tolist()
    work = [n * (1 + 0.5 * (at % 3)) for at, n in enumerate(lengths)]
    by_work = batches.deal(lengths, work, row_tokens=1024, num_ranks=4)
    monkeypatch.setattr(batches, "_MANY", 100)
    many = batches.deal(lengths, work, row_tokens=1024, num_ranks=4)
    for rows in (by_work, many):
        assert sorted(index for row in rows for index in row) == list(range(3000))
        assert max(sum(lengths[index] for index in row) for row in rows) <= 1024
        assert len(rows) <= 1.02 * sum(lengths) / 1024 + 4
        ranks = [sum(work[i] for row in rows[rank::4] for i in row) for rank in range(4)]
        assert max(ranks) < 1.02 * min(ranks)
