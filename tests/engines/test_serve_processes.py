"""The processes of a server: what is refused before they start, and what happens when one ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest

from phalanx.engines.serve import start_server
from phalanx.engines.serve.core import make_engine as engine_of_folder
from phalanx.engines.serve.settings import ServeSettings
from phalanx.errors import JobError, PlanError
from tests.engines.serve_cases import prompt_of, write_model
from tests.engines.serve_clients import OPTIONS, ask, expected, wait_until, write_text_model

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("processes") / "tiny")


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(each) for each in text.split()]


def refusal_of(query: str | urllib.request.Request) -> bytes:
    """What a 503 says; nothing while requests are answered."""
    try:
        urllib.request.urlopen(query, timeout=10).close()
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return error.read()
    return b""


def test_health_fails_when_the_engine_is_dead_although_http_lives(folder):
    with start_server(folder, **OPTIONS) as server:
        with urllib.request.urlopen(f"{server.url}/health", timeout=10) as answer:
            assert json.load(answer)["status"] == "ok"
        (core,) = children_of(server._process.pid)
        os.kill(core, signal.SIGKILL)
        wait_until(lambda: b"ended with signal 9" in refusal_of(f"{server.url}/health"))
        completion = urllib.request.Request(f"{server.url}/v1/completions", b'{"prompt": [5]}')
        assert b"ended with signal 9" in refusal_of(completion)


def test_health_fails_when_the_engines_loop_stands_still(folder):
    with start_server(folder, stall_s=1.5, **OPTIONS) as server:
        (core,) = children_of(server._process.pid)
        os.kill(core, signal.SIGSTOP)
        try:
            wait_until(lambda: b"without progress" in refusal_of(f"{server.url}/health"))
        finally:
            os.kill(core, signal.SIGCONT)
        wait_until(lambda: not refusal_of(f"{server.url}/health"))


def test_a_model_without_a_tokenizer_serves_token_ids(tmp_path):
    with start_server(write_model(tmp_path / "bare"), **OPTIONS) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        choice = ask(client, prompt_of(9), model="bare", logprobs=0).choices[0]
        assert choice.token_ids == expected(prompt_of(9), 12) and choice.text == ""
        assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
        for wrong, words in (
            ({"prompt": "a"}, "send token ids"),
            ({"stop": "a"}, "stop_token_ids"),
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                ask(client, **{"prompt": [5], "model": "bare"} | wrong)


def test_no_process_outlives_a_server_that_was_killed(folder):
    server = start_server(folder, **OPTIONS)
    (core,) = children_of(server._process.pid)
    server._process.kill()
    server.close()
    wait_until(lambda: not Path(f"/proc/{core}").exists())


def test_a_taken_port_is_named_before_anything_starts(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = f"127.0.0.1:{port}: cannot be listened on: address already in use"
        with pytest.raises(JobError, match=words):
            start_server(folder, port=port, **OPTIONS)


def test_folders_that_hold_no_model_are_named(tmp_path, folder):
    with pytest.raises(JobError, match=r"has no config\.json"):
        start_server(tmp_path)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(JobError, match="holds no safetensors weights"):
        start_server(tmp_path)
    with pytest.raises(JobError, match=r"max_tokens = 9999: .*legal values: 512"):
        start_server(folder, max_tokens=9999)
    with pytest.raises(JobError, match="nearest legal values: continuous"):
        start_server(folder, scheduler="continous", **OPTIONS)


def test_what_only_the_engine_can_know_comes_back_as_the_same_error(folder):
    scheduler = {"name": "continuous", "chunk": 64}
    with pytest.raises(PlanError, match=r"chunk = 64: must lie in 1..32"):
        start_server(folder, scheduler=scheduler, **OPTIONS)
    for options, words in (
        ({"kv_tokens": 100}, "kv_tokens = 100: the KV cache must hold the longest request"),
        ({"device": "cuda:77"}, "device = 'cuda:77': torch has no such device here"),
    ):
        settings = ServeSettings(folder=str(folder), scheduler="continuous", **OPTIONS | options)
        with pytest.raises(JobError, match=words):
            engine_of_folder(settings)


def test_the_command_line_says_what_fits_and_ends_with_its_interrupt(folder):
    command = [sys.executable, "-m", "phalanx.cli", "serve", str(folder), "--port", "0"]
    command += ["--max-running", "3", "--max-tokens", "100", "--threads", "1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        url = process.stdout.readline().strip()
        answer = urllib.request.urlopen(f"{url}/v1/models", timeout=10).read()
        assert b'"max_model_len":100' in answer
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert "up to 3 requests at once, 100 tokens each" in err and out == ""
    assert "Traceback" not in err
    assert process.returncode in (0, 130)
