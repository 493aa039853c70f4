"""Stands in for the engine process: no model, but processes, sockets and signals as they are.

An output token is the number of tokens before it. What the first token of a prompt is decides what
goes wrong (SLOW: a tenth of a second per token, times the second one); version texts tell which
commands the process got.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

from phalanx.cost.serving import ServeRates
from phalanx.engines.serve.heartbeat import Heartbeat
from phalanx.engines.serve.wire import LineSocket, error_to_json
from phalanx.errors import JobError, PlanError

EXIT, GARBAGE, HALF_LINE, STUCK, FORGET, FAIL, BAD_ROW, REJECT, SLOW = range(1, 10)
NOTHING_WRONG = 50
COUNTERS = {"steps": 1, "prompt_tokens": 4, "preempted": 1, "free_blocks": 3, "num_blocks": 4}

RATES = ServeRates(layers_s=((1, 0.01),), head_s=((1, 0.01),), kv_token_s=0.0, pair_s=0.0)
READY = {
    "kind": "ready",
    "weight_version": "tiny@0",
    "dtype": "float32",
    "vocab_size": 100,
    "max_running": 16,
    "max_step_tokens": 512,
    "kv_tokens": 64,
    "kv_bytes": 64,
    "rates": RATES.to_dict(),
}


class Script:
    def __init__(self, lines: LineSocket, connection: socket.socket, folder: str) -> None:
        self.lines, self.connection, self.folder = lines, connection, folder
        self.version, self.told = "tiny@0", []

    def add(self, message) -> None:
        first, request = message["tokens"][0], message["request"]
        if first == EXIT:
            os._exit(7)
        elif first == GARBAGE:
            self.connection.sendall(b"\xff\xfe\n")
        elif first == HALF_LINE:
            self.connection.sendall(b'{"kind":"st')
            os._exit(0)
        elif first == STUCK:
            time.sleep(60)
        elif first == FAIL:
            error = PlanError("plan/illegal", "rows", 7, "is too much")
            self.lines.send({"kind": "failed", "error": error_to_json(error)})
            os._exit(3)
        elif first == BAD_ROW:
            self.step([request], [[request, 4]])
        elif first == REJECT:
            error = JobError("serve/adapter", "adapter", "a", "is gone")
            rejected = {"kind": "rejected", "request": request, "error": error_to_json(error)}
            self.lines.send(rejected)
        elif first != FORGET:
            self.answer(message, message["tokens"][1] / 10 if first == SLOW else 0.0)

    def answer(self, message, pause_s: float) -> None:
        request, most = message["request"], message["sampling"]["max_new"]
        version = " ".join([self.version, *self.told])
        for at in range(most):
            time.sleep(pause_s)
            reason = "length" if at == most - 1 else ""
            token = len(message["tokens"]) + at
            self.step([request], [[request, token, None, reason, None, version]])

    def step(self, requests, rows) -> None:
        step = {"kind": "step", "requests": requests, "outputs": rows, "step_s": 0.001}
        self.lines.send(step | {"counters": COUNTERS})

    def command(self, message) -> None:
        number = {"number": message["number"]}
        if "missing" in message.get("folder", ""):
            error = JobError("job/not-found", "folder", message["folder"], "is not there")
            self.lines.send({"kind": "refused", "error": error_to_json(error), **number})
            return
        if message["kind"] == "update":
            self.version = message["version"]
        else:
            name, version = message.get("name", ""), message.get("version", "")
            self.told.append(f"{message['kind']}:{name or message.get('level', '')}@{version}")
        adapters = {message["name"]: "a"} if "name" in message else {}
        done = {"kind": "done", "weight_version": self.version, "adapters": adapters}
        self.lines.send(done | number)


def main(descriptor: int) -> None:
    connection = socket.socket(fileno=descriptor)
    lines = LineSocket(connection)
    settings = lines.receive(wait=True)[0]
    heartbeat = Heartbeat(lines)
    if Path(settings["folder"], "broken").exists():
        os._exit(5)
    lines.send(READY | {"pid": os.getpid(), "max_tokens": settings["max_tokens"]})
    heartbeat.watch(lambda: COUNTERS)
    script = Script(lines, connection, settings["folder"])
    while (messages := lines.receive(wait=True)) is not None:
        for message in messages:
            if message["kind"] == "add":
                script.add(message)
            elif message["kind"] != "cancel":
                script.command(message)


if __name__ == "__main__":
    main(int(sys.argv[1]))
