"""Held-out loss, answers and whole weights of a model in stages are those of the whole model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.engines.evaluate import greedy, held_out_loss
from phalanx.engines.whole_weights import whole_weights
from tests.engines.pipeline_cases import step_of
from tests.engines.stage_cases import ADAPTERS, SHARED, SPLIT, STAGED, WHOLE, built, join
from tests.ranks import run_ranks

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5]]
CPU = torch.device("cpu")


def seen(rank, world_size, cases):
    """Of each case the loss, answers of several lengths and trained weights, in their order."""
    join(rank, world_size)
    found = []
    for case in cases:
        model, _, _ = built(rank, world_size, case)
        loss = held_out_loss(model, step_of(case, model, 0), CPU)
        answers = greedy(model, PROMPTS, max_new_tokens=7, end_tokens=[], device=CPU)
        ends = [answers[0][2]]
        cut = greedy(model, PROMPTS, max_new_tokens=7, end_tokens=ends, device=CPU)
        none = greedy(model, [], max_new_tokens=7, end_tokens=ends, device=CPU)
        weights = list(whole_weights(model.decoder, model.stages and model.stages.group))
        assert model.decoder.training and none == []
        found.append((float(loss), answers, cut, weights))
    return found


def require_weights(found, expected):
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, weight), (_, value) in zip(found, expected):
        assert torch.equal(weight, value), name


@pytest.fixture(scope="module")
def whole():
    """Of one process, all weights trained and adapters trained."""
    return run_ranks(seen, 1, [WHOLE, replace(WHOLE, lora=ADAPTERS)], backend=None)[0]


@pytest.mark.dist
def test_stages_say_what_the_whole_model_says(whole):
    adapted = replace(STAGED["a wave"], lora=ADAPTERS)
    expected = [whole[0]] * len(STAGED) + [whole[1]]
    _, answers, cut, _ = whole[0]
    assert [len(each) for each in answers] == [7, 7, 7] and len(cut[0]) <= 2
    on_ranks = run_ranks(seen, 2, [*STAGED.values(), adapted], backend=None)
    for of_rank in on_ranks:  # to the bit, on every rank
        assert [of_case[:3] for of_case in of_rank] == [of_case[:3] for of_case in expected]
    for of_case, wanted in zip(on_ranks[0], expected):
        require_weights(of_case[3], wanted[3])


@pytest.mark.dist
def test_stages_whose_products_or_rows_are_cut_say_the_same(whole):
    on_ranks = run_ranks(seen, 4, [SPLIT, SHARED], backend=None)
    for loss, *found, _ in (of_case for of_rank in on_ranks for of_case in of_rank):
        assert loss == pytest.approx(whole[0][0], rel=1e-6)
        assert found == list(whole[0][1:3])
    for of_case in on_ranks[0]:
        require_weights(of_case[3], whole[0][3])
