"""Laws of the choice of a token."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.drive import drive
from phalanx.engines.serve.draws import best_of, nucleus, uniform
from phalanx.engines.serve.sampling import _from_logits, choose, score
from phalanx.engines.serve.settings import Request, Sampling
from phalanx.engines.serve.world import EngineWorld
from phalanx.policies.serve.continuous import Continuous
from tests.engines.serve_cases import CONFIG, ScriptedInbox, make_engine, prompt_of, request
from tests.engines.serve_head import Head, logit, rows_of

NUM_DRAWS = 10_000
# 99.9 % of the chi-square distribution, by degrees of freedom
CHI2 = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5}


def draws(logits: list[float], sampling: Sampling, num: int = NUM_DRAWS) -> Counter[int]:
    rows = torch.tensor(logits).expand(num, -1)
    return Counter(token for token, _ in choose(Head(len(logits)), rows, rows_of(sampling, num)))


def kept(logits: list[float], asked: Sampling) -> dict[int, float]:
    """Token -> probability, written down as the parameters are defined; in falling order."""
    heat = float(np.float32(asked.temperature))
    weights = {t: math.exp((x - max(logits)) / heat) for t, x in enumerate(logits)}
    order = sorted(weights, key=lambda t: (-logits[t], t))
    order = [t for t in order if weights[t] >= asked.min_p]
    order = order[: asked.top_k or None]
    total, before, inside = sum(weights[t] for t in order), 0.0, []
    for token in order:
        if before < asked.top_p * total or not inside:
            inside.append(token)
        before += weights[token]
    total = sum(weights[t] for t in inside)
    return {t: weights[t] / total for t in inside}


# ---- distributions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"min_p": 0.1},
        {"top_p": 0.9},
        {"top_k": 4, "top_p": 0.8, "min_p": 0.01, "temperature": 1.5},
    ],
)
def test_draws_follow_the_probabilities_that_the_cuts_leave(options):
    logits = [0.0, 1.0, -1.0, 2.0, -math.inf]
    asked = Sampling(max_new=1, seed=3, **{"temperature": 1.0} | options)
    want = {token: p for token, p in kept(logits, asked).items() if p > 0}
    counts = draws(logits, asked)
    assert set(counts) == set(want)
    chi2 = sum((counts[t] - NUM_DRAWS * p) ** 2 / (NUM_DRAWS * p) for t, p in want.items())
    assert chi2 < CHI2[max(1, len(want) - 1)]


def test_top_p_keeps_the_smallest_sufficient_set():
    logits = torch.tensor([0.5, 0.2, 0.2, 0.1]).log().tolist()
    for top_p, inside in (
        (0.0, {0}),
        (0.45, {0}),
        (0.6, {0, 1}),
        (0.89, {0, 1, 2}),
        (0.95, {0, 1, 2, 3}),
    ):
        counts = draws(logits, Sampling(max_new=1, temperature=1.0, top_p=top_p, seed=1), 800)
        assert set(counts) == inside
    counts = draws(logits, Sampling(max_new=1, temperature=1.0, top_p=0.6, seed=2))
    assert counts[0] / NUM_DRAWS == pytest.approx(5 / 7, abs=0.02)


def test_a_flat_distribution_needs_more_candidates_than_the_first_ones():
    size, num = 3000, 300
    logits = torch.zeros(size)
    logits[7] = 0.1
    for options, most in (({"top_p": 0.9}, 2700), ({"top_k": 500}, 500), ({"min_p": 0.5}, size)):
        asked = Sampling(max_new=1, temperature=1.0, **options)
        chosen = choose(Head(size), logits.expand(num, -1), rows_of(asked, num))
        tokens = {token for token, _ in chosen}
        assert max(tokens) < most + 2  # equal ones: the lowest ids are inside
        expected = most * (1 - (1 - 1 / most) ** num)
        assert abs(len(tokens) - expected) < 30


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    logits=st.lists(logit, min_size=2, max_size=150),
    temperature=st.floats(0.3, 3),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 160),
    min_p=st.just(0.0) | st.floats(0, 1),
    seed=st.integers(-(2**63) + 1, 2**63 - 1),
)
def test_a_draw_is_the_definition_on_every_path(logits, temperature, top_p, top_k, min_p, seed):
    asked = Sampling(
        max_new=1, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed
    )
    want = kept(logits, asked)
    rows = torch.tensor([logits])
    one = Request(0, [1], 1, asked)
    ((alone, _),) = choose(Head(len(logits)), rows, [one])
    assert [alone] == _from_logits(rows, [one])
    assert alone in want
    if top_k or min_p or top_p < 1:  # in falling order; else in that of the vocabulary
        below, draw = 0.0, uniform(seed, 1)
        for token, p in want.items():
            if token == alone:
                assert below - 1e-6 <= draw < below + p + 1e-6
            below += p


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 5000),
    steps=st.sampled_from([1, 7, 1000, 10**6]),
    top_p=st.floats(0.001, 1),
    seed=st.integers(0, 99),
)
def test_a_wide_nucleus_is_the_one_that_sorting_gives(size, steps, top_p, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(steps, (size,), generator=generator) * (3 / steps)
    weights = (logits - logits.max()).exp()
    wanted = top_p * weights.sum(dtype=torch.float64).item()
    kept = nucleus(logits, weights, wanted)
    order = logits.sort(descending=True, stable=True).indices
    num = int((kept > 0).sum())
    assert set(order[:num].tolist()) == set(kept.nonzero().flatten().tolist())
    assert torch.equal(kept[order[:num]], weights[order[:num]])
    reached = weights[order].cumsum(0, dtype=torch.float64)
    assert num == 1 or reached[num - 2] < wanted * (1 + 1e-6)
    assert num == size or reached[num - 1] >= wanted * (1 - 1e-6)


def test_candidates_are_enough_exactly_where_the_rest_cannot_matter():
    logits = torch.arange(1000.0)[None] / 10
    for options, taken in (
        ({"temperature": 0.0}, ("greedy",)),
        ({"top_k": 64}, ("best",)),
        ({"min_p": 0.1}, ("best",)),
        ({"min_p": 0.1, "top_p": 0.5}, ("best",)),
        ({"min_p": 1e-9}, ("best", "logits")),
        ({"top_k": 65}, ("logits",)),
        ({"top_p": 0.5}, ("logits",)),
        ({}, ("logits",)),
        ({"top_k": 5, "num_logprobs": 0}, ("logits",)),
        ({"temperature": 0.0, "presence_penalty": 0.1}, ("logits",)),
        ({"temperature": 0.0, "min_new": 1}, ("logits",)),
    ):
        head = Head(1000)
        asked = Sampling(max_new=1, **{"temperature": 1.0} | options)
        choose(head, logits, [Request(0, [1], 1, asked)])
        assert head.taken == taken, options


# ---- greedy --------------------------------------------------------------------------------------


def test_of_equal_logits_the_lowest_id_is_the_greedy_one_on_every_path():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]])
    for options in ({}, {"num_logprobs": 1}, {"logit_bias": ((0, 0.5),)}):
        asked = Sampling(max_new=1, **options)
        assert choose(Head(5), logits, [Request(0, [1], 1, asked)])[0][0] == 1
    cold = Sampling(max_new=1, top_k=2, temperature=1e-300)
    assert choose(Head(5), logits, [Request(0, [1], 1, cold)])[0][0] in (1, 2)


@given(
    values=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    num=st.integers(1, 40),
)
def test_the_best_are_in_order_and_equal_ones_by_id(values, num):
    num = min(num, len(values))
    logits, tokens = best_of(torch.tensor([values, values[::-1]]).float(), num)
    for row, given_row in enumerate((values, values[::-1])):
        order = sorted(range(len(values)), key=lambda t: (-given_row[t], t))[:num]
        assert tokens[row].tolist() == order
        assert logits[row].tolist() == [given_row[token] for token in order]


@pytest.mark.parametrize("heat", [1e-4, 1e-30, 1e-320])
def test_a_cold_draw_is_greedy(heat):
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(1))
    for options in ({}, {"top_p": 0.9}, {"top_k": 9}):
        cold = Sampling(max_new=1, temperature=heat, **options)
        chosen = [token for token, _ in choose(Head(300), logits, rows_of(cold, 20))]
        assert chosen == logits.argmax(-1).tolist()


def test_rows_of_all_kinds_share_a_batch():
    logits = torch.randn(7, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    kinds = [
        Sampling(max_new=1),
        Sampling(max_new=1, temperature=1.0, seed=4),
        Sampling(max_new=1, temperature=0.7, top_p=0.8, seed=5),
        Sampling(max_new=1, temperature=1.3, top_p=0.999999, seed=6),
        Sampling(max_new=1, temperature=1.3, top_k=7, seed=6),
        Sampling(max_new=1, temperature=1.0, min_p=0.02, frequency_penalty=1.0, seed=6),
        Sampling(max_new=1, num_logprobs=3),
    ]
    rows = [Request(i, [2, 3, 3], 1, each) for i, each in enumerate(kinds)]
    together = choose(Head(500), logits, rows)
    again = [Request(i, [2, 3, 3], 1, each) for i, each in enumerate(kinds)]
    alone = [choose(Head(500), logits[i : i + 1], [again[i]])[0] for i in range(7)]
    assert [token for token, _ in together] == [token for token, _ in alone]
    assert together[0][0] == int(logits[0].float().argmax())
    assert [each is None for _, each in together] == [True] * 6 + [False]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.5}, {"top_k": 2}, {"presence_penalty": 1.0}])
def test_a_model_that_gives_no_numbers_ends_no_engine(options):
    logits = torch.full((1, 70), math.nan)
    for temperature in (0.0, 1.0):
        asked = Sampling(max_new=1, temperature=temperature, num_logprobs=1, **options)
        ((token, _),) = choose(Head(70), logits, [Request(0, [1], 1, asked)])
        assert 0 <= token < 70


# ---- seeds ---------------------------------------------------------------------------------------


def test_a_draw_depends_on_seed_and_position_only():
    assert uniform(1, 2) == uniform(1, 2)
    values = [uniform(seed, at) for seed in range(40) for at in range(50)]
    assert len(set(values)) == 2000 and all(0 <= u < 1 for u in values)
    assert sum(values) / 2000 == pytest.approx(0.5, abs=0.03)


def test_scores_are_log_probabilities():
    logits = torch.randn(3, 50).bfloat16()
    logp = logits.float().log_softmax(-1)
    for row, (own, ids, best) in enumerate(score(logits, [4, 5, 6], 3)):
        assert own == pytest.approx(logp[row, 4 + row].item())
        assert ids == logp[row].topk(3).indices.tolist()
        assert best == pytest.approx(logp[row].topk(3).values.tolist())
    assert score(logits, [4, 5, 6], 0)[0][1:] == ([], [])


def run(engine, several):
    inbox = ScriptedInbox({0: several})
    drive(EngineWorld(engine, inbox), reacts=[Continuous()])
    return inbox.tokens()


@pytest.mark.parametrize("options", [{}, {"top_p": 0.7}, {"top_k": 9, "frequency_penalty": 0.5}])
def test_seeded_output_does_not_depend_on_companions_or_preemption(options):
    sampling = Sampling(max_new=20, temperature=1.0, ignore_eos=True, **options)
    lengths = (40, 64, 60)

    def each(i: int) -> Request:
        return request(i, prompt_of(lengths[i]), replace(sampling, seed=i))

    alone: dict[int, list[int]] = {}
    for i in range(3):
        alone |= run(make_engine(), [each(i)])
    crowded = make_engine(max_tokens=96, kv_tokens=192)
    assert run(crowded, [each(i) for i in range(3)]) == alone
    assert crowded.num_preempted > 0
    assert len({tuple(tokens) for tokens in alone.values()}) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"top_k": 20}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.05}]
)
def test_scores_change_no_draw(options, dtype):
    config = CONFIG.with_dtype(dtype)
    common = {"max_new": 24, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    sampling = Sampling(**common | options)
    fast = run(make_engine(config), [request(0, prompt_of(20), sampling)])
    whole = run(make_engine(config), [request(0, prompt_of(20), replace(sampling, num_logprobs=0))])
    assert fast == whole
