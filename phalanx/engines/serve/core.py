"""The engine process: weights, cache and the loop that a scheduling policy drives.

Started by the front end with one end of a socket: `python -m phalanx.engines.serve.core FD`.

What goes wrong with one request or one command is answered, and the engine goes on. What goes wrong
inside a step leaves a cache that nobody can vouch for: the process says "failed" as its last word,
which reaches every open request, and ends; starting another is the front end's decision.
"""

from __future__ import annotations

import socket
import sys
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phalanx.drive import drive
from phalanx.engines.serve.engine import ServeEngine
from phalanx.engines.serve.heartbeat import Heartbeat
from phalanx.engines.serve.settings import Request, Sampling, ServeSettings
from phalanx.engines.serve.start import describe, make_engine, read_base
from phalanx.engines.serve.step import Output, StepResult
from phalanx.engines.serve.wire import LineSocket, error_to_json
from phalanx.engines.serve.world import Cancel, EngineWorld
from phalanx.errors import JobError, PhalanxError, WorldError
from phalanx.registry import build

_FAILED = 3  # exit code after a step that failed


class SocketInbox:
    """The front end as an inbox: requests and cancellations go on, commands are carried out here.

    Messages take effect in their order: a command waits until the engine has taken what came
    before it, so cancellations followed by "sleep" find an engine without requests.

    Args:
        early: messages that came while the engine started.
    """

    def __init__(
        self,
        lines: LineSocket,
        engine: ServeEngine,
        settings: ServeSettings,
        early: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._lines, self._engine = lines, engine
        self._name, self._folder = settings.model_name, settings.folder
        self._pending = deque(early)

    def receive(self, wait: bool) -> list[Request | Cancel] | None:
        found = self._take()
        while not found:
            messages = self._lines.receive(wait)
            if messages is None:
                return None
            self._pending.extend(messages)
            found = self._take()
            if not wait:
                break
        return found

    def deliver(self, result: StepResult) -> None:
        self._lines.send(
            {
                "kind": "step",
                "outputs": [_row(each) for each in result.outputs],
                "requests": list(result.requests),
                "step_s": result.dur_s,
                "counters": self.counters(),
            }
        )

    def refuse(self, request: int, error: PhalanxError) -> None:
        self._lines.send({"kind": "rejected", "request": request, "error": error_to_json(error)})

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

    def _take(self) -> list[Request | Cancel]:
        """Requests and cancellations up to the next command; commands before them are done."""
        found: list[Request | Cancel] = []
        while self._pending:
            message = self._pending[0]
            if message["kind"] in ("add", "cancel"):
                found.append(_read(message))
            elif found:
                break
            else:
                self._answer(message)
            self._pending.popleft()
        return found

    # ---- commands ------------------------------------------------------------------------------

    def _answer(self, message: Mapping[str, Any]) -> None:
        reply: dict[str, Any] = {"number": message["number"]}
        try:
            with self._lines.long_work():
                self._carry_out(message)
        except PhalanxError as error:
            reply |= {"kind": "refused", "error": error_to_json(error)}
        else:
            reply |= {"kind": "done", "asleep": self._engine.sleep_level}
        reply["weight_version"] = self._engine.weight_version
        reply["adapters"] = self._engine.adapters.versions
        self._lines.send(reply)
        if self._engine.is_incomplete:
            rule = "an update broke off: the weights are of two models, so the process ends"
            raise WorldError("serve/engine", "weights", self._engine.weight_version, rule)

    def _carry_out(self, message: Mapping[str, Any]) -> None:
        engine, kind = self._engine, message["kind"]
        if kind == "update":
            self._update(message["folder"], message["version"])
        elif kind == "load_adapter":
            self._load_adapter(message["name"], message["folder"], message["version"])
        elif kind == "unload_adapter":
            engine.unload_adapter(message["name"])
        elif kind == "sleep":
            engine.sleep(message["level"])
        elif kind == "wake":
            if not engine.has_weights:
                self._update(self._folder, engine.weight_version)
            engine.wake()

    def _update(self, folder: str, version: str) -> None:
        """Replace the base; what does not fit is refused from headers, before anything changes."""
        engine = self._engine
        engine.update_weights(read_base(folder, engine.model.config), version)
        self._folder = folder

    def _load_adapter(self, name: str, folder: str, version: int) -> None:
        """Load an adapter, or give one that is loaded new weights in place."""
        if name == self._name:
            rule = "is the name of the model itself: clients could not ask for the adapter"
            raise JobError("serve/adapter", "adapter", repr(name), rule)
        adapters = self._engine.adapters
        fill = adapters.update if name in adapters.versions else adapters.load
        fill(name, folder, version=version)


def _read(message: Mapping[str, Any]) -> Request | Cancel:
    if message["kind"] == "cancel":
        return Cancel(message["request"])
    tokens = list(message["tokens"])
    sampling = Sampling(**message["sampling"])
    adapter = message.get("adapter", "")
    return Request(message["request"], tokens, len(tokens), sampling, adapter)


def _row(output: Output) -> Sequence[Any]:
    version, scores = output.weight_version, output.prompt_scores
    return output.request, output.token, output.score, output.reason, scores, version


def main(descriptor: int) -> int:
    """Serve the socket until its other end closes."""
    lines = LineSocket(socket.socket(fileno=descriptor))
    messages = lines.receive(wait=True)
    if not messages:
        return 1
    first, *early = messages
    settings = ServeSettings(**first)
    heartbeat = Heartbeat(lines)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    try:
        with lines.long_work():
            policy = build("serve", settings.scheduler, "plan.serve")
            engine = make_engine(settings)
            inbox = SocketInbox(lines, engine, settings, early)
            world = EngineWorld(engine, inbox, job=settings.model_name)
            policy.start(world.view("engine"))  # options beyond the engine's limits are told now
            ready = describe(engine, settings)
    except Exception as error:
        return _last_word(lines, error, "start")
    lines.send(ready | {"counters": inbox.counters()})
    heartbeat.watch(inbox.counters)
    try:
        drive(world, reacts=[policy])
    except Exception as error:
        _last_word(lines, error, f"step {engine.num_steps + 1}")
        return _FAILED
    return 0


def _last_word(lines: LineSocket, error: Exception, where: str) -> int:
    """Tell the front end why this process ends; the exit code of the error."""
    if not isinstance(error, PhalanxError):
        traceback.print_exception(error)
        rule = "raised an error that ends the engine process; its traceback is on stderr"
        error = WorldError("serve/engine", where, f"{type(error).__name__}: {error}", rule)
    print(error.sentence(), file=sys.stderr, flush=True)
    lines.send({"kind": "failed", "error": error_to_json(error)})
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
