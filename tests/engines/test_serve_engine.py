"""The engine against transformers and against the training decoder, batched, chunked, preempted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.drive import drive
from phalanx.engines.serve.settings import Sampling
from phalanx.engines.serve.world import Cancel, EngineWorld
from phalanx.errors import JobError, PlanError
from phalanx.models.decoder import Decoder
from phalanx.models.parameters import load_parameters
from phalanx.policies.serve import BatchPlan
from phalanx.policies.serve.continuous import Continuous
from tests.engines.serve_cases import (
    CONFIG,
    GREEDY,
    ScriptedInbox,
    make_engine,
    prompt_of,
    request,
    tensors,
    write_model,
)

LENGTHS = (1, 7, 40, 64, 90)
NUM_NEW = GREEDY.max_new


def run(engine, script, policy=None):
    """The script's inbox after everything in it has ended."""
    inbox = ScriptedInbox(script)
    drive(EngineWorld(engine, inbox), reacts=[policy or Continuous()])
    assert not engine.requests
    assert engine.kv.num_free == engine.kv.num_blocks
    return inbox


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> dict[int, list[int]]:
    """Greedy output of transformers, one prompt at a time."""
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path_factory.mktemp("models") / "tiny")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    outputs = {}
    for length in LENGTHS:
        ids = torch.tensor([prompt_of(length)])
        options = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None}
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        outputs[length] = tokens[0, length:].tolist()
    assert all(len(set(tokens)) > 4 for tokens in outputs.values())  # not a model that repeats
    return outputs


@pytest.mark.parametrize("num", range(1, 6))
@pytest.mark.parametrize("chunk", [1, 16, 0])
def test_greedy_tokens_are_those_of_transformers(reference, num, chunk):
    engine = make_engine()
    requests = [request(i, prompt_of(length)) for i, length in enumerate(LENGTHS[-num:])]
    inbox = run(engine, {0: requests}, Continuous(chunk=chunk))
    assert inbox.tokens() == {i: reference[length] for i, length in enumerate(LENGTHS[-num:])}
    assert engine.num_prompt_tokens == sum(LENGTHS[-num:])


def test_tokens_do_not_change_when_requests_are_preempted(reference):
    engine = make_engine(kv_tokens=176, max_tokens=160)
    requests = [request(i, prompt_of(length)) for i, length in enumerate(LENGTHS)]
    inbox = run(engine, {0: requests[2:], 3: requests[:2]})
    assert engine.num_preempted > 0
    assert inbox.tokens() == {i: reference[length] for i, length in enumerate(LENGTHS)}


def test_companions_that_leave_do_not_disturb(reference):
    engine = make_engine()
    requests = [request(i, prompt_of(length)) for i, length in enumerate(LENGTHS)]
    script = {0: requests[:3], 4: [Cancel(1), requests[3]], 6: [Cancel(99), requests[4]]}
    inbox = run(engine, script)
    tokens = inbox.tokens()
    assert {i: tokens[i] for i in (0, 2, 3, 4)} == {i: reference[LENGTHS[i]] for i in (0, 2, 3, 4)}
    assert tokens[1] == reference[7][: len(tokens[1])] and len(tokens[1]) < NUM_NEW


def test_an_idle_engine_that_loses_its_last_request_waits_for_the_next(reference):
    script = {0: [request(0, prompt_of(90))], 1: [Cancel(0)], 2: [request(1, prompt_of(7))]}
    assert run(make_engine(), script).tokens() == {1: reference[7]}


def test_packed_weights_give_the_decoders_logits():
    decoder = Decoder(CONFIG)
    load_parameters(decoder, tensors(0))
    engine, prompt = make_engine(), prompt_of(50)
    with torch.inference_mode():
        want = decoder.logits(decoder(torch.tensor(prompt)))
        engine.kv.extend([0], [50])
        steps = engine.kv.step([0], [50])
        hidden = engine.model.forward(
            torch.tensor(prompt), torch.arange(50), steps, engine.kv.pools
        )
        torch.testing.assert_close(engine.model.logits(hidden), want, rtol=1e-5, atol=1e-5)


def test_float64_rows_agree_to_the_last_digits():
    """Batched decoding against the decoder's own cacheless forward pass, without rounding noise."""
    config = replace(CONFIG, dtype="float64")
    decoder = Decoder(config)
    load_parameters(decoder, tensors(0, config))
    sampling = replace(GREEDY, max_new=9, num_logprobs=3)
    requests = [request(i, prompt_of(n), sampling) for i, n in enumerate((3, 25, 61))]
    inbox = run(make_engine(config), {0: requests})
    for i, n in enumerate((3, 25, 61)):
        outputs = inbox.outputs[i]
        ids = torch.tensor([*prompt_of(n), *(each.token for each in outputs)])
        with torch.inference_mode():
            logp = decoder.logits(decoder(ids)).float().log_softmax(-1)[n - 1 : -1]
        own = torch.tensor([each.score[0] for each in outputs])
        torch.testing.assert_close(own, logp.max(-1).values, rtol=0, atol=1e-6)
        assert [each.score[1] for each in outputs] == logp.topk(3).indices.tolist()


def test_prompt_scores_are_those_of_one_forward_pass_whatever_the_chunks():
    decoder = Decoder(CONFIG)
    load_parameters(decoder, tensors(0))
    prompt = prompt_of(75)
    with torch.inference_mode():
        logp = decoder.logits(decoder(torch.tensor(prompt))).log_softmax(-1)[:-1]
    want = logp.gather(1, torch.tensor(prompt[1:])[:, None]).flatten()
    sampling = Sampling(max_new=1, num_logprobs=2, prompt_logprobs=2)
    for chunk in (1, 16, 0):
        inbox = run(make_engine(), {0: [request(0, prompt, sampling)]}, Continuous(chunk=chunk))
        scores = inbox.outputs[0][0].prompt_scores
        got = torch.tensor([score[0] for score in scores])
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert scores[5][1] == logp[5].topk(2).indices.tolist()


