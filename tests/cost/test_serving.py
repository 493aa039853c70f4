"""Laws of the prices of engine steps."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.action import Collective, Compute, Send
from phalanx.cost.serving import EngineCost, ServeRates, windows_of
from phalanx.errors import JobError, WorldError
from phalanx.models.spec import kv_bytes, kv_token_bytes, small_config
from phalanx.policies.serve import BatchPlan

RATES = ServeRates(
    layers_s=[(1, 0.010), (16, 0.013), (128, 0.041)],
    head_s=[(1, 0.005), (16, 0.008)],
    kv_token_s=1e-6,
    pair_s=1e-8,
    windows=[(100, 0.75), (0, 0.25)],
)


def plan_of(*rows: tuple[int, int, int]) -> BatchPlan:
    requests, query, kv = zip(*rows)
    nothing = (0,) * len(rows)
    return BatchPlan(requests, query, kv, nothing, nothing, nothing)


@pytest.mark.parametrize(
    ("num_decode", "kv_tokens", "num_prompt", "expected_s"),
    [
        (0, 0, 0, 0.0),
        (1, 0, 0, 0.015),
        (16, 5000, 0, 0.013 + 0.008 + 0.005),
        (6, 0, 0, 0.011 + 0.006),  # a third of the way
        (0, 0, 72, 0.027 + 0.005),  # half of the way, one row of the head
        (15, 0, 1, 0.013 + 0.008),  # rows share the layers' products
        (28, 0, 100, 0.041 + 0.008 + 13 * 0.0002),  # the head's last slope goes on
        (0, 0, 184, 0.041 + 56 * 0.00025 + 0.005),
    ],
)
def test_steps_worked_out_by_hand(num_decode, kv_tokens, num_prompt, expected_s):
    assert RATES.step_s(num_decode, kv_tokens, num_prompt) == pytest.approx(expected_s, rel=1e-12)


def test_a_batch_is_priced_row_by_row():
    prompt_lens = {1: 50, 2: 300, 3: 40, 4: 9}
    plan = plan_of((1, 1, 50), (2, 30, 200), (3, 40, 0), (4, 1, 7))
    read = 0.75 * 51 + 0.25 * 51
    pairs = 30 * (0.75 * 100 + 0.25 * 200) + 7
    # one row decodes; request 3 ends its prompt, request 4 computes one token in the middle of its
    expected_s = RATES.step_s(1, read, 71, num_pairs=pairs, num_ended=1)
    assert RATES.batch_s(plan, prompt_lens) == pytest.approx(expected_s, rel=1e-12)


def test_a_prompt_in_chunks_runs_the_head_once_and_reads_what_came_before():
    layers_s = 0.041 + 0.041 + RATES.step_s(0, 0, 44, num_ended=0)
    pairs = 128 * (75 + 32) + 44 * (75 + 64)
    expected_s = layers_s + 0.005 + pairs * 1e-8
    assert RATES.prompt_s(300, 128) == pytest.approx(expected_s, rel=1e-12)
    assert RATES.prompt_s(1, 1) == RATES.step_s(0, 0, 1)
    assert RATES.decode_s(4, 200) == RATES.step_s(4, 4 * RATES.read_tokens(200), 0)


@given(
    decode=st.integers(0, 300),
    prompt=st.integers(0, 700),
    kv=st.integers(0, 100_000),
    more=st.integers(1, 50),
)
def test_more_work_never_takes_less(decode, prompt, kv, more):
    least = RATES.step_s(decode, kv, prompt)
    assert RATES.step_s(decode + more, kv, prompt) >= least
    assert RATES.step_s(decode, kv + more, prompt) >= least
    assert RATES.step_s(decode, kv, prompt + more) >= least


@pytest.mark.parametrize("length", [1, 20, 21, 22, 300])
def test_tokens_read_are_the_cached_bytes_of_a_hybrid_model_over_those_of_a_token(length):
    config = small_config(
        vocab_size=101,
        hidden_size=48,
        intermediate_size=80,
        num_layers=5,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        window=21,
        full_every=3,
    )
    windows = windows_of(config)
    assert sum(share for _, share in windows) == pytest.approx(1.0, abs=1e-15)
    rates = ServeRates(layers_s=[(1, 1)], head_s=[(1, 1)], kv_token_s=0, pair_s=0, windows=windows)
    expected = kv_bytes(config, length) / kv_token_bytes(config)
    assert rates.read_tokens(length) == pytest.approx(expected, rel=1e-14)


def test_rates_survive_json():
    assert ServeRates.from_dict(json.loads(json.dumps(RATES.to_dict()))) == RATES


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers_s": []},
        {"layers_s": [(4, 1.0), (4, 2.0)]},
        {"head_s": [(2, 1.0), (1, 2.0)]},
        {"head_s": [(0, 1.0)]},
        {"kv_token_s": -1e-9},
        {"layers_s": [(1, -0.1)]},
    ],
)
def test_rates_that_are_none_are_refused(wrong):
    with pytest.raises(JobError, match="rates"):
        ServeRates.from_dict(RATES.to_dict() | wrong)


def test_an_engine_has_prices_of_its_steps_only():
    cost = EngineCost(lambda batch: float(batch.num_tokens), overhead_s=0.5)
    assert cost.compute_s(Compute(op="engine.step", batch=plan_of((0, 7, 0))), 0) == 7.5
    with pytest.raises(
        WorldError, match=r"prices of steps only; nearest legal values: engine.step"
    ):
        cost.compute_s(Compute(op="mlp.F"), 0)
    with pytest.raises(WorldError, match="prices of steps only"):
        cost.collective_s(Collective(collective="all_reduce", axis="tp"), [0])
    with pytest.raises(WorldError, match="prices of steps only"):
        cost.transfer_s(Send(axis="tp", peer=1, tensor="x"), 0, 1)
