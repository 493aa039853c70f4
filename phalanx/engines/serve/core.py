"""The engine process: weights, cache and the loop that a scheduling policy drives.

Started by the front end with one end of a socket: `python -m phalanx.engines.serve.core FD`.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phalanx.doctor.machine import cgroup_memory_bytes, memory_bytes
from phalanx.drive import drive
from phalanx.engines.serve.engine import Output, ServeEngine, StepResult
from phalanx.engines.serve.heartbeat import Heartbeat
from phalanx.engines.serve.kv import KvLimits, PagedKv, sliding_bytes, token_bytes
from phalanx.engines.serve.model import PackedDecoder
from phalanx.engines.serve.settings import Request, Sampling, ServeSettings
from phalanx.engines.serve.wire import LineSocket, error_to_json
from phalanx.engines.serve.world import Cancel, EngineWorld
from phalanx.errors import JobError, PhalanxError
from phalanx.models.hf import read_tensors
from phalanx.models.spec import DecoderConfig, read_config
from phalanx.registry import build

_FREE_FRAC = 0.5  # of the free memory that the cache may take by default


def make_engine(settings: ServeSettings) -> ServeEngine:
    """Load a model folder and reserve its cache.

    Raises:
        JobError: as `read_config`, `read_tensors` and `PackedDecoder.update`; `job/bad-value` for
            a device that is not there or a cache that is too small.
    """
    config = read_config(settings.folder)
    config = config.with_dtype(settings.dtype or config.dtype)
    model = PackedDecoder(config, device=_device(settings.device))
    model.update(read_tensors(settings.folder, model.names))
    limits = KvLimits(
        max_tokens=settings.max_tokens,
        max_running=settings.max_running,
        max_step_tokens=settings.max_step_tokens,
    )
    kv_dtype = settings.kv_dtype or config.dtype
    num_tokens = settings.kv_tokens or _kv_tokens(config, settings, limits, kv_dtype)
    dtype = getattr(torch, kv_dtype)
    kv = PagedKv(config, num_tokens, limits, dtype=dtype, device=settings.device)
    return ServeEngine(model, kv, limits, f"{settings.model_name}@0")


def _device(name: str) -> torch.device:
    """The device, if torch can use it."""
    legal = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if name not in legal and (name != "cuda" or len(legal) == 1):
        rule = "torch has no such device here"
        raise JobError("job/bad-value", "serve.device", repr(name), rule, legal=legal)
    return torch.device(name)


def _kv_tokens(
    config: DecoderConfig, settings: ServeSettings, limits: KvLimits, kv_dtype: str
) -> int:
    wanted = settings.max_running * settings.max_tokens
    room = _FREE_FRAC * _free_bytes(settings.device)
    room -= sliding_bytes(config, wanted, limits, kv_dtype)
    per_token = token_bytes(config, kv_dtype)
    return min(wanted, int(room // per_token)) if per_token else wanted


def _free_bytes(device: str) -> float:
    if torch.device(device).type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    limit, used = cgroup_memory_bytes()
    available = memory_bytes()[1]
    return available if limit is None else min(available, limit - used)


def describe(engine: ServeEngine, settings: ServeSettings) -> dict[str, Any]:
    """What the front end says at the start."""
    kv_bytes = sum(
        tensor.nbytes for pool in engine.kv.pools.values() for tensor in (pool.keys, pool.values)
    )
    return {
        "kind": "ready",
        "weight_version": engine.weight_version,
        "max_tokens": settings.max_tokens,
        "max_running": settings.max_running,
        "kv_tokens": engine.facts["num_blocks"] * engine.facts["block_tokens"],
        "kv_bytes": kv_bytes,
        "dtype": engine.model.config.dtype,
        "eos_tokens": list(engine.model.config.eos_tokens),
        "vocab_size": engine.model.config.vocab_size,
    }


class SocketInbox:
    """The front end as an inbox: requests and cancellations go on, the rest is answered here."""

    def __init__(self, lines: LineSocket, engine: ServeEngine) -> None:
        self._lines, self._engine = lines, engine
        self._since_s = time.monotonic()

    def receive(self, wait: bool) -> list[Request | Cancel] | None:
        while True:
            messages = self._lines.receive(wait)
            if messages is None:
                return None
            found = [each for message in messages if (each := self._read(message)) is not None]
            if found or not wait:
                self._since_s = time.monotonic()
                return found

    def deliver(self, result: StepResult) -> None:
        engine = self._engine
        self._lines.send(
            {
                "kind": "step",
                "outputs": [self._row(each) for each in result.outputs],
                "requests": list(result.requests),
                "step_s": time.monotonic() - self._since_s,
                "weight_version": engine.weight_version,
                "counters": self.counters(),
            }
        )

    def _row(self, output: Output) -> Sequence[Any]:
        version = self._engine.weight_version
        scores = output.prompt_scores
        return output.request, output.token, output.score, output.reason, scores, version

    def counters(self) -> dict[str, int]:
        """What the engine has done and holds; the heartbeat asks from another thread."""
        engine = self._engine
        return {
            "steps": engine.num_steps,
            "live": len(engine.requests),
            "free_blocks": engine.facts["free_blocks"],
            "num_blocks": engine.facts["num_blocks"],
            "prompt_tokens": engine.num_prompt_tokens,
            "output_tokens": engine.num_output_tokens,
            "preempted": engine.num_preempted,
        }

    def _read(self, message: Mapping[str, Any]) -> Request | Cancel | None:
        kind = message["kind"]
        if kind == "add":
            sampling = Sampling(**message["sampling"])
            tokens = list(message["tokens"])
            return Request(message["request"], tokens, len(tokens), sampling)
        if kind == "cancel":
            return Cancel(message["request"])
        if kind == "update":
            with self._lines.long_work():
                self._update(message["number"], message["folder"], message["version"])
        return None

    def _update(self, number: int, folder: str, version: str) -> None:
        """Replace the weights; a folder of another model is refused before anything changes."""
        engine = self._engine
        try:
            config = read_config(folder)
            if config.with_dtype(engine.model.config.dtype) != engine.model.config:
                rule = "is another model than the one that is served"
                raise JobError("model/tensor", "update_weights", folder, rule)
            engine.update_weights(read_tensors(folder, engine.model.names), version)
        except PhalanxError as error:
            refusal = {"kind": "refused", "number": number, "error": error_to_json(error)}
            self._lines.send(refusal)
        else:
            version = engine.weight_version
            self._lines.send({"kind": "done", "number": number, "weight_version": version})


def main(descriptor: int) -> int:
    """Serve the socket until its other end closes."""
    lines = LineSocket(socket.socket(fileno=descriptor))
    first = lines.receive(wait=True)
    if first is None:
        return 1
    settings = ServeSettings(**first[0])
    heartbeat = Heartbeat(lines)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    try:
        policy = build("serve", settings.scheduler, "plan.serve")
        engine = make_engine(settings)
        inbox = SocketInbox(lines, engine)
        world = EngineWorld(engine, inbox, job=settings.model_name)
        policy.start(world.view("engine"))  # options beyond the engine's limits are told now
    except PhalanxError as error:
        lines.send({"kind": "failed", "error": error_to_json(error)})
        return error.exit_code
    lines.send(describe(engine, settings))
    heartbeat.watch(inbox.counters)
    try:
        drive(world, reacts=[policy])
    except PhalanxError as error:
        print(error.sentence(), file=sys.stderr, flush=True)
        lines.send({"kind": "failed", "error": error_to_json(error)})
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