def test_a_request_ends_at_its_stop_tokens_or_its_length(reference):
    tokens = reference[40]
    at = next(i for i in range(2, NUM_NEW) if tokens[i] not in tokens[:i])
    stopping = replace(GREEDY, stop_tokens=(tokens[at],))
    config = replace(CONFIG, eos_tokens=(tokens[at], 1))
    for engine, sampling in (
        (make_engine(), stopping),
        (make_engine(config), replace(GREEDY, ignore_eos=False)),
    ):
        outputs = run(engine, {0: [request(0, prompt_of(40), sampling)]}).outputs[0]
        assert [each.token for each in outputs] == tokens[: at + 1]
        assert [each.reason for each in outputs] == [""] * at + ["stop"]
    outputs = run(make_engine(config), {0: [request(0, prompt_of(40), GREEDY)]}).outputs[0]
    assert len(outputs) == NUM_NEW and outputs[-1].reason == "length"


def test_new_weights_take_over_in_place(tmp_path):
    engine = make_engine()
    places = {name: place.view.data_ptr() for name, place in engine.model.weights._places.items()}
    engine.update_weights(tensors(5), "tiny@5")
    assert places == {
        name: place.view.data_ptr() for name, place in engine.model.weights._places.items()
    }
    assert engine.weight_version == "tiny@5"
    got = run(engine, {0: [request(0, prompt_of(40))]}).tokens()
    assert got == run(make_engine(seed=5), {0: [request(0, prompt_of(40))]}).tokens()
    assert got != run(make_engine(), {0: [request(0, prompt_of(40))]}).tokens()


def test_wrong_weights_are_refused():
    model = make_engine().model
    with pytest.raises(JobError, match=r"q_proj\.weight: is no tensor of this model; nearest"):
        model.update([("model.layers.9.self_attn.q_proj.weight", torch.zeros(64, 48))])
    with pytest.raises(JobError, match=r"must have the shape \(48,\)"):
        model.update([("model.norm.weight", torch.zeros(47))])
    with pytest.raises(JobError, match="51 tensors of the model are missing"):
        model.update(list(tensors(0))[:3])
    model.update(list(tensors(0))[:3], strict=False)


def test_truncated_tokens_can_be_computed_again(reference):
    """What speculative decoding does: guesses are computed, refused and taken back."""
    engine, prompt = make_engine(), prompt_of(40)
    model, kv = engine.model, engine.kv

    def forward(tokens, start):
        kv.extend([0], [len(tokens)])
        steps = kv.step([0], [len(tokens)])
        positions = torch.arange(start, start + len(tokens))
        hidden = model.forward(torch.tensor(tokens), positions, steps, kv.pools)
        return model.logits(hidden[-1:]).argmax().item()

    output = [forward(prompt, 0)]
    while len(output) < NUM_NEW:
        length = kv.length(0)
        forward([output[-1], 3, 4, 5], length)
        kv.truncate(0, length)
        output.append(forward([output[-1]], length))
    assert output == reference[40]


def test_a_narrower_cache_is_its_own_choice():
    sampling = replace(GREEDY, max_new=3, num_logprobs=0)
    wide, narrow = make_engine(), make_engine()
    for pool in narrow.kv.pools.values():
        pool.keys, pool.values = pool.keys.bfloat16(), pool.values.bfloat16()
    scores = [
        [each.score[0] for each in run(e, {0: [request(0, prompt_of(30), sampling)]}).outputs[0]]
        for e in (wide, narrow)
    ]
    assert scores[0] != scores[1]
    assert scores[0] == pytest.approx(scores[1], abs=0.1)


@pytest.mark.parametrize(
    ("tokens", "max_new", "words"),
    [([], 3, "2..160"), ([3] * 150, 11, r"tokens = 150 \+ 11"), ([3], 0, "2..160")],
)
def test_requests_that_cannot_be_served_are_refused(tokens, max_new, words):
    with pytest.raises(JobError, match=words):
        make_engine().add(request(0, tokens, Sampling(max_new=max_new)))


def test_plans_that_do_not_fit_the_requests_are_refused():
    engine = make_engine()
    engine.add(request(3, prompt_of(7)))
    columns = {"num_draft": (0,), "adapter": (-1,), "grammar": (-1,)}

    def plan(id_, count, length):
        return BatchPlan(requests=(id_,), query_len=(count,), kv_len=(length,), **columns)

    for wrong, words in (
        (plan(4, 1, 0), "request"),
        (plan(3, 8, 0), "holds 0 of 7"),
        (plan(3, 1, 2), "holds 0 of 7"),
    ):
        with pytest.raises(PlanError, match=words):
            engine.step(wrong)
    with pytest.raises(JobError, match="live request"):
        engine.add(request(3, prompt_of(7)))


def test_the_worlds_trace_has_one_row_per_step():
    inbox = ScriptedInbox({0: [request(0, prompt_of(40))]})
    trace = drive(EngineWorld(make_engine(), inbox), reacts=[Continuous()])
    assert trace.source == "measured"
    assert trace.column("action_id").tolist() == [f"step.{i}" for i in range(1, len(trace) + 1)]
    assert trace.columns["step"].tolist() == list(range(1, len(trace) + 1))
    assert len(trace) == 2 + NUM_NEW - 1 and (trace.columns["dur_s"] > 0).all()
