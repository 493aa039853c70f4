"""A load generator for servers with the OpenAI completions interface, ours or another's. No torch.

What is measured, per request: TTFT, from sending to the first output; TPOT, from the first output
to the last over (output tokens - 1); latency, from sending to the last output. ITL are the gaps
between outputs of all requests together: a request with long pauses shows in ITL, not in its TPOT.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import urlsplit

from phalanx.errors import JobError, WorldError
from phalanx.report import Report

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Sample:
    """One request.

    Attributes:
        sent_s, output_s: moments of sending and of each output, from the start of the test.
        num_prompt, num_output: tokens as the server counted them.
        error: what went wrong, or "".
    """

    sent_s: float
    output_s: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_output: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.output_s[0] - self.sent_s

    @property
    def latency_s(self) -> float:
        return self.output_s[-1] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """None with a single output token."""
        if self.num_output < 2:
            return None
        return (self.output_s[-1] - self.output_s[0]) / (self.num_output - 1)


def load_test(
    url: str,
    prompts: Sequence[Prompt],
    *,
    output_tokens: int = 32,
    concurrency: int = 0,
    rate_per_s: float = 0.0,
    seed: int = 0,
    model: str = "",
    timeout_s: float = 600.0,
) -> Report:
    """Send each prompt once and report what a client saw.

    Args:
        url: of the server ("http://127.0.0.1:8000"); "/v1/..." is added.
        prompts: texts or token ids.
        output_tokens: exactly so many per request (end-of-sequence tokens are ignored).
        concurrency: requests at once (0: no limit).
        rate_per_s: mean of a Poisson process of arrivals (0: all at once).
        seed: of the arrivals.
        model: name to ask for ("": the first that the server names).
        timeout_s: of one request.

    Raises:
        JobError: `job/bad-value` for an address that is none, or no prompts.
        WorldError: `serve/engine` when the server cannot be reached or every request failed.
    """
    if not prompts:
        raise JobError("job/bad-value", "prompts", 0, "there must be at least one")
    options = (output_tokens, concurrency, rate_per_s, seed, model, timeout_s)
    samples, duration_s = asyncio.run(_run(_Server(url), prompts, *options))
    failed = [sample for sample in samples if sample.error]
    if len(failed) == len(samples):
        rule = f"all {len(samples)} requests failed; the first with: {failed[0].error}"
        raise WorldError("serve/engine", url, None, rule)
    note = f"{len(samples)} requests, {output_tokens} output tokens each"
    note += f", {concurrency} at once" if concurrency else ""
    note += f", {rate_per_s:g} per second" if rate_per_s else ""
    return summarise(samples, duration_s, note)


def summarise(samples: Sequence[Sample], duration_s: float, note: str = "") -> Report:
    """The rows of a load test.

    Args:
        samples: at least one without an error.
        duration_s: from the first request to the end of the last.
    """
    report = Report("Load test", notes={"load": note})
    done = [sample for sample in samples if not sample.error]
    num_output = sum(sample.num_output for sample in done)
    num_all = num_output + sum(sample.num_prompt for sample in done)

    def add(quantity: str, value: float, unit: str) -> None:
        report.add(quantity, value, unit, "measured", note=note)

    add("load/requests", len(done), "1")
    add("load/failed requests", len(samples) - len(done), "1")
    add("load/duration", duration_s, "s")
    add("load/requests per second", len(done) / duration_s, "1/s")
    add("load/output tokens per second", num_output / duration_s, "1/s")
    add("load/tokens per second", num_all / duration_s, "1/s")
    gaps = [b - a for each in done for a, b in zip(each.output_s, each.output_s[1:])]
    for name, values in (
        ("TTFT", [sample.ttft_s for sample in done]),
        ("TPOT", [t for sample in done if (t := sample.tpot_s) is not None]),
        ("ITL", gaps),
        ("latency", [sample.latency_s for sample in done]),
    ):
        if values:
            add(f"load/{name} mean", sum(values) / len(values), "s")
            add(f"load/{name} median", percentile(values, 0.5), "s")
            add(f"load/{name} P99", percentile(values, 0.99), "s")
    return report


def percentile(values: Sequence[float], fraction: float) -> float:
    """Linear interpolation between the two nearest ranks."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


