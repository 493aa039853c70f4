"""Rows of a batch on data ranks: fixed, or documents as training deals them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cost.model_shape import shape_of
from phalanx.data.batches import SampleStream, step_batch
from phalanx.planner.rows import DealtRows, FixedRows, row_limits
from tests.planner.plan_cases import CONFIG, LENGTHS, profile

SHAPE = shape_of(CONFIG)


def dealt(lengths=LENGTHS, times=8, batch=1024, steps=4, **more):
    return DealtRows(profile(lengths, times).samples, SHAPE, batch, steps, **more)


@pytest.mark.parametrize(
    ("least", "share", "fixed", "rows"),
    [
        (512, 4096.0, 0, [512, 1024, 2048, 4096]),
        (512, 700.0, 0, [512, 1024]),
        (512, 100.0, 0, [512]),
        (600, 4096.0, 777, [777]),
        (512, 1e9, 0, [512 * 2**at for at in range(8)]),
    ],
)
def test_rows_are_doubled_up_to_a_rank_s_share(least, share, fixed, rows):
    assert row_limits(least, share, fixed) == rows


@given(seq=st.integers(1, 100_000), rows=st.integers(1, 200), ranks=st.integers(1, 40))
def test_fixed_rows_compute_a_rank_s_share_in_every_way(seq, rows, ranks):
    rows *= ranks
    ways = FixedRows(seq, rows).options(ranks)
    assert ways["micro_rows"][0] == 1
    for count, micro in zip(ways["micro_rows"], ways["num_micro"]):
        assert count * micro * ranks == rows and (count == 1 or count * seq <= 65_536)
    assert len({len(column) for column in ways.values()}) == 1


def test_a_micro_batch_that_the_job_names_is_kept():
    ways = FixedRows(1000, 12, 3000).options(2)
    assert ways["micro_rows"] == [3] and ways["num_micro"] == [2]
    assert FixedRows(1000, 12, 5000).options(2)["micro_rows"] == []


@settings(max_examples=15, deadline=None)
@given(ranks=st.sampled_from([1, 2, 3, 4, 7]), seed=st.integers(0, 5))
def test_dealt_rows_are_those_that_training_computes(ranks, seed):
    """The first step, row for row."""
    rows = dealt(steps=1, seed=seed)
    ways = rows.options(ranks)
    stream = SampleStream(rows.samples, seed)
    weight = SHAPE.head_flops_per_token / SHAPE.product_flops_per_token
    for at, limit in enumerate(ways["row_limit"]):
        steps = [
            step_batch(
                stream, 0, global_batch_tokens=1024, row_tokens=limit, num_ranks=ranks,
                rank=rank, counted_weight=weight,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        found = [len(micro.tokens_S) for step in steps for micro in step.micro_batches]
        assert ways["num_micro"][at] == len(found) / ranks
        assert ways["row_tokens"][at] == pytest.approx(np.mean(found))
        assert ways["longest_tokens"][at] == max(found) <= limit
        assert ways["imbalance"][at] >= 1.0
    lengths = np.array(LENGTHS, dtype=float)
    assert ways["document_tokens"][0] == pytest.approx((lengths**2).sum() / lengths.sum())
    assert ways["counted_frac"][0] == pytest.approx(0.5, abs=0.01)


def test_equal_documents_balance_and_one_long_one_does_not():
    even = dealt((64,), times=64, batch=1024, steps=1).options(4)
    assert max(even["imbalance"]) == pytest.approx(1.0)
    uneven = dealt((900, 20, 20, 20, 20, 20), times=1, batch=1000, steps=1).options(2)
    assert max(uneven["imbalance"]) > 1.7  # one rank has nine tenths of the tokens


def test_work_counts_attention_over_long_documents():
    """Two ranks of equal tokens: one document of 1,024, and sixteen of 64."""
    rows = dealt((1024, *[64] * 16), times=1, batch=2048, steps=1, row_tokens=1024)
    (imbalance,) = rows.options(2)["imbalance"]
    flops = [SHAPE.attention_flops(n, n / 2, n) for n in (1024, 64)]
    products = 1024 * SHAPE.product_flops_per_token + 512 * SHAPE.head_flops_per_token
    heavy, light = products + flops[0], products + 16 * flops[1]
    assert imbalance == pytest.approx(2 * heavy / (heavy + light), rel=0.01)


def test_ranks_are_dealt_once(monkeypatch):
    from phalanx.planner import rows as module

    calls = []
    whole = module.deal_steps
    monkeypatch.setattr(
        module, "deal_steps", lambda *args, **named: calls.append(1) or whole(*args, **named)
    )
    rows = dealt()
    first = rows.options(2)
    count = len(calls)
    assert rows.options(2) == first and len(calls) == count == len(first["row_limit"])
