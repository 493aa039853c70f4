"""The chat interface: what a body may hold, and a conversation into text. No torch.

The text is made by the template of the model folder, through the same renderer that prepares
training data, so a model is asked in the form in which it was taught. The template's own special
tokens are read as such, and none are added by the tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.data.chat import ChatTemplate, has_template
from phalanx.data.rows import ROLES, Message, example_of
from phalanx.engines.serve.parameters import (
    COMMON,
    Reader,
    Table,
    boolean,
    ignored,
    num_logprobs,
    only,
    read,
    text,
    tokens_to_make,
    wrong,
)
from phalanx.engines.serve.protocol import Asked, asked_of
from phalanx.errors import JobError

_MAX_MESSAGES = 4096
_DEVELOPER = "developer"  # what newer clients call the system


def _content(name: str, value: Any) -> str:
    """Text, or parts that are all text, joined."""
    if isinstance(value, str):
        return text(name, value)
    if not isinstance(value, list):
        raise wrong(name, value, "must be a text or a list of parts")
    texts = []
    for index, part in enumerate(value):
        place = f"{name}[{index}]"
        if not isinstance(part, Mapping):
            raise wrong(place, part, "must be a part with a type")
        if part.get("type") != "text":
            rule = "this server takes text; other parts cannot be read by it"
            raise wrong(f"{place}.type", part.get("type"), rule, ["text"])
        texts.append(text(f"{place}.text", part.get("text")))
    return "".join(texts)


def _nothing(name: str, value: Any) -> None:
    """Fields that answers of the interface have and this server leaves empty."""
    if value not in (None, [], ""):
        raise wrong(name, value, "is not supported by this server")


_MESSAGE: Mapping[str, Reader] = {
    "role": text,
    "content": _content,
    "name": text,
    "tool_call_id": text,
    "tool_calls": lambda name, value: value,  # read with the whole message
    "reasoning_content": text,
    **dict.fromkeys(("refusal", "audio", "function_call", "annotations"), _nothing),
}


def _messages(name: str, value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= _MAX_MESSAGES:
        raise wrong(name, value, f"must be a list of 1 to {_MAX_MESSAGES} messages")
    return tuple(_message(f"{name}[{index}]", each) for index, each in enumerate(value))


def _below(at: str, reader: Reader) -> Reader:
    """The reader of an entry, which names the whole path."""
    return lambda name, value: reader(f"{at}.{name}", value)


def _message(at: str, value: Any) -> Message:
    table: Table = {key: (_below(at, reader), None) for key, reader in _MESSAGE.items()}
    given = {key: each for key, each in read(value, table, where=at).items() if each is not None}
    role, content = given.pop("role", None), given.pop("content", None)
    role = "system" if role == _DEVELOPER else role
    if role not in ROLES:
        raise wrong(f"{at}.role", role, "is no role", [*ROLES, _DEVELOPER])
    calls = given.pop("tool_calls", None)
    if calls:
        given["tool_calls"] = _tool_calls(at, role, calls)
    elif content is None:
        raise wrong(f"{at}.content", None, "must be given")
    extra = json.dumps({key: each for key, each in given.items() if each}, sort_keys=True)
    return Message(role, content or "", "" if extra == "{}" else extra)


def _tool_calls(at: str, role: str, calls: Any) -> list[Any]:
    """Calls as templates expect them, which is as training data has them."""
    turn = {"role": role, "content": None, "tool_calls": calls}
    try:
        extra = example_of({"messages": [turn]}, "messages", at).messages[0].extra
    except JobError as error:
        where = error.where.replace(f"{at}: messages[0]", at)
        raise JobError("serve/request", where, error.value, error.rule, legal=error.legal) from None
    return list(json.loads(extra)["tool_calls"])


CHAT: Table = COMMON | {
    "messages": (_messages, None),
    "max_tokens": (tokens_to_make, None),
    "max_completion_tokens": (tokens_to_make, None),
    "logprobs": (boolean, False),
    "top_logprobs": (num_logprobs, None),
    "add_generation_prompt": (boolean, True),
    "add_special_tokens": (boolean, False),
    "echo": (only(False), False),
    "continue_final_message": (only(False), False),
    "chat_template": (only(), None),
    "chat_template_kwargs": (only({}), None),
    "documents": (only([]), None),
    "tools": (only([]), None),
    "functions": (only([]), None),
    "tool_choice": (only("none"), None),
    "function_call": (only("none"), None),
    "parallel_tool_calls": (boolean, None),
    "response_format": (only({"type": "text"}), None),
    "modalities": (only(["text"]), None),
    "audio": (only(), None),
    "prediction": (only(), None),
    "reasoning_effort": (only(), None),
    "verbosity": (only("medium"), None),
    "web_search_options": (only(), None),
    "prompt_cache_retention": (ignored, None),
}
# A conversation in `/tokenize`.
CHAT_TEXT: Table = {
    "model": (text, None),
    "messages": (_messages, None),
    "add_generation_prompt": (boolean, True),
    "add_special_tokens": (boolean, False),
    "return_token_strs": (boolean, False),
}


@dataclass(frozen=True)
class ChatRenderer:
    """Conversations into prompts.

    Args:
        template: of the model folder (None: it has none).
    """

    template: ChatTemplate | None

    @staticmethod
    def from_folder(folder: str | Path) -> ChatRenderer:
        """Of a model folder.

        Raises:
            JobError: `job/syntax` for a template that is no jinja2.
        """
        return ChatRenderer(ChatTemplate.from_folder(folder) if has_template(folder) else None)

    def prompt(self, messages: tuple[Message, ...], *, opens_turn: bool = True) -> str:
        """The text of a conversation.

        Args:
            opens_turn: end it with the beginning of the assistant's turn.

        Raises:
            JobError: `serve/request` without a template, or with the template's own complaint.
        """
        if self.template is None:
            rule = "the model folder has no chat template; use /v1/completions"
            raise wrong("messages", None, rule)
        try:
            return self.template.render(messages, add_generation_prompt=opens_turn)
        except JobError as error:
            roles = [each.role for each in messages]
            raise wrong("messages", roles, error.rule) from None


def parse_chat(body: Any, renderer: ChatRenderer) -> Asked:
    """Read the body of `/v1/chat/completions`; the conversation becomes its one prompt.

    Raises:
        JobError: `serve/request` naming the parameter.
    """
    values = read(body, CHAT)
    if values["messages"] is None:
        raise wrong("messages", None, "must be a list of messages")
    limits = [values[name] for name in ("max_completion_tokens", "max_tokens")]
    if None not in limits and limits[0] != limits[1]:
        raise wrong(
            "max_tokens", limits[1], "is another limit than max_completion_tokens", limits[:1]
        )
    if values["top_logprobs"] is not None and not values["logprobs"]:
        raise wrong("top_logprobs", values["top_logprobs"], "needs logprobs = true")
    prompt = renderer.prompt(values["messages"], opens_turn=values["add_generation_prompt"])
    return asked_of(
        values,
        (prompt,),
        limits[0] if limits[0] is not None else limits[1],
        num_logprobs=(values["top_logprobs"] or 0) if values["logprobs"] else None,
        add_special=values["add_special_tokens"],
    )
