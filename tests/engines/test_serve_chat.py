"""Laws of the chat interface: conversations into prompts, answers as the official client reads."""

from __future__ import annotations

import asyncio

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.engines.serve.chat import ChatRenderer, parse_chat
from phalanx.engines.serve.text import Tokeniser
from phalanx.errors import JobError
from tests.engines.serve_scripts import BOS, EOS, TURN, Served, write_folder

USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
# shows all that a template may read of a turn
OPEN_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.name }}"
    "|{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}"
    "|{{ m.tool_call_id }}]{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("chat") / "tiny")


@pytest.fixture(scope="module")
def tokeniser(folder) -> Tokeniser:
    return Tokeniser(folder)


@pytest.fixture(scope="module")
def renderer(folder) -> ChatRenderer:
    return ChatRenderer.from_folder(folder)


def chat(served: Served, **options):
    """One call; a stream as the list of its parts."""

    async def call(client: openai.AsyncOpenAI):
        extra = options.pop("extra_body", {})
        body = {"model": "tiny", "messages": [USER]} | options
        answer = await client.chat.completions.create(**body, extra_body=extra)
        return [part async for part in answer] if options.get("stream") else answer

    return asyncio.run(served.use(call))


# ---- bodies --------------------------------------------------------------------------------------


def test_a_conversation_becomes_the_templates_text_with_an_open_turn(renderer):
    said = [{"role": "system", "content": "be"}, USER, {"role": "assistant", "content": "yo"}, USER]
    asked = parse_chat({"messages": said, "seed": 1}, renderer)
    assert asked.prompts == (
        "<bos><turn>system\nbe<eos>\n<turn>user\nhi<eos>\n<turn>assistant\nyo<eos>\n"
        "<turn>user\nhi<eos>\n<turn>assistant\n",
    )
    assert asked.max_new is None and asked.sampling.temperature == 1.0 and not asked.add_special
    closed = parse_chat({"messages": [USER], "add_generation_prompt": False}, renderer)
    assert closed.prompts == ("<bos><turn>user\nhi<eos>\n",)


def test_content_may_be_parts_of_text(renderer):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    for message in ({"role": "user", "content": parts}, {"role": "user", "content": "hi"}):
        assert "user\nhi<eos>" in parse_chat({"messages": [message]}, renderer).prompts[0]
    newer = {"role": "developer", "content": "be"}
    assert "<turn>system\nbe" in parse_chat({"messages": [newer, USER]}, renderer).prompts[0]


def test_a_template_sees_all_of_a_turn(tmp_path):
    renderer = ChatRenderer.from_folder(write_folder(tmp_path / "open", OPEN_TEMPLATE))
    said = [
        {"role": "user", "content": "hi", "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "content": "", "tool_call_id": "1"},
        {"role": "assistant", "content": ""},
    ]
    text = parse_chat({"messages": said}, renderer).prompts[0]
    assert text == "[user|hi|me||][assistant|||1|][tool||||1][assistant||||]"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": None}, "messages: must be a list"),
        ({"messages": []}, r"messages = \[\]: must be a list of 1"),
        ({"messages": ["hi"]}, r"messages\[0\] = 'hi': must be a JSON object"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\]\.content: must be given"),
        ({"messages": [{"role": "boss", "content": "x"}]}, r"role = 'boss': is no role; .*system"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\]\.role: is no role"),
        ({"messages": [USER | {"content": 3}]}, r"messages\[0\]\.content = 3: must be a text or"),
        ({"messages": [USER | {"content": "\ud83d"}]}, "half a surrogate pair"),
        ({"messages": [USER | {"mood": "x"}]}, r"messages\[0\]\.mood: no such parameter"),
        (
            {"messages": [USER | {"content": [{"type": "image_url", "image_url": {}}]}]},
            r"content\[0\]\.type = 'image_url': this server takes text",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [3]}]},
            r"messages\[0\]\.tool_calls\[0\] = 3: must name the function",
        ),
        (
            {"messages": [USER, {"role": "tool", "content": "7"}]},
            r"messages = \['user', 'tool'\]: the chat template refuses .*tools are not for me",
        ),
        ({"tools": [{"type": "function"}]}, "tools = .*is not supported by this server"),
        ({"response_format": {"type": "json_object"}}, "response_format = .*is not supported"),
        ({"top_logprobs": 2}, "top_logprobs = 2: needs logprobs = true"),
        ({"logprobs": 2}, "logprobs = 2: must be true or false"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "is another limit"),
        ({"prompt": "x"}, "prompt: no such parameter"),
    ],
)
def test_wrong_conversations_are_named(renderer, change, words):
    with pytest.raises(JobError, match=words) as caught:
        parse_chat({"messages": [USER]} | change, renderer)
    assert caught.value.code == "serve/request" and len(str(caught.value).splitlines()) == 1


