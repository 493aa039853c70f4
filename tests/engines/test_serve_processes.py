"""The processes of a server: what is refused before they start, and what happens when one ends.

The model is real (and tiny), and so are all processes; what a front end concludes from each way to
stand still is tested without a model in test_serve_health.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import torch

from phalanx.cost.serving import ServeRates
from phalanx.engines.serve import ServerHandle, front, start_server
from phalanx.engines.serve.heartbeat import SILENT_S
from phalanx.engines.serve.settings import ServeSettings
from phalanx.engines.serve.start import make_engine as engine_of_folder
from phalanx.engines.serve.wire import encode, read_message
from phalanx.errors import JobError, PlanError
from phalanx.models.peft_folder import save_adapter
from phalanx.models.spec import LoraSpec, lora_tensors
from tests.engines.serve_cases import CONFIG, prompt_of, write_model
from tests.engines.serve_clients import OPTIONS, ask, expected, wait_until

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]
BLOCKING_PROMPT = prompt_of(13)
BLOCKING_POLICY = """
import time
from dataclasses import dataclass
from phalanx.policies.serve.continuous import Continuous
from phalanx.registry import Source, register

@register("serve", "blocking", grain="step", source=Source("a test", "none"))
@dataclass(frozen=True, kw_only=True)
class Blocking(Continuous):
    def on(self, state, events, view):
        if any(event.data.get("prompt_len") == 13 for event in events if event.kind == "arrive"):
            time.sleep(600)
        return super().on(state, events, view)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model without a tokenizer."""
    return write_model(tmp_path_factory.mktemp("processes") / "tiny")


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> Path:
    """A folder for PYTHONPATH with a scheduler of another package, whose decision may block."""
    path = tmp_path_factory.mktemp("policies")
    (path / "blocking_policy.py").write_text(BLOCKING_POLICY)
    info = path / "blocking_policy-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: blocking-policy\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[phalanx.policies]\nblocking = blocking_policy\n")
    return path


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """A PEFT folder whose factors change what the tiny model says."""
    lora = LoraSpec(rank=3, alpha=24.0, targets=("*",))
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: torch.randn(spec.shape, generator=generator) * 0.3
        for name, spec in lora_tensors(CONFIG, lora).items()
    }
    path = tmp_path_factory.mktemp("adapter") / "polite"
    return Path(save_adapter(path, CONFIG, lora, tensors.items()))


@pytest.fixture(scope="module")
def server(folder, policies) -> Iterator[ServerHandle]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(policies))
        settings = ServeSettings(
            folder=str(folder), scheduler="blocking", port=0, stall_s=2.0, admin=True, **OPTIONS
        )
        with ServerHandle(settings) as handle:
            yield handle


def core_of(server: ServerHandle) -> int:
    pid = server._process.pid
    (core,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(core)


def refusal_of(query: str | urllib.request.Request) -> bytes:
    """What a 503 says; nothing while requests are answered."""
    try:
        urllib.request.urlopen(query, timeout=60).close()
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return error.read()
    return b""


def metric(server: ServerHandle, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"phalanx_{name} ")))


def answer_of(server: ServerHandle, model: str = "tiny") -> tuple[list[int], str]:
    """Tokens and the version of the weights."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = ask(client, prompt_of(9), model=model)
    return answer.choices[0].token_ids, answer.system_fingerprint


def post(server: ServerHandle, path: str, **body: str) -> dict:
    query = urllib.request.Request(f"{server.url}{path}", json.dumps(body).encode())
    with urllib.request.urlopen(query, timeout=100) as answer:
        return json.load(answer)


async def fates_under(server: ServerHandle, harm, prompts) -> list[object]:
    """What becomes of requests, every other one streamed, when harm is done to the engine."""
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=100
    ) as client:

        async def one(number: int, prompt: list[int]) -> object:
            call = client.completions.create(
                model="tiny",
                prompt=prompt,
                max_tokens=100,
                stream=number % 2 == 1,
                extra_body={"ignore_eos": True},
            )
            answer = await call
            if number % 2 == 1:
                return [part async for part in answer]
            return answer

        calls = [asyncio.create_task(one(*each)) for each in enumerate(prompts)]
        while metric(server, "requests_running") + metric(server, "requests_waiting") < 2:
            await asyncio.sleep(0.005)
        harm()
        return await asyncio.gather(*calls, return_exceptions=True)


