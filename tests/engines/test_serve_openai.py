"""What a request may ask for, and what the official client makes of the answers."""

from __future__ import annotations

import asyncio
import json
import math

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.engines.serve.protocol import parse_completion, parse_generate
from phalanx.engines.serve.settings import Sampling
from phalanx.engines.serve.text import Tokeniser
from phalanx.errors import JobError
from tests.engines.serve_scripts import BOS, EOS, VOCABULARY, Served, write_folder

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


# ---- parameters ----------------------------------------------------------------------------------


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


# ---- the official client -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("openai") / "tiny")


@pytest.fixture(scope="module")
def tokeniser(folder) -> Tokeniser:
    return Tokeniser(folder)


def complete(served: Served, **options):
    """One call; a stream as the list of its parts."""

    async def call(client: openai.AsyncOpenAI):
        body = {"model": "tiny", "prompt": "a", "max_tokens": 300} | options
        extra = {name: body.pop(name) for name in list(body) if name in _EXTRA}
        answer = await client.completions.create(**body, extra_body=extra)
        return [part async for part in answer] if options.get("stream") else answer

    return asyncio.run(served.use(call))


_EXTRA = ("min_tokens", "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs")
_EXTRA += ("truncate_prompt_tokens", "return_token_ids", "add_special_tokens", "top_k")


