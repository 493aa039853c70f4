"""The HTTP application with a script where the engine process would be: no process, no model.

All but the process is real: `EngineClient` with its limits, the routes, tokenizer and template.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from phalanx.engines.serve.app import create_app
from phalanx.engines.serve.chat import ChatRenderer
from phalanx.engines.serve.client import EngineClient
from phalanx.engines.serve.commands import Commands
from phalanx.engines.serve.settings import ServeSettings
from phalanx.engines.serve.text import Tokeniser
from phalanx.engines.serve.wire import error_to_json
from phalanx.errors import JobError, PhalanxError, WorldError

SPECIAL = ("<bos>", "<eos>", "<turn>")
BOS, EOS, TURN = range(256, 259)
VOCABULARY = 259
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('tools are not for me') }}{% endif %}"
    "<turn>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
Answer = TypeVar("Answer")


def write_folder(folder: Path, template: str = TEMPLATE) -> Path:
    """One token per byte and three special ones; a chat template unless it is ""."""
    folder.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>"}
    config |= {"chat_template": template} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


class ScriptedEngine:
    """Stands where the supervisor of an engine process stands.

    Args:
        owner: the client.
        reply: prompt -> output tokens; an end token follows them.

    Attributes:
        added: messages of requests so far.
        open: requests that are computed.
        holds: whether requests wait for ever.
        fails_after: tokens after which the engine ends with an error (None: never).
    """

    def __init__(self, owner: EngineClient, reply: Callable[[list[int]], Sequence[int]]) -> None:
        self._owner, self._reply = owner, reply
        self.state, self.num_in_a_row, self.error = "ready", 0, None
        self.ready = {"vocab_size": VOCABULARY, "weight_version": "tiny@0"}
        self.added: list[Mapping[str, Any]] = []
        self.open: dict[int, asyncio.Task[None]] = {}
        self.holds, self.fails_after = False, None

    def complaint(self) -> PhalanxError | None:
        """Why no request can be served."""
        return self.error

    def send(self, message: Mapping[str, Any]) -> None:
        """What the client tells the engine."""
        kind = message["kind"]
        if kind == "add":
            self.added.append(message)
            self.open[message["request"]] = asyncio.ensure_future(self._run(message))
        elif kind == "cancel":
            if (task := self.open.pop(message["request"], None)) is not None:
                task.cancel()
        else:
            asyncio.get_running_loop().call_soon(self._obey, message)

    def _obey(self, message: Mapping[str, Any]) -> None:
        told = {"number": message["number"], "weight_version": message.get("version", "tiny@0")}
        if message.get("folder") == "missing":
            error = error_to_json(JobError("serve/adapter", "folder", "missing", "is not there"))
            self._owner.hear({"kind": "refused", "number": message["number"], "error": error})
            return
        adapters = {message["name"]: f"{message['name']}@0"} if "name" in message else {}
        told["weight_version"] = str(told["weight_version"])
        self._owner.hear({"kind": "done", "adapters": adapters, "asleep": 0, **told})

    async def _run(self, message: Mapping[str, Any]) -> None:
        sampling, request = message["sampling"], message["request"]
        tokens = [*self._reply(message["tokens"]), EOS][: sampling["max_new"]]
        version = "tiny@0" + (f"+{message['adapter']}@0" if message["adapter"] else "")
        for at, token in enumerate(tokens):
            await asyncio.sleep(0)
            while self.holds:
                await asyncio.sleep(0.001)
            if at == self.fails_after:
                self._owner.lose(WorldError("serve/engine", "engine", None, "ended with signal 9"))
                return
            num = sampling["num_logprobs"]
            score = None if num is None else _score(token, num)
            of_prompt = None
            if sampling["prompt_logprobs"] is not None and not at:
                of_prompt = [_score(t, sampling["prompt_logprobs"]) for t in message["tokens"][1:]]
            is_last = at == len(tokens) - 1
            reason = "stop" if token == EOS else "length" if is_last else ""
            row = [request, token, score, reason, of_prompt, version]
            if reason:
                self.open.pop(request, None)
            self._owner.hear(
                {"kind": "step", "requests": [request], "step_s": 0.0, "outputs": [row]}
            )


def _score(token: int, num_best: int) -> tuple[float, list[int], list[float]]:
    others = [(token + step) % VOCABULARY for step in range(num_best)]
    return -0.5 - token / 1000, others, [-0.5 - each / 1000 for each in others]


class Served:
    """An application, its scripted engine and its clients.

    Args:
        folder: as `write_folder` writes it.
        reply: prompt -> output tokens.
        options: of the settings.
    """

    def __init__(
        self, folder: Path, reply: Callable[[list[int]], Sequence[int]], **options: Any
    ) -> None:
        options = {"max_tokens": 400, "name": "tiny", "admin": True} | options
        settings = ServeSettings(folder=str(folder), scheduler="continuous", **options)
        self.client = EngineClient(settings)
        self.engine = self.client._supervisor = ScriptedEngine(self.client, reply)
        self.client._commands = Commands(self.engine.send, settings.adapters)
        self.tokeniser = Tokeniser(folder)
        self.app = create_app(self.client, self.tokeniser, ChatRenderer.from_folder(folder))

    def http(self) -> httpx.AsyncClient:
        """A plain client."""
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        return httpx.AsyncClient(transport=transport, base_url="http://test")

    async def use(self, call: Callable[[openai.AsyncOpenAI], Awaitable[Answer]]) -> Answer:
        """What a call of the official client gives."""
        address = "http://test/v1"
        async with (
            asyncio.timeout(30),
            openai.AsyncOpenAI(
                base_url=address, api_key="none", max_retries=0, http_client=self.http()
            ) as client,
        ):
            return await call(client)
