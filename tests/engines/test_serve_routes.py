"""The routes that tell how a server is or change it, request ids, and clients that go."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from phalanx.errors import CODES, WorldError
from tests.engines.serve_scripts import Served, write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("routes") / "tiny")


@pytest.fixture
def served(folder) -> Served:
    return Served(folder, lambda _: [5, 6])


def ask(served: Served, method: str, path: str, **options) -> httpx.Response:
    async def call() -> httpx.Response:
        async with asyncio.timeout(30), served.http() as http:
            return await http.request(method, path, **options)

    return asyncio.run(call())


def test_states_have_routes(served):
    assert ask(served, "GET", "/live").json() == {"status": "ok"}
    for path in ("/health", "/ping"):
        assert ask(served, "GET", path).json()["status"] == "ok"
    assert ask(served, "GET", "/load").json() == {"server_load": 0}
    assert ask(served, "GET", "/version").json()["weight_version"] == "tiny@0"
    metrics = ask(served, "GET", "/metrics")
    assert b"phalanx_requests_running 0.0" in metrics.content
    assert metrics.headers["content-type"].startswith("text/plain; version=")


def test_health_is_the_engines_and_live_the_front_ends(served):
    served.engine.error = WorldError("serve/engine", "engine", None, "ended with signal 9")
    for path in ("/health", "/ping"):
        answer = ask(served, "GET", path)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert "ended with signal 9" in answer.json()["error"]["message"]
    assert ask(served, "GET", "/live").status_code == 200
    refused = ask(served, "POST", "/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503


def test_every_answer_has_a_request_id(served):
    for path in ("/live", "/nowhere", "/v1/completions"):
        answer = ask(served, "GET", path, headers={"X-Request-Id": "mine-1"})
        assert answer.headers.get_list("x-request-id") == ["mine-1"]
    body = {"prompt": "a"}
    answer = ask(served, "POST", "/v1/completions", json=body, headers={"X-Request-Id": "abc"})
    assert answer.json()["id"] == "cmpl-abc"
    for wrong in ("", "x" * 129, "two words", "\xff"):
        headers = {"X-Request-Id": wrong.encode("latin-1")}
        made = ask(served, "GET", "/live", headers=headers).headers["x-request-id"]
        assert len(made) == 32 and made != wrong


def test_unknown_routes_and_methods_are_errors_in_the_same_form(served):
    for method, path, status, words in (
        ("POST", "/v1/completion", 404, "nearest legal values: /v1/completions"),
        ("GET", "/v1/completions", 405, "method not allowed"),
        ("POST", "/health", 405, "POST /health"),
    ):
        answer = ask(served, method, path)
        error = answer.json()["error"]
        assert answer.status_code == status and words in error["message"]
        assert error["code"] in CODES and error["type"]


def test_adapters_come_and_go_by_name(served):
    loaded = {"lora_name": "small", "lora_path": "/x"}
    answer = ask(served, "POST", "/v1/load_lora_adapter", json=loaded)
    assert answer.json() == {
        "status": "loaded",
        "lora_name": "small",
        "weight_version": "small@0",
    }
    names = [each["id"] for each in ask(served, "GET", "/v1/models").json()["data"]]
    assert names == ["tiny", "small"]
    body = {"prompt": "a", "model": "small"}
    assert ask(served, "POST", "/v1/completions", json=body).json()["model"] == "small"
    gone = ask(served, "POST", "/v1/unload_lora_adapter", json={"lora_name": "small"})
    assert gone.status_code == 200
    assert ask(served, "POST", "/v1/completions", json=body).status_code == 404
    for wrong, words in (
        ({"lora_name": "tiny", "lora_path": "/x"}, "is the name of the base model"),
        ({"lora_name": "small"}, "lora_path: must be given as a text"),
        ({"lora_name": "small", "lora_path": "missing"}, "folder = missing: is not there"),
        ({"lora_name": "small", "lora_path": 3}, "lora_path = 3: must be a text"),
    ):
        answer = ask(served, "POST", "/v1/load_lora_adapter", json=wrong)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]


def test_weights_are_replaced_by_name(served):
    body = {"folder": "/x", "version": "tiny@1"}
    assert ask(served, "POST", "/update_weights", json=body).json() == {"weight_version": "tiny@1"}
    answer = ask(served, "POST", "/update_weights", json=body | {"folder": "missing"})
    assert answer.status_code == 400
    assert ask(served, "POST", "/update_weights", json={"folder": "/x"}).status_code == 400


def test_an_engine_that_sleeps_refuses_until_it_is_woken(served):
    body = {"prompt": "a"}
    for options in ({"params": {"level": 2}}, {"json": {"level": 1}}, {}):
        assert ask(served, "POST", "/sleep", **options).json()["status"] == "asleep"
        refused = ask(served, "POST", "/v1/completions", json=body)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "serve/asleep"
        assert ask(served, "POST", "/wake_up").json() == {"status": "awake"}
        assert ask(served, "POST", "/v1/completions", json=body).status_code == 200
    for wrong in ({"level": 3}, {"level": "deep"}, {"depth": 1}):
        assert ask(served, "POST", "/sleep", params=wrong).status_code == 400


def test_without_admin_nothing_can_be_changed(folder):
    served = Served(folder, lambda _: [5], admin=False)
    for path in ("/update_weights", "/v1/load_lora_adapter", "/sleep", "/wake_up"):
        assert ask(served, "POST", path, json={}).status_code == 404


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 3}),
        ("/generate", {"prompt_token_ids": [5]}),
    ],
)
def test_a_client_that_goes_cancels_all_its_requests(served, path, body, is_stream):
    content = json.dumps(body | {"stream": is_stream}).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
    }

    async def call() -> None:
        gone = asyncio.Event()
        messages = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            return

        served.engine.holds = True
        serving = asyncio.ensure_future(served.app(scope, receive, send))
        async with asyncio.timeout(20):
            while not served.engine.open:
                await asyncio.sleep(0.001)
            assert served.client.num_live >= 1
            gone.set()
            await serving
        assert served.client.num_live == 0 and not served.engine.open

    asyncio.run(call())


def test_a_connection_that_breaks_ends_the_stream_quietly(served):
    async def call() -> None:
        messages = [{"type": "http.request", "body": b'{"prompt": "a", "stream": true}'}]

        async def receive():
            if messages:
                return messages.pop()
            await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        async def send(message):
            if message["type"] == "http.response.body":
                raise BrokenPipeError

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        scope |= {"query_string": b"", "raw_path": b"/v1/completions"}
        async with asyncio.timeout(20):
            await served.app(scope, receive, send)
        assert served.client.num_live == 0

    asyncio.run(call())


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_mistake_of_ours_is_a_500_that_tells_nothing_and_leaves_nothing(served, is_stream):
    """Not even to a stream, whose pieces are made in tasks of their own."""

    def fail(*_arguments, **_options):
        raise RuntimeError("secret")

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(served.app, raise_app_exceptions=False)
        async with (
            asyncio.timeout(30),
            httpx.AsyncClient(transport=transport, base_url="http://test") as http,
        ):
            return await http.post("/v1/completions", json={"prompt": "a", "stream": is_stream})

    served.tokeniser.decode = fail
    answer = asyncio.run(call())
    assert answer.status_code == 500 and "secret" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"
    assert served.client.num_live == 0