async def _run(
    server: _Server,
    prompts: Sequence[Prompt],
    output_tokens: int,
    concurrency: int,
    rate_per_s: float,
    seed: int,
    model: str,
    timeout_s: float,
) -> tuple[list[Sample], float]:
    model = model or await server.first_model()
    slots = asyncio.Semaphore(concurrency or len(prompts))
    random, due_s, start_s = Random(seed), 0.0, time.perf_counter()

    async def one(prompt: Prompt, at_s: float) -> Sample:
        await asyncio.sleep(max(0.0, at_s - (time.perf_counter() - start_s)))
        async with slots:
            sample = Sample(time.perf_counter() - start_s)
            body = _body(model, prompt, output_tokens)
            try:
                async with asyncio.timeout(timeout_s):
                    await _measure(server, body, sample, start_s)
            except (OSError, WorldError, asyncio.IncompleteReadError) as error:
                sample.error = str(error) or type(error).__name__
            return sample

    tasks = []
    for prompt in prompts:
        tasks.append(asyncio.create_task(one(prompt, due_s)))
        due_s += random.expovariate(rate_per_s) if rate_per_s else 0.0
    samples = await asyncio.gather(*tasks)
    return list(samples), time.perf_counter() - start_s


def _body(model: str, prompt: Prompt, output_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _measure(
    server: _Server, body: Mapping[str, Any], sample: Sample, start_s: float
) -> None:
    async for line in server.lines("POST", "/v1/completions", body):
        if not line.startswith(b"data: ") or line == b"data: [DONE]":
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise WorldError("serve/engine", "request", None, event["error"]["message"])
        if event["choices"]:
            sample.output_s.append(time.perf_counter() - start_s)
        if event.get("usage"):
            sample.num_prompt = event["usage"]["prompt_tokens"]
            sample.num_output = event["usage"]["completion_tokens"]
    if not sample.output_s or not sample.num_output:
        raise WorldError("serve/engine", "request", None, "the stream ended without an output")


class _Server:
    """HTTP/1.1 with one connection per request, so that nothing waits behind another."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            rule, legal = "must be the address of a server", ["http://127.0.0.1:8000"]
            raise JobError("job/bad-value", "url", repr(url), rule, legal=legal)
        self.url, self._host, self._root = url, parts.hostname, parts.path.rstrip("/")
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)

    async def first_model(self) -> str:
        """The first model that the server names.

        Raises:
            WorldError: `serve/engine` when it cannot be reached.
        """
        try:
            lines = [line async for line in self.lines("GET", "/v1/models")]
        except OSError as error:
            rule = f"cannot be reached: {error.strerror or error}"
            raise WorldError("serve/engine", self.url, None, rule) from None
        return json.loads(b"".join(lines))["data"][0]["id"]

    async def lines(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> AsyncIterator[bytes]:
        """Lines of the answer's body as they come.

        Raises:
            WorldError: `serve/engine` for another status than 200.
        """
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
        try:
            content = b"" if body is None else json.dumps(body).encode()
            head = (
                f"{method} {self._root}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
                "Accept: */*\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + content)
            await writer.drain()
            status, is_chunked = await self._read_head(reader)
            parts = self._chunks(reader) if is_chunked else self._rest(reader)
            held = b""
            async for part in parts:
                *whole, held = (held + part).split(b"\n")
                for line in whole if status == 200 else ():
                    yield line.rstrip(b"\r")
                if status != 200:
                    held = b"\n".join([*whole, held])
            if status != 200:
                rule = f"answers with status {status}: {held[:500].decode(errors='replace')}"
                raise WorldError("serve/engine", self.url, None, rule)
            if held:
                yield held
        finally:
            writer.close()

    @staticmethod
    async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().splitlines()
        fields = dict(line.split(":", 1) for line in lines[1:] if ":" in line)
        return int(lines[0].split()[1]), "chunked" in fields.get("transfer-encoding", "")

    @staticmethod
    async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)

    @staticmethod
    async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        while part := await reader.read(1 << 16):
            yield part
