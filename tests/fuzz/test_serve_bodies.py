"""Bodies of all routes: an answer or one clear line with a listed code, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.errors import CODES
from tests.engines.serve_scripts import Served, write_folder
from tests.fuzz.inputs import json_values, near_bytes, near_tables, near_texts

SAMPLING = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 3,
    "max_tokens": 4,
    "min_tokens": 1,
    "stop_token_ids": [7],
    "ignore_eos": True,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5, "6": -1},
    "logprobs": 2,
    "prompt_logprobs": 1,
}
COMMON = SAMPLING | {
    "model": "tiny",
    "n": 2,
    "stop": ["x", "\u20ac"],
    "stream": False,
    "truncate_prompt_tokens": 9,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "return_token_ids": True,
}
CHAT = {
    "messages": [
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "me"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "user", "content": "so"},
    ]
}
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": COMMON | {"prompt": ["a", "b"], "echo": True},
    "/v1/chat/completions": COMMON | CHAT | {"logprobs": True, "top_logprobs": 1},
    "/generate": {"prompt_token_ids": [5, 6], "sampling": SAMPLING, "model": "tiny"},
    "/tokenize": {"prompt": "ab", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6], "model": "tiny"},
    "/update_weights": {"folder": "/x", "version": "tiny@1"},
    "/v1/load_lora_adapter": {"lora_name": "small", "lora_path": "missing"},
    "/v1/unload_lora_adapter": {"lora_name": "small"},
    "/sleep": {"level": 1, "abort": False},
}
PATHS = sorted(VALID)


class Door:
    """One application on one event loop."""

    def __init__(self, served: Served) -> None:
        self.served, self.runner = served, asyncio.Runner()
        self.http = served.http()

    def send(self, path: str, content: bytes) -> httpx.Response:
        """The answer to a body, looked at; a server that fell asleep is woken."""
        return self.runner.run(self._send(path, content))

    async def _send(self, path: str, content: bytes) -> httpx.Response:
        async with asyncio.timeout(20):
            answer = await self.http.post(path, content=content)
            await self.http.post("/wake_up")
        status = answer.status_code
        assert 200 <= status < 300 or 400 <= status < 500, (status, answer.text)
        if status >= 400:
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["code"] in CODES and error["type"].endswith("_error")
            assert len(error["message"].splitlines()) == 1 and len(error["message"]) < 2000
        assert self.served.client.num_live == 0 and not self.served.engine.open
        return answer


@pytest.fixture(scope="module")
def door(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("fuzz") / "tiny")
    return Door(Served(folder, lambda _: [70, 300 % 259], max_tokens=120))


def test_the_valid_ones_are_answered(door):
    for path, body in VALID.items():
        status = door.send(path, json.dumps(body).encode()).status_code
        assert status == (400 if path == "/v1/load_lora_adapter" else 200), path
    streamed = {"stream": True, "stream_options": {"include_usage": True}, "prompt_logprobs": None}
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = door.send(path, json.dumps(VALID[path] | streamed).encode())
        assert answer.text.endswith("data: [DONE]\n\n")


@settings(max_examples=60, deadline=None)
@given(path=st.sampled_from(PATHS), content=st.binary() | st.text().map(str.encode))
@example(path="/v1/completions", content=b"[" * 100_000)
@example(path="/v1/completions", content=b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}")
@example(path="/v1/completions", content=b'{"n": ' + b"9" * 5000 + b"}")
@example(path="/v1/completions", content=b'{"temperature": 1e999, "prompt": "a"}')
@example(path="/v1/completions", content=b'{"temperature": -Infinity, "prompt": "a"}')
@example(path="/v1/completions", content=b'{"prompt": "\\ud83d"}')
@example(path="/v1/completions", content=b'{"\\ud83d": 1}')
@example(path="/v1/completions", content=b'{"model": "\\ud83d", "prompt": "a"}')
@example(path="/v1/completions", content=b'{"prompt": "a", "stop": "\\ud83d"}')
@example(path="/v1/completions", content=b'{"prompt": "a", "user": "\\ud83d"}')
@example(path="/v1/chat/completions", content=b'{"messages": [{"\\udfff": 1}]}')
@example(path="/v1/load_lora_adapter", content=b'{"lora_name": "\\udfff", "lora_path": "x"}')
@example(path="/v1/completions", content=b"\xff\xfe{\x00}\x00")
@example(path="/sleep", content=b"{}")
def test_any_bytes_are_answered_or_refused(door, path: str, content: bytes):
    door.send(path, content)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("path", PATHS)
def test_slips_of_the_pen_are_refused_or_harmless(door, path: str, data: st.DataObject):
    text = json.dumps(VALID[path])
    content = data.draw(near_texts(text).map(lambda each: each.encode("utf-8", "surrogatepass")))
    door.send(path, content)
    door.send(path, data.draw(near_bytes(text.encode())))


surrogates = st.text(st.characters(min_codepoint=0xD700, max_codepoint=0xE000, categories=["Cs"]))


@settings(max_examples=120, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("path", PATHS)
def test_wrong_entries_are_refused_or_harmless(door, path: str, data: st.DataObject):
    body = data.draw(near_tables(VALID[path], json_values | surrogates))
    if data.draw(st.booleans()):
        body = body | {"stream": True}
    door.send(path, json.dumps(body).encode())
