"""Tokens in, tokens out in one process: what a trainer's rollouts rely on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.engines.serve.offline import generate
from phalanx.engines.serve.settings import Sampling
from phalanx.errors import JobError, WorldError
from phalanx.models.decoder import Decoder
from phalanx.models.parameters import load_parameters
from tests.engines.serve_cases import CONFIG, GREEDY, make_engine, prompt_of, tensors

PROMPTS = [prompt_of(length) for length in (3, 20, 41, 64, 7, 33)]


def test_prompts_are_answered_in_their_order_as_alone():
    """More prompts than run at once; the i-th draws with its own seed."""
    sampling = Sampling(max_new=9, temperature=1.0, seed=3, ignore_eos=True)
    together = generate(make_engine(max_running=3), PROMPTS, sampling)
    for i, prompt in enumerate(PROMPTS):
        alone = generate(make_engine(), [prompt], replace(sampling, seed=3 + i))[0]
        assert together[i] == alone
    assert [each.reason for each in together] == ["length"] * 6


def test_scores_are_the_trainers_log_probabilities_of_the_same_tokens():
    """What an importance ratio is made of: it is 1 before the first update."""
    sampling = Sampling(max_new=9, temperature=1.0, num_logprobs=0, ignore_eos=True)
    decoder = Decoder(CONFIG)
    load_parameters(decoder, tensors(0))
    for prompt, got in zip(PROMPTS, generate(make_engine(), PROMPTS, sampling)):
        with torch.inference_mode():
            rows = decoder.logits(decoder(torch.tensor([*prompt, *got.tokens]))).log_softmax(-1)
        want = rows[len(prompt) - 1 : -1].gather(1, torch.tensor(got.tokens)[:, None]).flatten()
        own = torch.tensor([score[0] for score in got.scores])
        torch.testing.assert_close(own, want, rtol=1e-5, atol=1e-5)


def test_weights_change_between_steps_and_every_token_says_which_chose_it():
    engine, steps = make_engine(), []

    def train(engine):
        steps.append(engine.num_steps)
        if engine.num_steps == 4 and engine.weight_version == "tiny@0":
            engine.update_weights(tensors(5), "policy@1")

    got = generate(engine, [prompt_of(20)], replace(GREEDY, max_new=8), between=train)[0]
    assert got.weight_versions == ["tiny@0"] * 4 + ["policy@1"] * 4
    after = generate(engine, [prompt_of(20)], replace(GREEDY, max_new=8))[0]
    assert after.weight_versions == ["policy@1"] * 8
    assert after.tokens == generate(make_engine(seed=5), [prompt_of(20)], GREEDY)[0].tokens[:8]
    assert steps[0] == 0 and steps[-1] == 8


def test_a_prompt_that_cannot_be_served_leaves_nothing_behind():
    engine = make_engine()
    for prompts, adapter, error in (
        ([prompt_of(9), prompt_of(150)], "", JobError),
        ([prompt_of(9), [3, 101]], "", JobError),
        ([prompt_of(9)], "tone", JobError),
    ):
        with pytest.raises(error):
            generate(engine, prompts, GREEDY, adapter=adapter)
        assert not engine.requests and engine.kv.num_free == engine.kv.num_blocks
    engine.sleep(1)
    with pytest.raises(WorldError, match="wake it first"):
        generate(engine, PROMPTS, GREEDY)
