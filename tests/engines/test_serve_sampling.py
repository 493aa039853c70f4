"""Laws of the choice of a token."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from phalanx.drive import drive
from phalanx.engines.serve.sampling import choose, score, uniform
from phalanx.engines.serve.settings import Sampling
from phalanx.engines.serve.world import EngineWorld
from phalanx.policies.serve.continuous import Continuous
from tests.engines.serve_cases import ScriptedInbox, make_engine, prompt_of, request

NUM_DRAWS = 4000


def draws(logits: list[float], sampling: Sampling, num: int = NUM_DRAWS) -> Counter[int]:
    rows = torch.tensor(logits).expand(num, -1)
    return Counter(choose(rows, [sampling] * num, list(range(num))))


def test_draws_follow_the_probabilities():
    logits = [0.0, 1.0, -1.0, 2.0, -math.inf]
    for heat in (0.5, 1.0, 2.0):
        probs = (torch.tensor(logits) / heat).softmax(-1).tolist()
        counts = draws(logits, Sampling(max_new=1, temperature=heat, seed=3))
        assert counts[4] == 0
        chi2 = sum(
            (counts[t] - NUM_DRAWS * p) ** 2 / (NUM_DRAWS * p) for t, p in enumerate(probs[:4])
        )
        assert chi2 < 16.3  # 3 degrees of freedom, one in a thousand


def test_top_p_keeps_the_smallest_sufficient_set():
    logits = torch.tensor([0.5, 0.2, 0.2, 0.1]).log().tolist()
    for top_p, kept in (
        (0.0, {0}),
        (0.45, {0}),
        (0.6, {0, 1}),
        (0.89, {0, 1, 2}),
        (0.95, {0, 1, 2, 3}),
    ):
        counts = draws(logits, Sampling(max_new=1, temperature=1.0, top_p=top_p, seed=1), 800)
        assert set(counts) == kept
    counts = draws(logits, Sampling(max_new=1, temperature=1.0, top_p=0.6, seed=2))
    assert counts[0] / NUM_DRAWS == pytest.approx(5 / 7, abs=0.03)


def test_a_flat_distribution_needs_more_candidates_than_the_first_ones():
    size = 3000
    logits = torch.zeros(size)
    logits[7] = 0.1
    top_p, num = 0.9, 600
    sampling = Sampling(max_new=1, temperature=1.0, top_p=top_p)
    chosen = choose(logits.expand(num, -1), [sampling] * num, list(range(num)))
    assert len(set(chosen)) > num * 0.8  # as many as draws from 2,700 equal ones have
    exact = (logits.softmax(-1).sort(descending=True).values.cumsum(0) < top_p).sum() + 1
    assert abs(int(exact) - top_p * size) < 3


def test_rows_of_all_kinds_share_a_batch():
    torch.manual_seed(0)
    logits = torch.randn(5, 500, dtype=torch.bfloat16)
    kinds = [
        Sampling(max_new=1),
        Sampling(max_new=1, temperature=1.0, seed=4),
        Sampling(max_new=1, temperature=0.7, top_p=0.8, seed=5),
        Sampling(max_new=1, temperature=1.3, top_p=0.999999, seed=6),
        Sampling(max_new=1),
    ]
    together = choose(logits, kinds, [3, 9, 2, 7, 1])
    alone = [choose(logits[i : i + 1], [kinds[i]], [[3, 9, 2, 7, 1][i]])[0] for i in range(5)]
    assert together == alone
    assert [together[0], together[4]] == logits.float()[[0, 4]].argmax(-1).tolist()


def test_a_draw_depends_on_seed_and_position_only():
    assert uniform(1, 2) == uniform(1, 2)
    values = [uniform(seed, at) for seed in range(40) for at in range(50)]
    assert len(set(values)) == 2000 and all(0 <= u < 1 for u in values)
    assert sum(values) / 2000 == pytest.approx(0.5, abs=0.03)


def test_a_cold_draw_is_greedy():
    logits = torch.randn(20, 300)
    cold = Sampling(max_new=1, temperature=1e-4, top_p=0.9)
    assert choose(logits, [cold] * 20, list(range(20))) == logits.argmax(-1).tolist()


def test_scores_are_log_probabilities():
    logits = torch.randn(3, 50).bfloat16()
    logp = logits.float().log_softmax(-1)
    for row, (own, ids, best) in enumerate(score(logits, [4, 5, 6], 3)):
        assert own == pytest.approx(logp[row, 4 + row].item())
        assert ids == logp[row].topk(3).indices.tolist()
        assert best == pytest.approx(logp[row].topk(3).values.tolist())
    assert score(logits, [4, 5, 6], 0)[0][1:] == ([], [])


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_seeded_output_does_not_depend_on_companions_or_preemption(top_p):
    sampling = Sampling(max_new=20, temperature=1.0, top_p=top_p, seed=11, ignore_eos=True)
    lengths = (40, 64, 60)
    requests = [request(i, prompt_of(n), replace(sampling, seed=i)) for i, n in enumerate(lengths)]

    def run(engine, several):
        inbox = ScriptedInbox({0: several})
        drive(EngineWorld(engine, inbox), reacts=[Continuous()])
        return inbox.tokens()

    alone: dict[int, list[int]] = {}
    for i, n in enumerate(lengths):
        alone |= run(make_engine(), [request(i, prompt_of(n), replace(sampling, seed=i))])
    crowded = make_engine(max_tokens=96, kv_tokens=192)
    assert run(crowded, requests) == alone
    assert crowded.num_preempted > 0
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