def require_ended_by_the_engine(fates: list[object]) -> None:
    """At least one request was lost, and each that was says why."""
    lost = [fate for fate in fates if isinstance(fate, BaseException)]
    assert lost
    for fate in lost:
        assert isinstance(fate, openai.APIError), fate
        assert fate.body["code"] == "serve/engine"
        if isinstance(fate, openai.APIStatusError):
            assert fate.status_code == 503 and fate.response.headers["retry-after"]


def require_recovery(
    server: ServerHandle, core: int, answer: tuple[list[int], str], restarts: float
) -> None:
    wait_until(lambda: not refusal_of(f"{server.url}/health"))
    assert core_of(server) != core
    assert answer_of(server) == answer
    assert metric(server, "engine_restarts_total") == restarts + 1
    assert metric(server, "engine_up") == 1


def test_a_model_without_a_tokenizer_serves_token_ids(server):
    assert server.engine["kv_tokens"] >= 3 * 128 and f"{server.url}:" in server.sentence
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    choice = ask(client, prompt_of(9), logprobs=0).choices[0]
    assert choice.token_ids == expected(prompt_of(9), 12) and choice.text == ""
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    for wrong, words in (({"prompt": "a"}, "send token ids"), ({"stop": "a"}, "stop_token_ids")):
        with pytest.raises(openai.BadRequestError, match=words):
            ask(client, **{"prompt": [5]} | wrong)


# ---- an engine that ends -------------------------------------------------------------------------


def test_an_engine_killed_under_load_fails_at_once_and_another_answers_the_same(server):
    answer, core = answer_of(server), core_of(server)
    assert answer == (expected(prompt_of(9), 12), "tiny@0")
    restarts = metric(server, "engine_restarts_total")
    prompts = [prompt_of(length) for length in (20, 21, 22, 23, 24)]
    harm_s = []

    def kill() -> None:
        os.kill(core, signal.SIGKILL)
        start_s = time.monotonic()
        wait_until(lambda: b"a new one is started" in refusal_of(f"{server.url}/health"))
        harm_s.append(time.monotonic() - start_s)
        assert b'"ok"' in urllib.request.urlopen(f"{server.url}/live", timeout=60).read()

    fates = asyncio.run(fates_under(server, kill, prompts))
    require_ended_by_the_engine(fates)
    assert harm_s[0] < SILENT_S, "it is seen by its end, not by its silence"
    require_recovery(server, core, answer, restarts)


def test_an_engine_stopped_under_load_is_unhealthy_and_all_requests_end(server):
    """Within 5 s and 10 s, as `test_the_pulse_by_hand` counts them; a busy machine takes longer."""
    answer, core = answer_of(server), core_of(server)
    restarts = metric(server, "engine_restarts_total")

    def stop() -> None:
        os.kill(core, signal.SIGSTOP)
        wait_until(lambda: b"without progress" in refusal_of(f"{server.url}/health"))

    prompts = [prompt_of(length) for length in (20, 21, 22, 23, 24)]
    require_ended_by_the_engine(asyncio.run(fates_under(server, stop, prompts)))
    require_recovery(server, core, answer, restarts)


def test_weights_and_adapters_of_a_killed_engine_are_served_again(server, adapter, tmp_path):
    first, core = answer_of(server), core_of(server)
    restarts = metric(server, "engine_restarts_total")
    post(server, "/v1/load_lora_adapter", lora_name="polite", lora_path=str(adapter))
    post(server, "/v1/load_lora_adapter", lora_name="polite", lora_path=str(adapter))
    weights = write_model(tmp_path / "new", seed=3)
    post(server, "/update_weights", folder=str(weights), version="tiny@7")
    base, polite = answer_of(server), answer_of(server, "polite")
    assert base[1] == "tiny@7" and polite[1] == "tiny@7+polite@1"
    assert first[0] != base[0] != polite[0]
    os.kill(core, signal.SIGKILL)
    wait_until(lambda: b"a new one is started" in refusal_of(f"{server.url}/health"))
    require_recovery(server, core, base, restarts)
    assert answer_of(server, "polite") == polite


def test_a_scheduler_that_never_answers_is_found_although_the_process_lives(server):
    answer, core = answer_of(server), core_of(server)
    restarts = metric(server, "engine_restarts_total")
    prompts = [BLOCKING_PROMPT, BLOCKING_PROMPT]
    fates = asyncio.run(fates_under(server, lambda: None, prompts))
    require_ended_by_the_engine(fates)
    require_recovery(server, core, answer, restarts)


