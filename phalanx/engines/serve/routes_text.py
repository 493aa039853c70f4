"""Routes that read or make text: completions, chat, tokens in and out, the tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phalanx.engines.serve.answers import answer, read_json, unknown_model
from phalanx.engines.serve.chat import CHAT_TEXT, ChatRenderer, parse_chat
from phalanx.engines.serve.client import EngineClient
from phalanx.engines.serve.forms import ChatForm, CompletionForm, Form, TokenForm
from phalanx.engines.serve.generation import Generation
from phalanx.engines.serve.parameters import Table, boolean, read, text, token_ids, wrong
from phalanx.engines.serve.protocol import Asked, Prompt, parse_completion, parse_generate
from phalanx.engines.serve.text import Tokeniser
from phalanx.errors import JobError

_TEXT: Table = {
    "model": (text, None),
    "prompt": (text, None),
    "add_special_tokens": (boolean, True),
    "return_token_strs": (boolean, False),
}
_TOKENS: Table = {"model": (text, None), "tokens": (token_ids, None)}


class TextRoutes:
    """The handlers. A handler's docstring is its contract.

    Args:
        client: of the engine.
        tokeniser: of the model folder.
        renderer: of its chat template.
    """

    def __init__(self, client: EngineClient, tokeniser: Tokeniser, renderer: ChatRenderer) -> None:
        self._client, self._tokeniser, self._renderer = client, tokeniser, renderer
        self._name = client.settings.model_name

    @property
    def table(self) -> dict[str, tuple[str, Callable[..., Any]]]:
        """Path -> method and handler."""
        return {
            "/v1/completions": ("POST", self.completions),
            "/v1/chat/completions": ("POST", self.chat),
            "/generate": ("POST", self.generate),
            "/tokenize": ("POST", self.tokenize),
            "/detokenize": ("POST", self.detokenize),
        }

    async def completions(self, request: Request) -> Response:
        """POST prompts; an answer, or server-sent events with `stream`."""
        asked = parse_completion(await read_json(request))
        return await self._answer(request, asked, self._form(request, asked, CompletionForm))

    async def chat(self, request: Request) -> Response:
        """POST a conversation; the next turn, or server-sent events with `stream`."""
        body = await read_json(request)
        asked = await asyncio.to_thread(parse_chat, body, self._renderer)
        return await self._answer(request, asked, self._form(request, asked, ChatForm))

    async def generate(self, request: Request) -> Response:
        """POST token ids; token ids, and which weights made them."""
        asked = parse_generate(await read_json(request))
        return await self._answer(request, asked, TokenForm(asked))

    async def tokenize(self, request: Request) -> Response:
        """POST a prompt or a conversation; its token ids."""
        body = await read_json(request)
        is_chat = isinstance(body, dict) and body.get("messages") is not None
        values = read(body, CHAT_TEXT if is_chat else _TEXT)
        self._adapter_of(values["model"])
        if is_chat:
            opens_turn = values["add_generation_prompt"]
            prompt = self._renderer.prompt(values["messages"], opens_turn=opens_turn)
        else:
            prompt = values["prompt"]
        if prompt is None:
            raise wrong("prompt", None, "must be a text; or send messages")
        special = values["add_special_tokens"]
        tokens = await asyncio.to_thread(self._tokeniser.encode, prompt, add_special=special)
        spelt = [self._tokeniser.piece(each) for each in tokens]
        return JSONResponse(
            {
                "tokens": tokens,
                "count": len(tokens),
                "max_model_len": self._client.settings.max_tokens,
                "token_strs": spelt if values["return_token_strs"] else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """POST token ids; their text, special tokens included."""
        values = read(await read_json(request), _TOKENS)
        self._adapter_of(values["model"])
        tokens, size = values["tokens"], self._client.ready["vocab_size"]
        if tokens is None:
            raise wrong("tokens", None, "must be a list of token ids")
        self._tokeniser.require_text("tokens", "there is no text here")
        if outside := [each for each in tokens if each >= size]:
            raise wrong("tokens", outside[0], f"is no token id of this model, which has {size}")
        return JSONResponse({"prompt": self._tokeniser.decode(tokens, skip_special=False)})

    async def _answer(self, request: Request, asked: Asked, form: Form) -> Response:
        adapter = self._adapter_of(asked.model)
        if asked.stops:
            self._tokeniser.require_text("stop", "use stop_token_ids")
        self._require_ids(asked)
        prompts = [await self._tokens_of(prompt, asked) for prompt in asked.prompts]
        generation = Generation(asked, prompts, self._client, self._tokeniser, adapter)
        return await answer(request, generation, form)

    async def _tokens_of(self, prompt: Prompt, asked: Asked) -> list[int]:
        """A prompt as token ids, cut to its end where asked for."""
        if isinstance(prompt, str):
            # encoding long texts takes long enough to hold up the streams of others
            encode = self._tokeniser.encode
            tokens = await asyncio.to_thread(encode, prompt, add_special=asked.add_special)
        else:
            tokens = list(prompt)
        if asked.truncate is None:
            return tokens
        room = self._client.settings.max_tokens - max(1, asked.max_new or 1)
        keep = max(0, room) if asked.truncate < 0 else asked.truncate
        return tokens[len(tokens) - keep :] if keep < len(tokens) else tokens

    def _form(self, request: Request, asked: Asked, form: type) -> Form:
        model, version = asked.model or self._name, self._client.weight_version
        return form(asked, self._tokeniser, request.state.request_id, model, version)

    def _adapter_of(self, model: str | None) -> str:
        """The adapter that a model's name means ("": the base)."""
        if model in (None, self._name):
            return ""
        names = [self._name, *self._client.adapters]
        if model in names:
            return str(model)
        raise unknown_model(str(model), names)

    def _require_ids(self, asked: Asked) -> None:
        """Ids beside the prompt's, which the engine looks at for every token."""
        size, sampling = self._client.ready["vocab_size"], asked.sampling
        for name, ids in (
            ("logit_bias", [token for token, _ in sampling.logit_bias]),
            ("stop_token_ids", sampling.stop_tokens),
        ):
            if outside := [token for token in ids if token >= size]:
                rule = f"is no token id of this model, which has {size}"
                raise JobError("serve/request", name, outside[0], rule, legal=[0, size - 1])
        if sampling.min_new and len(set(sampling.stop_tokens)) >= size:
            raise wrong("stop_token_ids", None, "leaves no token for min_tokens")
