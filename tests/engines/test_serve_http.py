"""The server as its clients see it: the official client, raw sockets, the load test."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from phalanx.bench_load import load_test
from phalanx.engines.serve import ServerHandle, start_server
from phalanx.errors import JobError, WorldError
from tests.engines.serve_cases import VOCABULARY, prompt_of, write_model
from tests.engines.serve_clients import OPTIONS, ask, expected, wait_until, write_text_model

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("serve") / "tiny")


@pytest.fixture(scope="module")
def server(folder) -> Iterator[ServerHandle]:
    with start_server(folder, max_queued=2, admin=True, **OPTIONS) as handle:
        yield handle


@pytest.fixture
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def metric(server: ServerHandle, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"phalanx_{name} ")))


def is_idle(server: ServerHandle) -> bool:
    """No request is known, and the cache is empty."""
    names = ("requests_running", "requests_waiting", "kv_usage_ratio")
    return all(metric(server, name) == 0 for name in names)


# ---- the official client -------------------------------------------------------------------------


def test_the_official_client_gets_the_engines_tokens(client):
    prompt = prompt_of(20)
    answer = ask(client, prompt)
    assert answer.choices[0].token_ids == expected(prompt, 12)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens"}) == {
        "prompt_tokens": 20,
        "completion_tokens": 12,
    }
    assert answer.system_fingerprint == "tiny@0"
    assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_streamed_parts_join_to_the_whole_answer(client, temperature):
    options = {"seed": 5, "logprobs": 1, "temperature": temperature}
    whole = ask(client, "Hello", 20, **options).choices[0]
    parts = list(ask(client, "Hello", 20, stream=True, **options))
    assert "".join(part.choices[0].text for part in parts) == whole.text
    assert [t for part in parts for t in part.choices[0].token_ids] == whole.token_ids
    joined = [p for part in parts for p in part.choices[0].logprobs.token_logprobs]
    assert joined == pytest.approx(whole.logprobs.token_logprobs, abs=1e-5)
    assert [part.choices[0].finish_reason for part in parts] == [None] * 19 + ["length"]


def test_usage_comes_last_in_a_stream_that_asks_for_it(client):
    parts = list(ask(client, [5, 6, 7], 4, stream=True, stream_options={"include_usage": True}))
    assert parts[-1].choices == [] and parts[-1].usage.completion_tokens == 4
    assert len(parts) == 5


def test_several_prompts_and_choices_keep_their_places(client):
    prompts = [prompt_of(5), prompt_of(9)]
    answer = client.completions.create(
        model="tiny",
        prompt=prompts[:1],
        n=3,
        seed=4,
        temperature=1.0,
        max_tokens=8,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3
    answer = ask(client, prompts, 6)
    assert [c.token_ids for c in answer.choices] == [expected(p, 6) for p in prompts]
    assert answer.usage.prompt_tokens == 14


def test_a_stop_string_ends_the_text_and_the_request(server, client):
    whole = ask(client, "Hello", 20).choices[0]
    at = next(
        i for i in range(3, len(whole.text) - 1) if whole.text[i : i + 2] not in whole.text[:i]
    )
    stop = whole.text[at : at + 2]
    choice = ask(client, "Hello", 20, stop=[stop]).choices[0]
    assert choice.text == whole.text[: whole.text.index(stop)]
    assert choice.finish_reason == "stop"
    streamed = ask(client, "Hello", 20, stop=stop, stream=True)
    assert "".join(part.choices[0].text for part in streamed) == choice.text
    wait_until(lambda: is_idle(server))


def test_echo_with_logprobs_scores_the_prompt(client):
    text = "Hello,there"
    choice = ask(client, text, 1, echo=True, logprobs=1).choices[0]
    assert choice.text.startswith(text) and len(choice.text) == len(text) + 1
    logprobs = choice.logprobs
    assert logprobs.token_logprobs[0] is None and len(logprobs.token_logprobs) == len(text) + 1
    assert all(p < 0 for p in logprobs.token_logprobs[1:])
    assert logprobs.text_offset == list(range(len(text) + 1))
    none = ask(client, text, 0, echo=True, logprobs=1)
    assert none.choices[0].text == text and none.usage.completion_tokens == 0
    assert none.choices[0].logprobs.token_logprobs == pytest.approx(
        logprobs.token_logprobs[:-1], abs=1e-5
    )


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": [5] * 125}, r"= 125 \+ 12: at most 128 tokens fit .* max_tokens <= 3"),
        ({"prompt": [5] * 300}, r"= 300 \+ 12: at most 128 tokens fit"),
        ({"prompt": [5, VOCABULARY]}, r"prompt = 101: is no token id"),
        ({"prompt": ""}, "at least one token"),
        ({"prompt": "a", "temperature": -1}, "temperature = -1"),
    ],
)
def test_what_cannot_be_served_is_a_400_that_says_why(client, options, words):
    with pytest.raises(openai.BadRequestError, match=words):
        ask(client, **options)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b'{"temperature": NaN}', "NaN is no JSON number"),
        (b'{"n": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"prompt": "a\\ud83d"}', "half a surrogate pair"),
    ],
)
def test_a_body_that_cannot_be_read_is_a_400(server, body, words):
    post = urllib.request.Request(f"{server.url}/v1/completions", body, method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(post, timeout=10)
    assert caught.value.code == 400
    assert words in json.load(caught.value)["error"]["message"]


def test_a_full_queue_is_a_429_at_once(server):
    async def many(number: int) -> list[object]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            calls = [
                client.completions.create(
                    model="tiny", prompt=[7, 8], max_tokens=100, extra_body={"ignore_eos": True}
                )
                for _ in range(number)
            ]
            return await asyncio.gather(*calls, return_exceptions=True)

    answers = asyncio.run(many(9))
    refused = [each for each in answers if isinstance(each, openai.RateLimitError)]
    served = [each for each in answers if not isinstance(each, Exception)]
    assert len(served) >= 5 and len(refused) == 9 - len(served) and refused
    assert "the queue is full: at most 5 requests run or wait" in str(refused[0])
    assert all(each.usage.completion_tokens == 100 for each in served)
    wait_until(lambda: is_idle(server))


# ---- clients that go, weights that change --------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_client_that_goes_frees_its_cache(server, path, is_stream):
    own = {
        "/v1/completions": {"prompt": [7] * 20, "max_tokens": 108, "ignore_eos": True},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "h" * 19}],
            "max_tokens": 108,
            "ignore_eos": True,
        },
        "/generate": {
            "prompt_token_ids": [7] * 20,
            "sampling": {"max_tokens": 108, "ignore_eos": True},
        },
    }[path]
    content = json.dumps(own | {"stream": is_stream}).encode()
    made = "generation_tokens_total"
    before = metric(server, made)
    connections = []
    for _ in range(4):  # one of them waits
        sock = socket.create_connection(server.url.removeprefix("http://").split(":"), timeout=10)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        sock.sendall(head.encode() + content)
        connections.append(sock)
    wait_until(lambda: metric(server, made) > before)
    for sock in connections:
        sock.close()
    wait_until(lambda: is_idle(server))
    assert metric(server, made) - before < 4 * 108


def test_weights_change_in_place_and_answers_name_them(server, client, tmp_path):
    def update(path: Path, version: str) -> dict:
        body = json.dumps({"folder": str(path), "version": version}).encode()
        post = urllib.request.Request(f"{server.url}/update_weights", body, method="POST")
        with urllib.request.urlopen(post, timeout=30) as answer:
            return json.load(answer)

    before = ask(client, prompt_of(9))
    with pytest.raises(urllib.error.HTTPError) as caught:
        update(tmp_path, "none@1")
    assert caught.value.code == 400 and "no config.json" in caught.value.read().decode()
    assert ask(client, prompt_of(9)).choices == before.choices
    assert update(write_model(tmp_path / "new", seed=3), "new@1") == {"weight_version": "new@1"}
    after = ask(client, prompt_of(9))
    assert after.system_fingerprint == "new@1"
    assert after.choices[0].token_ids != before.choices[0].token_ids
    update(Path(server.settings.folder), "tiny@0")
    assert ask(client, prompt_of(9)).choices == before.choices


# ---- load test -----------------------------------------------------------------------------------


def test_a_load_test_reports_what_the_clients_saw(server):
    prompts = [prompt_of(n) for n in (3, 10, 20, 30)]
    report = load_test(server.url, prompts, output_tokens=6, concurrency=2)
    value = {row.quantity: row.value for row in report.rows}
    assert {row.source for row in report.rows} == {"measured"}
    assert (value["load/requests"], value["load/failed requests"]) == (4, 0)
    assert value["load/output tokens per second"] == pytest.approx(24 / value["load/duration"])
    assert value["load/tokens per second"] == pytest.approx((24 + 63) / value["load/duration"])
    for name in ("TTFT", "TPOT", "ITL", "latency"):
        assert 0 < value[f"load/{name} median"] <= value[f"load/{name} P99"]
    assert value["load/TTFT mean"] < value["load/latency mean"] <= value["load/duration"]
    assert value["load/TPOT mean"] == pytest.approx(value["load/ITL mean"], rel=1e-3)


def test_a_load_test_says_why_nothing_was_served(server):
    with pytest.raises(WorldError, match=r"all 1 requests failed.*status 400.*at most 128 tokens"):
        load_test(server.url, [[5] * 200])
    with pytest.raises(WorldError, match="cannot be reached"):
        load_test("http://127.0.0.1:9", ["a"])
    with pytest.raises(JobError, match="must be the address"):
        load_test("localhost", ["a"])