def test_a_template_that_is_none_is_named(tmp_path):
    folder = write_folder(tmp_path / "broken", template="{% if %}")
    with pytest.raises(JobError, match="chat_template:1: is no jinja2 template"):
        ChatRenderer.from_folder(folder)


def test_a_folder_without_a_template_says_so(tmp_path):
    served = Served(write_folder(tmp_path / "plain", template=""), lambda _: [5])
    with pytest.raises(openai.BadRequestError, match="has no chat template; use /v1/completions"):
        chat(served)


# ---- answers -------------------------------------------------------------------------------------


def test_the_prompt_is_the_templates_own_tokens_and_nothing_added(folder, tokeniser):
    served = Served(folder, lambda _: tokeniser.encode("yes", add_special=False))
    answer = chat(served)
    tokens = served.engine.added[0]["tokens"]
    assert tokens[:2] == [BOS, TURN] and tokens.count(BOS) == 1 and tokens.count(EOS) == 1
    assert answer.choices[0].message.content == "yes"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop" and answer.object == "chat.completion"
    assert answer.usage.prompt_tokens == len(tokens) and answer.usage.completion_tokens == 4
    assert answer.system_fingerprint == "tiny@0" and answer.id.startswith("chatcmpl-")


def test_an_answer_may_be_as_long_as_the_context_has_room(folder):
    served = Served(folder, lambda _: [5] * 1000, max_tokens=100)
    answer = chat(served)
    prompt_len = answer.usage.prompt_tokens
    assert answer.usage.total_tokens == 100 and answer.choices[0].finish_reason == "length"
    for name in ("max_tokens", "max_completion_tokens"):
        assert chat(served, **{name: 7}).usage.completion_tokens == 7
    with pytest.raises(openai.BadRequestError, match=r"= \d+ \+ 1: at most 100 tokens fit"):
        chat(served, messages=[USER | {"content": "x" * 200}])
    with pytest.raises(openai.BadRequestError, match=rf"= {prompt_len} \+ 99: at most 100"):
        chat(served, max_tokens=99)


@settings(max_examples=20, deadline=None)
@given(
    reply=st.text(max_size=20) | st.text("ab\u20ac", max_size=30),
    stop=st.none() | st.text("ab\u20ac", min_size=1, max_size=3),
    num=st.integers(1, 2),
)
def test_deltas_join_to_the_whole_message(folder, tokeniser, reply, stop, num):
    ids = tokeniser.encode(reply, add_special=False)
    options = {"stop": stop, "n": num, "logprobs": True, "top_logprobs": 1}
    whole = chat(Served(folder, lambda _: ids), **options)
    parts = chat(
        Served(folder, lambda _: ids),
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    last = parts.pop()
    assert last.choices == [] and last.usage == whole.usage
    assert all(part.usage is None and part.object == "chat.completion.chunk" for part in parts)
    assert len({part.id for part in parts}) == 1
    for choice in whole.choices:
        own = [part.choices[0] for part in parts if part.choices[0].index == choice.index]
        assert (own[0].delta.role, own[0].delta.content) == ("assistant", "")
        assert all(part.delta.role is None for part in own[1:])
        assert "".join(part.delta.content or "" for part in own) == choice.message.content
        reasons = [part.finish_reason for part in own]
        assert reasons == [None] * (len(own) - 1) + [choice.finish_reason]
        scores = [each for part in own if part.logprobs for each in part.logprobs.content]
        assert scores == choice.logprobs.content
        want = reply.split(stop)[0] if stop else reply
        assert choice.message.content == want


def test_scores_come_with_bytes_so_that_parts_of_characters_can_be_joined(folder, tokeniser):
    served = Served(folder, lambda _: tokeniser.encode("\u20ac", add_special=False))
    choice = chat(served, logprobs=True, top_logprobs=2).choices[0]
    content = choice.logprobs.content
    assert bytes(byte for each in content[:3] for byte in each.bytes) == "\u20ac".encode()
    assert [len(each.top_logprobs) for each in content] == [2] * 4
    assert content[0].logprob == pytest.approx(content[0].top_logprobs[0].logprob)
    assert chat(served, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert chat(served).choices[0].logprobs is None


def test_extra_fields_reach_the_answer(folder):
    served = Served(folder, lambda _: [5])
    extra = {"return_token_ids": True, "top_k": 3, "prompt_logprobs": 0}
    choice = chat(served, extra_body=extra).choices[0]
    assert choice.token_ids == [5, EOS] and len(choice.prompt_logprobs) > 5
    assert served.engine.added[0]["sampling"]["top_k"] == 3
