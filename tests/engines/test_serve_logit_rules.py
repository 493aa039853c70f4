"""Laws of penalties, bias and bans: what changes before a token is chosen."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.engines.serve.sampling import choose
from phalanx.engines.serve.settings import Request, Sampling
from tests.engines.serve_head import Head, logit, rows_of


def under_rules(logits: list[float], tokens: list[int], num_prompt: int, asked: Sampling):
    """Dense, token by token, as the parameters are defined."""
    changed = list(logits)
    for token, bias in asked.logit_bias:
        changed[token] += bias
    for token in range(len(logits)):
        if token in tokens:
            by = asked.repetition_penalty
            changed[token] = changed[token] / by if changed[token] > 0 else changed[token] * by
        count = tokens[num_prompt:].count(token)
        changed[token] -= asked.frequency_penalty * count + asked.presence_penalty * (count > 0)
    return changed


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_penalties_and_bias_are_the_dense_definition(data):
    size = data.draw(st.integers(2, 12))
    token = st.integers(0, size - 1)
    num_steps = data.draw(st.integers(1, 6))
    prompt = data.draw(st.lists(token, min_size=1, max_size=5))
    asked = Sampling(
        max_new=9,
        presence_penalty=data.draw(st.sampled_from([0.0, 0.5, -1.0])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.25, -0.5])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.5, 0.5])),
        logit_bias=tuple(
            data.draw(st.dictionaries(token, st.sampled_from([-100.0, 1.25]))).items()
        ),
    )
    request_ = Request(0, list(prompt), len(prompt), asked)
    for _ in range(num_steps):  # counts are kept from step to step
        logits = data.draw(st.lists(logit, min_size=size, max_size=size))
        given_logits = torch.tensor([logits])
        chosen, _ = choose(Head(size), given_logits, [request_])[0]
        want = under_rules(logits, request_.tokens, len(prompt), asked)
        assert want[chosen] == pytest.approx(max(want), abs=1e-5)
        assert given_logits.tolist() == [logits], "the model's own logits stay for scores"
        request_.tokens.append(data.draw(token))


def test_scores_are_of_the_model_whatever_was_chosen():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    asked = Sampling(max_new=1, logit_bias=((0, 100.0),), num_logprobs=1, temperature=0.5)
    ((token, (own, ids, best)),) = choose(Head(3), logits, [Request(0, [1], 1, asked)])
    logp = logits.log_softmax(-1)[0].tolist()
    assert token == 0 and own == pytest.approx(logp[0])
    assert ids == [2] and best == pytest.approx([logp[2]])


def test_end_tokens_cannot_come_before_the_least_number_of_tokens():
    logits = torch.tensor([[0.0, 9.0, 8.0, 1.0]])
    for temperature in (0.0, 1.0):
        asked = Sampling(max_new=9, min_new=2, stop_tokens=(2,), temperature=temperature)
        each, head = Request(0, [0], 1, asked), Head(4, eos_tokens=(1,))
        for _ in range(2):
            token = choose(head, logits, [each])[0][0]
            assert token in (0, 3)
            each.tokens.append(token)
        assert choose(head, logits, [each])[0][0] in (1, 2)
    told_to_go_on = Sampling(max_new=9, min_new=2, ignore_eos=True)
    assert choose(Head(4, (1,)), logits, [Request(0, [0], 1, told_to_go_on)])[0][0] == 1


def test_a_banned_token_is_never_drawn_however_high_the_draw():
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    asked = Sampling(max_new=1, temperature=1.0)
    chosen = choose(Head(3), logits.expand(4000, -1), rows_of(asked, 4000))
    assert {token for token, _ in chosen} == {0, 1}