@settings(max_examples=60, deadline=None)
@given(
    reply=st.text(max_size=30) | st.text("ab\u20ac", max_size=30),
    stops=st.lists(st.text("ab\u20ac", min_size=1, max_size=3), max_size=2),
    keep=st.booleans(),
    max_tokens=st.integers(1, 60),
)
def test_chunks_join_to_the_whole_text_which_ends_at_the_first_stop_string(
    folder, tokeniser, reply, stops, keep, max_tokens
):
    ids = tokeniser.encode(reply, add_special=False)
    options = {
        "stop": stops or None,
        "include_stop_str_in_output": keep,
        "max_tokens": max_tokens,
        "return_token_ids": True,
    }
    whole = complete(Served(folder, lambda _: ids), **options)
    parts = complete(
        Served(folder, lambda _: ids),
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    told = parts[-1].usage
    assert told == whole.usage and parts[-1].choices == []
    choice, parts = whole.choices[0], [part.choices[0] for part in parts[:-1]]
    assert "".join(part.text for part in parts) == choice.text
    assert [token for part in parts for token in part.token_ids] == choice.token_ids
    reasons = [part.finish_reason for part in parts]
    assert reasons == [None] * (len(parts) - 1) + [choice.finish_reason]
    made = tokeniser.decode(ids[:max_tokens])
    at = [(made.find(stop), len(stop)) for stop in stops if stop in made]
    if at:
        first, length = min(at)
        assert choice.text == made[: first + length * keep] and choice.finish_reason == "stop"
    else:
        assert choice.text == made
        assert choice.finish_reason == ("length" if len(ids) >= max_tokens else "stop")


def test_a_client_reads_choices_of_several_prompts_in_order(folder, tokeniser):
    served = Served(folder, lambda prompt: prompt[1:])
    answer = complete(served, prompt=["ab", "\u20acuro"], n=2)
    assert [choice.text for choice in answer.choices] == ["ab", "ab", "\u20acuro", "\u20acuro"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 3 + 7 and answer.usage.completion_tokens == 2 * (3 + 7)
    seeds = [message["sampling"]["seed"] for message in served.engine.added]
    assert seeds[1] == seeds[0] + 1
    parts = complete(served, prompt=["ab", "c"], n=2, stream=True)
    texts = ["".join(p.choices[0].text for p in parts if p.choices[0].index == i) for i in range(4)]
    assert texts == ["ab", "ab", "c", "c"]


def test_echo_and_scores_of_prompts_and_outputs(folder, tokeniser):
    a, b, c = (tokeniser.encode(each, add_special=False)[0] for each in "abc")
    served = Served(folder, lambda _: [c])
    choice = complete(served, prompt=[a, b], echo=True, logprobs=2, max_tokens=1).choices[0]
    assert choice.text == "abc" and choice.logprobs.tokens == ["a", "b", "c"]
    assert choice.logprobs.text_offset == [0, 1, 2]
    assert choice.logprobs.token_logprobs == [None, -0.5 - b / 1000, -0.5 - c / 1000]
    assert len(choice.logprobs.top_logprobs[2]) == 2
    choice = complete(served, prompt=[a, b], echo=True, max_tokens=0).choices[0]
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("ab", "length", None)
    choice = complete(served, prompt=[a, b], prompt_logprobs=1, max_tokens=1).choices[0]
    assert choice.prompt_logprobs[0] is None
    own = choice.prompt_logprobs[1][str(b)]
    assert own == {"logprob": -0.5 - b / 1000, "rank": 1, "decoded_token": "b"}


def test_offsets_are_places_in_the_text(folder, tokeniser):
    served = Served(folder, lambda _: tokeniser.encode("cd", add_special=False))
    for skip, text, offsets in (
        (True, "abcd", [0, 0, 1, 2, 3, 4]),
        (False, "<bos>abcd", [0, 5, 6, 7, 8, 9]),
    ):
        choice = complete(
            served, prompt="ab", echo=True, logprobs=0, skip_special_tokens=skip
        ).choices[0]
        assert choice.text == text and choice.logprobs.text_offset == offsets


def test_special_tokens_are_shown_and_added_as_asked(folder, tokeniser):
    served = Served(folder, lambda _: [BOS])
    assert complete(served).choices[0].text == ""
    assert complete(served, skip_special_tokens=False).choices[0].text == "<bos>"
    whole = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert complete(served, **whole).choices[0].text == "<bos><eos>"
    assert [message["tokens"][0] for message in served.engine.added] == [BOS] * 3
    complete(served, add_special_tokens=False)
    assert served.engine.added[-1]["tokens"] == tokeniser.encode("a", add_special=False)


def test_prompts_are_cut_at_their_beginning(folder):
    served = Served(folder, lambda _: [], max_tokens=20)
    for cut, max_tokens, kept in ((3, 5, 3), (50, 5, 10), (-1, 12, 8)):
        complete(served, prompt=[*range(10)], truncate_prompt_tokens=cut, max_tokens=max_tokens)
        assert served.engine.added[-1]["tokens"] == [*range(10)][-kept:]


def test_a_stop_string_counts_only_behind_the_least_number_of_tokens(folder, tokeniser):
    served = Served(folder, lambda _: tokeniser.encode("axbxcx", add_special=False))
    assert complete(served, stop="x").choices[0].text == "a"
    assert complete(served, stop="x", min_tokens=2).choices[0].text == "axb"
    assert complete(served, stop="x", min_tokens=4).choices[0].text == "axbxc"


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"prompt": [5] * 101}, openai.BadRequestError, r"= 101 \+ 300: at most 400 tokens fit"),
        ({"prompt": [5] * 500}, openai.BadRequestError, r"= 500 \+ 300: at most 400 tokens fit"),
        ({"prompt": [5, VOCABULARY]}, openai.BadRequestError, "prompt = 259: is no token id"),
        ({"prompt": []}, openai.BadRequestError, "prompt = "),
        ({"temperature": -1}, openai.BadRequestError, "temperature = -1"),
        ({"logit_bias": {"9999": 1}}, openai.BadRequestError, "logit_bias = 9999: is no token"),
        ({"model": "gpt"}, openai.NotFoundError, "model = 'gpt': .*legal values: tiny, small"),
    ],
)
def test_refusals_are_the_clients_own_exceptions(folder, options, kind, words):
    for stream in (False, True):
        with pytest.raises(kind, match=words) as caught:
            complete(
                Served(folder, lambda _: [], adapters={"small": "x"}), stream=stream, **options
            )
        assert caught.value.code == "serve/request" and caught.value.param
        assert caught.value.response.headers["x-request-id"]


