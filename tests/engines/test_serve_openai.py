"""What the official client makes of answers and errors; tokens in, tokens out."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.engines.serve.text import Tokeniser
from tests.engines.serve_scripts import BOS, EOS, VOCABULARY, Served, write_folder

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


@settings(max_examples=25, deadline=None)
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
    found = [(at + len(stop), at) for stop in stops if (at := made.find(stop)) >= 0]
    if found:
        end, at = min(found)
        assert choice.text == made[: end if keep else at] and choice.finish_reason == "stop"
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
    euro = Served(folder, lambda _: tokeniser.encode("a\u20acb", add_special=False))
    whole = complete(euro, logprobs=1, stop="b").choices[0]
    assert whole.text == "a\u20ac" and whole.logprobs.text_offset == [0, 1, 1, 1, 2]
    assert whole.logprobs.tokens[1:4] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]


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
        ({"n": 128, "prompt": "a"}, openai.BadRequestError, "takes at most 24 requests at once"),
        ({"temperature": -1}, openai.BadRequestError, "temperature = -1"),
        ({"logit_bias": {"9999": 1}}, openai.BadRequestError, "logit_bias = 9999: is no token"),
        ({"model": "gpt"}, openai.NotFoundError, "model = 'gpt': .*legal values: tiny, small"),
    ],
)
def test_refusals_are_the_clients_own_exceptions(folder, options, kind, words):
    limits = {"max_running": 16, "max_queued": 8, "adapters": {"small": "x"}}
    for stream in (False, True):
        with pytest.raises(kind, match=words) as caught:
            complete(Served(folder, lambda _: [], **limits), stream=stream, **options)
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
    small = asyncio.run(served.use(lambda client: client.models.retrieve("small")))
    assert (small.id, small.parent) == ("small", "tiny")
    with pytest.raises(openai.NotFoundError, match="nearest legal values: tiny, small"):
        asyncio.run(served.use(lambda client: client.models.retrieve("large")))
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
