"""Laws of the text in front of the tokens, and of what a request may ask for."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from phalanx.engines.serve.protocol import parse_completion
from phalanx.engines.serve.settings import Sampling, ServeSettings
from phalanx.engines.serve.text import StopFinder, TextStream, Tokeniser
from phalanx.engines.serve.wire import encode, error_from_json, error_to_json
from phalanx.errors import JobError, PlanError


@pytest.fixture(scope="module")
def tokeniser(tmp_path_factory) -> Tokeniser:
    """One token per byte, so that most characters of the test are several tokens."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokeniser(folder)


@given(text=st.text(max_size=40), context=st.text(max_size=5))
def test_pieces_join_to_the_text_of_the_whole(tokeniser, text, context):
    ids = tokeniser.encode(text)
    stream = TextStream(tokeniser, tokeniser.encode(context))
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.flush() == text
    assert all("\ufffd" not in piece for piece in pieces if "\ufffd" not in text)


def test_an_unfinished_character_is_shown_at_the_end(tokeniser):
    ids = tokeniser.encode("a\u20ac")
    stream = TextStream(tokeniser)
    assert [stream.push(token) for token in ids[:-1]] == ["a", "", ""]
    assert stream.flush() == "\ufffd"


def test_without_a_tokenizer_only_ids_are_served(tmp_path):
    tokeniser = Tokeniser(tmp_path)
    assert not tokeniser.has_text and tokeniser.decode([1, 2]) == ""
    with pytest.raises(JobError, match="send token ids"):
        tokeniser.encode("a")


@given(
    text=st.text("abc", max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=6),
)
def test_text_ends_before_the_first_stop_string(text, stops, cuts):
    finder, shown, start = StopFinder(stops), "", 0
    for cut in [*sorted(cuts), len(text)]:
        shown += finder.push(text[start : max(start, cut)])
        start = max(start, cut)
        if finder.found:
            break
    places = [at for stop in stops if (at := text[:start].find(stop)) >= 0]
    assert finder.found == bool(places)
    assert shown + finder.flush() == (text[: min(places)] if places else text)


def test_text_is_held_back_only_while_it_may_begin_a_stop_string():
    finder = StopFinder(["\n\n", "END"])
    assert [finder.push(part) for part in ("a\n", "b", "E", "NE", "ND x")] == [
        *("a", "\nb", "", "EN", ""),
    ]
    assert finder.found


GOOD = {"model": "tiny", "prompt": "a"}


def test_defaults_are_those_of_the_interface():
    asked = parse_completion({"prompt": "a", "seed": 3}, "tiny")
    assert asked.prompts == ("a",)
    assert asked.sampling == Sampling(max_new=16, temperature=1.0, seed=3)
    assert not (asked.stream or asked.echo or asked.return_token_ids)
    seeds = {parse_completion(GOOD, "tiny").sampling.seed for _ in range(3)}
    assert len(seeds) == 3


def test_prompts_come_in_four_forms():
    for prompt, want in (
        ("ab", ("ab",)),
        (["ab", "c"], ("ab", "c")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ):
        assert parse_completion({"prompt": prompt}, "tiny").prompts == want


def test_every_parameter_arrives():
    body = GOOD | {
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "n": 2,
        "seed": 7,
        "stop": ["x"],
        "logprobs": 2,
        "echo": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "stop_token_ids": [4],
        "return_token_ids": True,
        "best_of": 1,
        "presence_penalty": 0,
        "user": "me",
    }
    asked = parse_completion(body, "tiny")
    assert asked.sampling == Sampling(
        max_new=5,
        temperature=0.0,
        top_p=0.5,
        seed=7,
        ignore_eos=True,
        stop_tokens=(4,),
        num_logprobs=2,
        prompt_logprobs=2,
    )
    assert (asked.num_each, asked.stops, asked.include_usage) == (2, ("x",), True)
    assert [asked.sampling_of(choice).seed for choice in range(4)] == [7, 8, 7, 8]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": None}, "prompt: must be a text"),
        ({"prompt": []}, r"prompt = \[\]"),
        ({"prompt": [1, "a"]}, "must be a text"),
        ({"prompt": [True]}, "token ids"),
        ({"prompt": [[1], ["a"]]}, "token ids"),
        ({"max_tokens": 0}, "max_tokens = 0: must be a whole number, at least 1"),
        ({"max_tokens": 1.5}, "max_tokens = 1.5"),
        ({"temperature": -0.1}, r"temperature = -0.1: must be a number in 0..100"),
        ({"temperature": "hot"}, "temperature = 'hot'"),
        ({"top_p": 1.1}, "top_p = 1.1"),
        ({"n": 129}, "n = 129"),
        ({"n": 100, "prompt": ["a", "b"]}, "prompts times n = 200"),
        ({"logprobs": 21}, "at most 20"),
        ({"stop": [""]}, "none of them empty"),
        ({"stop": 3}, "stop = 3"),
        ({"stream": 1}, "must be true or false"),
        ({"stream_options": 1}, "must be an object"),
        ({"seed": 1.5}, "seed = 1.5"),
        ({"model": "other"}, "model = 'other': is not served here; nearest legal values: tiny"),
        ({"presence_penalty": 0.5}, "presence_penalty = 0.5: is not supported"),
        ({"logit_bias": {"3": 1}}, "not supported"),
        ({"temprature": 1}, "temprature: no such parameter; nearest legal values: temperature"),
    ],
)
def test_wrong_parameters_are_named(change, words):
    with pytest.raises(JobError, match=words) as caught:
        parse_completion(GOOD | change, "tiny")
    assert caught.value.code == "serve/request"


def test_a_body_that_is_no_object_is_refused():
    with pytest.raises(JobError, match="must be a JSON object"):
        parse_completion([1], "tiny")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_running": 0}, "serve.max_running = 0: must be at least 1"),
        ({"max_step_tokens": 8}, "serve.max_step_tokens = 8: must be at least 16"),
        ({"port": 70000}, "serve.port = 70000"),
        (
            {"dtype": "bfloat"},
            "serve.dtype = bfloat: no such dtype; nearest legal values: bfloat16",
        ),
    ],
)
def test_wrong_settings_are_named(options, words):
    with pytest.raises(JobError, match=words):
        ServeSettings(folder="x", scheduler="continuous", **options)


def test_errors_cross_the_socket():
    error = PlanError("plan/illegal", "a.b", 3, "is wrong", legal=[4, 5])
    again = error_from_json(json.loads(encode(error_to_json(error))))
    assert type(again) is PlanError and str(again) == str(error) and again.code == error.code