def test_a_full_queue_is_429_and_a_dead_engine_503_with_a_time_to_try_again(folder):
    async def many(client):
        calls = [client.completions.create(model="tiny", prompt="a", n=2) for _ in range(3)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        served.engine.holds = True
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        served.engine.holds = False
        return await asyncio.gather(*tasks, return_exceptions=True)

    served = Served(folder, lambda _: [5], max_running=1, max_queued=3, max_step_tokens=1)
    answers = asyncio.run(served.use(many))
    (refused,) = [each for each in answers if isinstance(each, Exception)]
    assert isinstance(refused, openai.RateLimitError) and "the queue is full" in str(refused)
    assert refused.response.headers["retry-after"] == "1"
    for stream in (False, True):  # before the first token the status can still tell
        dead = Served(folder, lambda _: [5])
        dead.engine.fails_after = 0
        with pytest.raises(openai.InternalServerError, match="signal 9") as caught:
            complete(dead, stream=stream)
        assert caught.value.status_code == 503 and dead.client.num_live == 0
    dying = Served(folder, lambda _: [5] * 9)
    dying.engine.fails_after = 3
    with pytest.raises(openai.APIError, match="signal 9"):
        complete(dying, stream=True, n=2)
    assert dying.client.num_live == 0


def test_adapters_are_models(folder):
    served = Served(folder, lambda _: [5], adapters={"small": "x"})

    async def listed(client):
        return [model.id async for model in client.models.list()]

    assert asyncio.run(served.use(listed)) == ["tiny", "small"]
    answer = complete(served, model="small")
    assert (answer.model, answer.system_fingerprint) == ("small", "tiny@0+small@0")
    assert [message["adapter"] for message in served.engine.added] == ["small"]


# ---- tokens in, tokens out -----------------------------------------------------------------------


def post(served: Served, path: str, body, **options):
    """Status and JSON of a request; the events of a stream."""

    async def call():
        async with served.http() as http:
            answer = await http.post(path, json=body, **options)
        if answer.headers["content-type"].startswith("text/event-stream"):
            events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
            assert events.pop() == "[DONE]"
            return answer.status_code, [json.loads(each) for each in events]
        return answer.status_code, answer.json()

    return asyncio.run(call())


def test_tokens_go_in_and_come_out_with_the_weights_that_made_them(folder):
    served = Served(folder, lambda prompt: prompt, adapters={"small": "x"})
    body = {"prompt_token_ids": [7, 8], "sampling": {"logprobs": 0, "max_tokens": 9}}
    status, answer = post(served, "/generate", body | {"model": "small"})
    assert status == 200 and answer["token_ids"] == [7, 8, EOS]
    assert answer["logprobs"] == [-0.507, -0.508, -0.5 - EOS / 1000]
    assert answer["weight_version"] == "tiny@0+small@0"
    assert answer["weight_versions"] == [["tiny@0+small@0", 3]]
    assert answer["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == 3
    status, events = post(served, "/generate", body | {"stream": True})
    assert [token for event in events for token in event["token_ids"]] == answer["token_ids"]
    assert [event["finish_reason"] for event in events] == [None, None, "stop"]
    assert events[0]["weight_version"] == "tiny@0"


def test_text_becomes_tokens_and_text_again(folder):
    served = Served(folder, lambda _: [])
    status, answer = post(served, "/tokenize", {"prompt": "h\u20ac", "return_token_strs": True})
    assert status == 200 and answer["count"] == len(answer["tokens"]) == 5
    assert answer["max_model_len"] == 400 and answer["token_strs"][:2] == ["<bos>", "h"]
    status, back = post(served, "/detokenize", {"tokens": answer["tokens"]})
    assert back == {"prompt": "<bos>h\u20ac"}
    assert post(served, "/detokenize", {"tokens": [VOCABULARY]})[0] == 400
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    tokens = post(served, "/tokenize", chat)[1]["tokens"]
    text = post(served, "/detokenize", {"tokens": tokens})[1]["prompt"]
    assert text == "<bos><turn>user\nhi<eos>\n<turn>assistant\n"
