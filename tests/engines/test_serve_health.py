"""What a front end makes of an engine process that dies, stops, stands still or speaks nonsense.

The engine is a script without a model: processes, sockets and signals are real.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from phalanx.engines.serve import heartbeat, process, supervisor
from phalanx.engines.serve.client import EngineClient
from phalanx.engines.serve.front import serve
from phalanx.engines.serve.heartbeat import GRACE_S, SILENT_S, TICK_S, Pulse
from phalanx.engines.serve.settings import Sampling, ServeSettings
from phalanx.engines.serve.wire import LineSocket, read_message
from phalanx.errors import JobError, WorldError
from tests.engines import scripted_core as script
from tests.engines.serve_clients import write_text_model

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
PROMPT = [script.NOTHING_WRONG, 1, 2, 3]


@pytest.fixture(autouse=True)
def scripted(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(process, "_CORE", "tests.engines.scripted_core")
    monkeypatch.setattr(supervisor, "_LONGEST_PAUSE_S", 0.05)


def with_client(
    folder: Path, work: Callable[[EngineClient], Awaitable[object]], **options: object
) -> None:
    """Run `work` with a client of a scripted engine."""

    async def whole() -> None:
        defaults = {"folder": str(folder), "scheduler": "continuous", "stall_s": 60.0}
        client = await EngineClient.start(ServeSettings(**defaults | options))
        try:
            await work(client)
        finally:
            await client.close()

    asyncio.run(whole())


async def tokens_of(client: EngineClient, prompt=PROMPT, num: int = 3) -> list[int]:
    return [each.token async for each in client.submit(prompt, Sampling(max_new=num))]


async def version_of(client: EngineClient) -> str:
    (delta,) = [each async for each in client.submit(PROMPT, Sampling(max_new=1))]
    return delta.weight_version


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> float:
    """How long it took to come true."""
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < seconds, "did not come true in time"
        await asyncio.sleep(0.01)
    return time.monotonic() - start_s


def is_unhealthy(client: EngineClient) -> bool:
    try:
        client.require_progress()
    except WorldError as error:
        return error.code == "serve/engine"
    return False


async def ends_and_recovers(client: EngineClient, first: int, words: str) -> None:
    """A request that breaks the engine ends with an error, and so does what runs beside it."""
    pid, num_before = client.ready["pid"], client.metrics.restarts._value.get()
    beside = client.submit([script.FORGET, 1], Sampling(max_new=3))
    with pytest.raises(WorldError, match=words) as caught:
        await tokens_of(client, [first, 1])
    with pytest.raises(WorldError) as other:
        [each async for each in beside]
    assert caught.value.code == other.value.code == "serve/engine"
    with pytest.raises(WorldError, match="a new one is started"):
        client.submit(PROMPT, Sampling(max_new=3))
    await until(lambda: client.state == "ready")
    assert client.ready["pid"] != pid and client.num_live == 0
    assert client.metrics.restarts._value.get() == num_before + 1
    assert await tokens_of(client) == [4, 5, 6]
    assert client._supervisor.num_in_a_row == 0, "a served request breaks the row"


# ---- ways to end ---------------------------------------------------------------------------------


def test_whatever_ends_the_engine_ends_its_requests_and_another_is_started(tmp_path, capfd):
    async def work(client: EngineClient) -> None:
        assert await tokens_of(client) == [4, 5, 6]
        for first, words in (
            (script.EXIT, "ended with exit code 7"),
            (script.GARBAGE, "is not valid JSON"),
            (script.HALF_LINE, "ended with exit code 0"),
            (script.FAIL, "a step failed: rows = 7: is too much"),
            (script.BAD_ROW, "a message of kind 'step' cannot be read"),
        ):
            await ends_and_recovers(client, first, words)

    with_client(tmp_path, work, restarts=1)
    said = capfd.readouterr().err
    assert said.count("starting another engine process (1 of 1)") == 5


def test_a_killed_engine_is_noticed_at_once(tmp_path):
    async def work(client: EngineClient) -> None:
        stream = client.submit([script.FORGET, 1], Sampling(max_new=3))
        os.kill(client.ready["pid"], signal.SIGKILL)
        assert await until(lambda: is_unhealthy(client)) < SILENT_S
        with pytest.raises(WorldError, match="signal 9"):
            [each async for each in stream]

    with_client(tmp_path, work)


def test_an_engine_that_was_stopped_for_a_moment_goes_on(tmp_path):
    async def work(client: EngineClient) -> None:
        pid = client.ready["pid"]
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: is_unhealthy(client))
        os.kill(pid, signal.SIGCONT)
        await until(lambda: not is_unhealthy(client))
        assert await tokens_of(client) == [4, 5, 6] and client.ready["pid"] == pid

    with_client(tmp_path, work)


def test_a_scheduler_that_forgets_a_request_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "GRACE_S", 0.5)

    async def work(client: EngineClient) -> None:
        stream = client.submit([script.FORGET, 1], Sampling(max_new=3))
        took_s = await until(lambda: is_unhealthy(client))
        assert took_s > 0.8, "a step may take stall_s"
        with pytest.raises(WorldError, match="without progress"):
            [each async for each in stream]
        await until(lambda: client.state == "ready")
        assert await tokens_of(client) == [4, 5, 6]

    with_client(tmp_path, work, stall_s=1.0)


def test_long_steps_are_no_stall(tmp_path):
    async def work(client: EngineClient) -> None:
        tokens = asyncio.create_task(tokens_of(client, [script.SLOW, 35], 1))
        while not tokens.done():
            client.require_progress()
            await asyncio.sleep(0.05)
        assert tokens.result() == [2]

    assert SILENT_S < 3.5
    with_client(tmp_path, work)


def test_an_engine_that_does_not_come_back_is_given_up_and_says_why(tmp_path):
    async def work(client: EngineClient) -> None:
        (tmp_path / "broken").touch()
        with pytest.raises(WorldError, match="exit code 7"):
            await tokens_of(client, [script.EXIT])
        error = await asyncio.wait_for(client.until_down(), 60)
        assert client.state == "down" and error.code == "serve/engine"
        assert "exit code 5" in str(error) and "it is not started again" in str(error)
        assert client.metrics.restarts._value.get() == 2
        with pytest.raises(WorldError, match="it is not started again"):
            client.submit(PROMPT, Sampling(max_new=3))
        with pytest.raises(WorldError):
            await client.update_weights("somewhere", "tiny@1")

    with_client(tmp_path, work, restarts=2)


def test_an_engine_that_cannot_start_is_an_error_and_leaves_no_process(tmp_path):
    (tmp_path / "broken").touch()
    with pytest.raises(WorldError, match="ended with exit code 5"):
        with_client(tmp_path, lambda client: asyncio.sleep(0))


# ---- commands ------------------------------------------------------------------------------------


def test_a_new_engine_gets_the_adapters_weights_and_sleep_of_the_old_one(tmp_path, capfd):
    async def work(client: EngineClient) -> None:
        await client.load_adapter("b", "folder-b")
        await client.load_adapter("b", "folder-b2")
        await client.load_adapter("c", "folder-c")
        await client.unload_adapter("c")
        assert await client.update_weights("weights", "tiny@5") == "tiny@5"
        assert client.adapters == {"a": "folder-a", "b": "folder-b2"}
        with pytest.raises(JobError, match="is not there"):
            await client.load_adapter("d", "missing")
        with pytest.raises(JobError, match="is not there"):
            await client.update_weights("missing", "tiny@6")
        os.kill(client.ready["pid"], signal.SIGKILL)
        await until(lambda: client.state == "starting")
        await until(lambda: client.state == "ready")
        assert client.weight_version == "tiny@5"
        assert await version_of(client) == "tiny@5 load_adapter:a@0 load_adapter:b@1"

        client.adapters["b"] = "missing by now"
        await client.sleep(1)
        os.kill(client.ready["pid"], signal.SIGKILL)
        await until(lambda: client.state == "starting")
        await until(lambda: client.state == "asleep")
        await client.wake()
        assert await version_of(client) == "tiny@5 load_adapter:a@0 sleep:1@ wake:@"
        assert list(client.adapters) == ["a"]

    with_client(tmp_path, work, adapters={"a": "folder-a"})
    assert "adapter 'b' is served no more" in capfd.readouterr().err


def test_weights_that_cannot_be_restored_are_not_replaced_by_others(tmp_path):
    async def work(client: EngineClient) -> None:
        await client.update_weights("weights", "tiny@5")
        client._commands._weights = ("missing by now", "tiny@5")
        os.kill(client.ready["pid"], signal.SIGKILL)
        error = await asyncio.wait_for(client.until_down(), 60)
        assert "is not there" in str(error)

    with_client(tmp_path, work, restarts=2)


def test_a_sleeping_engine_takes_no_requests_and_open_ones_keep_it_awake(tmp_path):
    async def work(client: EngineClient) -> None:
        stream = client.submit([script.FORGET, 1], Sampling(max_new=3))
        with pytest.raises(WorldError, match="requests = 1: run or wait"):
            await client.sleep(1)
        await client.sleep(1, abort=True)
        with pytest.raises(WorldError, match="was sent to sleep"):
            [each async for each in stream]
        assert client.state == "asleep" and not is_unhealthy(client)
        with pytest.raises(WorldError, match="wake it first") as caught:
            client.submit(PROMPT, Sampling(max_new=3))
        assert caught.value.code == "serve/asleep"
        await client.wake()
        assert await tokens_of(client) == [4, 5, 6]

    with_client(tmp_path, work)


def test_requests_for_adapters_that_are_gone_are_refused_on_either_side(tmp_path):
    async def work(client: EngineClient) -> None:
        with pytest.raises(JobError, match=r"adapter = 'bx': no such adapter.*: b"):
            client.submit(PROMPT, Sampling(max_new=3), adapter="bx")
        stream = client.submit([script.REJECT, 1], Sampling(max_new=3), adapter="b")
        with pytest.raises(JobError, match="is gone"):
            [each async for each in stream]
        assert client.num_live == 0

    with_client(tmp_path, work, adapters={"b": "folder"})


def test_a_draining_server_finishes_what_runs_and_takes_nothing_new(tmp_path):
    async def work(client: EngineClient) -> None:
        tokens = asyncio.create_task(tokens_of(client, [script.SLOW, 4], 2))
        forgotten = client.submit([script.FORGET, 1], Sampling(max_new=3))
        await asyncio.sleep(0)
        draining = asyncio.create_task(client.drain(4.0))
        await asyncio.sleep(0.1)
        assert client.state == "draining" and is_unhealthy(client)
        with pytest.raises(WorldError, match="takes no new requests"):
            client.submit(PROMPT, Sampling(max_new=3))
        assert await tokens == [2, 3]
        await asyncio.wait_for(draining, 60)
        await client.close()
        with pytest.raises(WorldError, match="was stopped"):
            [each async for each in forgotten]

    with_client(tmp_path, work)


# ---- the front end -------------------------------------------------------------------------------


def test_one_interrupt_lets_requests_end_and_a_second_ends_at_once(tmp_path):
    folder = write_text_model(tmp_path / "tiny")
    body = {"model": "tiny", "prompt": [script.SLOW, 99], "max_tokens": 9, "ignore_eos": True}

    async def whole() -> tuple[int, str, float]:
        started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        settings = ServeSettings(folder=str(folder), scheduler="continuous", port=0, max_tokens=64)
        server = asyncio.create_task(serve(settings, lambda *said: started.set_result(said[0])))
        url = await started
        async with httpx.AsyncClient(base_url=url, timeout=100) as http:
            answer = asyncio.create_task(http.post("/v1/completions", json=body))
            while (await http.get("/load")).json()["server_load"] < 1:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            while (await http.get("/health")).status_code != 503:
                await asyncio.sleep(0.01)
            assert not answer.done() and not server.done()
            os.kill(os.getpid(), signal.SIGINT)
            start_s = time.monotonic()
            status, text = (await answer).status_code, answer.result().text
            await server
            return status, text, time.monotonic() - start_s

    status, text, took_s = asyncio.run(asyncio.wait_for(whole(), 200))
    assert status == 503 and "was stopped" in text and took_s < 9, (
        "not at the end of a step of 9.9 s"
    )


# ---- the pulse -----------------------------------------------------------------------------------


def beat(busy_s: float | None) -> dict:
    return {"kind": "beat", "busy_s": busy_s, "counters": {}}


def wait(pulse: Pulse, seconds: float, has_work: bool = False) -> None:
    for _ in range(round(seconds / TICK_S)):
        pulse.wait(TICK_S, has_work=has_work)


def test_the_pulse_by_hand():
    pulse = Pulse(10.0)
    wait(pulse, SILENT_S)
    assert pulse.complaint() is None
    wait(pulse, 0.5)
    assert "= 3.5: its process" in str(pulse.complaint()) and pulse.over_s == 0.5
    pulse.hear(beat(9.5))
    assert pulse.complaint() is None
    wait(pulse, 1.0)
    assert "= 10.5: one step" in str(pulse.complaint()) and pulse.over_s == 0.5
    pulse.hear({"kind": "step"})
    assert pulse.complaint() is None
    pulse.hear(beat(None))
    for _ in range(21):  # a beat every half second
        wait(pulse, 0.5, has_work=True)
        pulse.hear(beat(None))
    assert "requests wait" in str(pulse.complaint()) and pulse.over_s == 0.5
    wait(pulse, TICK_S)
    assert pulse.complaint() is None, "without requests nothing has to be done"


def test_a_front_end_that_stood_still_itself_does_not_blame_the_engine():
    pulse = Pulse(10.0)
    pulse.wait(3600.0, has_work=True)
    assert pulse.complaint() is None
    assert SILENT_S + GRACE_S < 10 and SILENT_S + 4 * TICK_S < 5, "what is promised"


def test_an_engine_without_a_front_end_leaves_even_in_the_middle_of_a_step(monkeypatch):
    monkeypatch.setattr(heartbeat, "_LAST_S", 0.2)
    ours, theirs = socket.socketpair()
    codes: list[int] = []
    thread = heartbeat.Heartbeat(LineSocket(theirs), leave=codes.append)._thread
    line = ours.makefile("rb").readline()
    assert read_message(line)["busy_s"] > 0
    ours.shutdown(socket.SHUT_RDWR)
    ours.close()
    thread.join(60)
    assert codes == [1]
    theirs.close()