def test_no_process_outlives_a_front_end_that_was_killed_even_within_a_step(folder, policies):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(policies))
        settings = ServeSettings(folder=str(folder), scheduler="blocking", port=0, **OPTIONS)
        server = ServerHandle(settings)
    core = core_of(server)
    body = json.dumps({"prompt": BLOCKING_PROMPT, "max_tokens": 4}).encode()
    query = urllib.request.Request(f"{server.url}/v1/completions", body)
    with contextlib.suppress(TimeoutError):  # the scheduler is in its endless decision now
        urllib.request.urlopen(query, timeout=0.5)
    server._process.kill()
    wait_until(lambda: not Path(f"/proc/{core}").exists())
    server.close()


def test_an_engine_that_cannot_be_started_again_ends_the_command_with_its_reason(folder, tmp_path):
    command = [sys.executable, "-m", "phalanx.cli", "serve", str(folder), "--port", "0"]
    command += ["--max-running", "2", "--max-tokens", "64", "--threads", "1", "--restarts", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        url = process.stdout.readline().strip()
        (core,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(core), signal.SIGKILL)
        wait_until(lambda: b"it is not started again" in refusal_of(f"{url}/health"))
        err = process.communicate(timeout=100)[1]
    assert process.returncode == 2
    assert "error[serve/engine]: engine: the engine process ended with signal 9" in err
    assert "Traceback" not in err


def test_a_core_that_is_told_nonsense_ends_and_says_what_it_was_told(folder):
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "phalanx.engines.serve.core", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE) as core:
        theirs.close()
        settings = ServeSettings(folder=str(folder), scheduler="continuous", **OPTIONS)
        ours.sendall(encode(settings.to_dict()))
        ours.settimeout(30)
        lines = ours.makefile("rb")
        while read_message(lines.readline())["kind"] != "ready":
            pass
        ours.sendall(b'{"kind": "add", "request": 1, "tok\xff\n')
        err = core.communicate(timeout=60)[1].decode()
    ours.close()
    assert core.returncode == 3 and "Traceback" not in err
    assert "message between front end and engine" in err and "is not valid JSON" in err


# ---- an end that was asked for -------------------------------------------------------------------


def test_a_signal_lets_requests_end_and_takes_no_more(folder):
    command = [sys.executable, "-m", "phalanx.cli", "serve", str(folder), "--port", "0"]
    command += ["--max-running", "3", "--max-tokens", "512", "--threads", "1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        url = process.stdout.readline().strip()
        answer = urllib.request.urlopen(f"{url}/v1/models", timeout=60).read()
        assert b'"max_model_len":512' in answer
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        parts = ask(client, prompt_of(9), 500, stream=True)
        tokens = list(next(iter(parts)).choices[0].token_ids)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: b"is being stopped" in refusal_of(f"{url}/health"))
        query = urllib.request.Request(f"{url}/v1/completions", b'{"prompt": [5]}')
        assert b"takes no new requests" in refusal_of(query)
        tokens += [token for part in parts for token in part.choices[0].token_ids]
        out, err = process.communicate(timeout=100)
    assert len(tokens) == 500 and tokens[:12] == expected(prompt_of(9), 12)
    assert process.returncode == 0 and out == "" and "Traceback" not in err
    assert "up to 3 requests at once, 512 tokens each" in err
    assert "predicted TTFT" in err and "at 3 requests (from steps measured at the start)" in err


def test_the_sentence_by_hand(folder):
    rates = ServeRates(
        layers_s=((1, 0.01), (101, 0.11)), head_s=((1, 0.002),), kv_token_s=1e-6, pair_s=0.0
    )
    ready = {"dtype": "float32", "max_running": 11, "max_tokens": 400, "max_step_tokens": 101}
    ready |= {"kv_tokens": 1000, "kv_bytes": 2048, "rates": rates.to_dict()}
    settings = ServeSettings(folder=str(folder), scheduler="continuous", name="small")
    assert front.sentence(settings, "http://x:1", ready) == (
        "small (float32) listens at http://x:1: up to 11 requests at once, 400 tokens each (prompt "
        "and output); KV cache of 1000 tokens, 2 KiB, holds 2 requests of full length; predicted "
        "TTFT 220 ms for a prompt of 200 tokens, TPOT 12 ms alone and 24 ms at 11 requests (from "
        "steps measured at the start)"
    )


# ---- what is refused -----------------------------------------------------------------------------


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
