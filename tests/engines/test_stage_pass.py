"""Held-out loss, answers and whole weights of a model in stages are those of the whole model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.engines.evaluate import greedy, held_out_loss
from phalanx.engines.whole_weights import whole_weights
from tests.engines.pipeline_cases import step_of
from tests.engines.stage_cases import ADAPTERS, SPLIT, STAGED, WHOLE, built, join
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


def require_equal(found, whole, exact):
    (loss, answers, cut, weights), (whole_loss, *whole_answers, whole_weights) = found, whole
    assert loss == (whole_loss if exact else pytest.approx(whole_loss, rel=1e-6))
    assert [answers, cut] == whole_answers
    assert [name for name, _ in weights] == [name for name, _ in whole_weights]
    for (name, weight), (_, expected) in zip(weights, whole_weights):
        assert torch.equal(weight, expected), name


@pytest.fixture(scope="module")
def whole():
    """Of one process, all weights trained and adapters trained."""
    return run_ranks(seen, 1, [WHOLE, replace(WHOLE, lora=ADAPTERS)], backend=None)[0]


@pytest.mark.dist
def test_stages_say_what_the_whole_model_says(whole):
    adapted = replace(STAGED["a wave"], lora=ADAPTERS)
    on_ranks = run_ranks(seen, 2, [*STAGED.values(), adapted], backend=None)
    _, answers, cut, _ = whole[0]
    assert [len(each) for each in answers] == [7, 7, 7] and len(cut[0]) <= 2
    for of_one in on_ranks:
        for of_case, expected in zip(of_one, [whole[0]] * len(STAGED) + [whole[1]]):
            assert of_case[:3] == expected[:3]  # to the bit, on every rank
    for of_case, expected in zip(on_ranks[0], [whole[0]] * len(STAGED) + [whole[1]]):
        require_equal(of_case, expected, exact=True)


@pytest.mark.dist
def test_stages_that_are_cut_themselves_say_the_same(whole):
    for of_case, *_ in run_ranks(seen, 4, [SPLIT], backend=None)[:1]:
        require_equal(of_case, whole[0], exact=False)
