"""What a request may ask for: every parameter arrives, or is named in a refusal."""

from __future__ import annotations

import math

import pytest

from phalanx.engines.serve.protocol import parse_completion, parse_generate
from phalanx.engines.serve.settings import Sampling
from phalanx.errors import JobError

GOOD = {"model": "tiny", "prompt": "a"}
ALL = {
    "max_tokens": 5,
    "temperature": 0,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.1,
    "seed": 7,
    "ignore_eos": True,
    "stop_token_ids": [4],
    "min_tokens": 2,
    "presence_penalty": 1,
    "frequency_penalty": -1.5,
    "repetition_penalty": 1.2,
    "logit_bias": {"3": -100, "5": 1.5},
    "logprobs": 2,
}
SAMPLING = Sampling(
    max_new=5,
    temperature=0.0,
    top_p=0.5,
    top_k=7,
    min_p=0.1,
    seed=7,
    ignore_eos=True,
    stop_tokens=(4,),
    num_logprobs=2,
    presence_penalty=1.0,
    frequency_penalty=-1.5,
    repetition_penalty=1.2,
    logit_bias=((3, -100.0), (5, 1.5)),
    min_new=2,
)


def test_defaults_are_those_of_the_interface():
    asked = parse_completion({"prompt": "a", "seed": 3})
    assert asked.prompts == ("a",) and asked.max_new == 16
    assert asked.sampling == Sampling(max_new=16, temperature=1.0, seed=3)
    assert not (asked.stream or asked.echo or asked.return_token_ids or asked.include_stop)
    assert asked.add_special and asked.skip_special
    assert len({parse_completion(GOOD).sampling.seed for _ in range(3)}) == 3


def test_null_is_not_given():
    body = dict.fromkeys(["temperature", "n", "stop", "logit_bias", "seed", "stream_options"])
    assert parse_completion(GOOD | body | {"seed": 1}) == parse_completion(GOOD | {"seed": 1})


def test_prompts_come_in_four_forms():
    for prompt, want in (
        ("ab", ("ab",)),
        (["ab", "c"], ("ab", "c")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ):
        assert parse_completion({"prompt": prompt}).prompts == want


def test_every_parameter_arrives():
    own = {
        "n": 2,
        "stop": ["x"],
        "echo": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "truncate_prompt_tokens": 9,
        "return_token_ids": True,
        "add_special_tokens": False,
        "best_of": 1,
        "user": "me",
    }
    asked = parse_completion(GOOD | ALL | own)
    assert asked.sampling_of(0, 5).prompt_logprobs == 2, "an echoed prompt has scores too"
    assert parse_completion(GOOD | ALL).sampling == SAMPLING
    assert (asked.num_each, asked.stops, asked.include_usage) == (2, ("x",), True)
    assert (asked.include_stop, asked.skip_special, asked.add_special) == (True, False, False)
    assert (asked.truncate, asked.return_token_ids, asked.model) == (9, True, "tiny")
    assert [asked.sampling_of(choice, 3).seed for choice in range(4)] == [7, 8, 7, 8]
    asked = parse_generate({"prompt_token_ids": [5, 6], "sampling": ALL, "stream": True})
    assert asked.sampling == SAMPLING and asked.prompts == ((5, 6),) and asked.stream


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": None}, "prompt: must be a text"),
        ({"prompt": []}, r"prompt = \[\]"),
        ({"prompt": [1, "a"]}, "must be a text"),
        ({"prompt": [True]}, "token ids"),
        ({"prompt": [-1]}, "token ids"),
        ({"prompt": [2**70]}, "token ids"),
        ({"prompt": [[1], ["a"]]}, "token ids"),
        ({"prompt": "a\ud83d"}, "prompt = .*half a surrogate pair"),
        ({"max_tokens": 0}, "max_tokens = 0: must be a whole number, at least 1"),
        ({"max_tokens": 1.5}, "max_tokens = 1.5"),
        ({"max_tokens": 10**400}, "max_tokens = a number of 1329 bits"),
        ({"temperature": -0.1}, r"temperature = -0.1: must be a number in 0..100"),
        ({"temperature": "hot"}, "temperature = 'hot'"),
        ({"temperature": True}, "temperature = True"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"temperature": math.inf}, "temperature = inf"),
        ({"top_p": 1.1}, "top_p = 1.1"),
        ({"top_k": -2}, "top_k = -2: must be a whole number, at least -1"),
        ({"min_p": 2}, "min_p = 2"),
        ({"presence_penalty": 2.5}, r"presence_penalty = 2.5: must be a number in -2..2"),
        ({"repetition_penalty": 0}, "repetition_penalty = 0"),
        ({"logit_bias": {"x": 1}}, "logit_bias = .'x': 1.: must map token ids"),
        ({"logit_bias": {"3": 101}}, "logit_bias"),
        ({"logit_bias": {"3": True}}, "logit_bias"),
        ({"logit_bias": {"3": 1, "03": 1}}, "logit_bias"),
        ({"logit_bias": [3]}, "logit_bias"),
        ({"min_tokens": 17}, "min_tokens = 17: must be at most max_tokens, 16"),
        ({"n": 129}, "n = 129"),
        ({"n": 100, "prompt": ["a", "b"]}, "prompts times n = 200"),
        ({"best_of": 2}, "best_of = 2: is not supported"),
        ({"best_of": True}, "best_of = True"),
        ({"logprobs": 21}, "at most 20"),
        ({"logprobs": True}, "logprobs = True"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs = 1: cannot be streamed"),
        ({"stop": [""]}, "none of them empty"),
        ({"stop": ["a"] * 65}, "at most 64 texts"),
        ({"stop": 3}, "stop = 3"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stream": 1}, "must be true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options: needs stream"),
        ({"stream": True, "stream_options": 1}, "stream_options = 1: must be a JSON object"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x: no such parameter"),
        ({"seed": 1.5}, "seed = 1.5"),
        ({"seed": 2**63}, "seed"),
        ({"suffix": "x"}, "suffix = 'x': is not supported"),
        ({"temprature": 1}, "temprature: no such parameter; nearest legal values: temperature"),
        ({"two\nlines": 1}, r"two\\nlines: no such parameter"),
    ],
)
def test_wrong_parameters_are_named(change, words):
    with pytest.raises(JobError, match=words) as caught:
        parse_completion(GOOD | change)
    assert caught.value.code == "serve/request"
    assert len(str(caught.value).splitlines()) == 1


def test_a_body_that_is_no_object_is_refused():
    with pytest.raises(JobError, match=r"body = \[1\]: must be a JSON object"):
        parse_completion([1])
    with pytest.raises(JobError, match="prompt_token_ids: must be a list"):
        parse_generate({})
    with pytest.raises(JobError, match=r"sampling\.n: no such parameter"):
        parse_generate({"prompt_token_ids": [1], "sampling": {"n": 2}})


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("top_p", math.nan), ("min_p", 1.5), ("top_k", -1), ("seed", 2**64)],
)
def test_sampling_that_a_program_makes_has_the_same_ranges(name, value):
    with pytest.raises(JobError, match=rf"{name} = .*: must lie in"):
        Sampling(**{"max_new": 1} | {name: value})
