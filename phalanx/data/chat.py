"""Chat templates: a conversation into text, and where in that text its assistant turns lie.

The model's own template (jinja2, as `tokenizer_config.json` or `chat_template.jinja` holds it) is
run in a sandbox. A tokenizer without one gets `PLAIN_TEMPLATE`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from phalanx.data.sources import Message
from phalanx.errors import JobError

# "User:", a line with the turn, the end token; the same for "Assistant:" and "System:".
PLAIN_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ message.role | capitalize }}:\n{{ message.content | trim }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)
_TOKEN_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: the whole.
        learnt: (start, end) in characters of each assistant turn: what the model has to say, the
            token that ends the turn included, white space after it excluded.
        turn_starts: where each turn that is not an assistant's begins, in characters.
    """

    text: str
    learnt: tuple[tuple[int, int], ...]
    turn_starts: tuple[int, ...]


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the special tokens that it may use.

    Attributes:
        source: jinja2 text.
        tokens: "bos_token", "eos_token", ... -> text ("" when the tokenizer has none).
    """

    source: str
    tokens: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def from_folder(folder: str | Path) -> ChatTemplate:
        """The template of a model folder; `PLAIN_TEMPLATE` with its tokens when it names none.

        Raises:
            JobError: `job/syntax` for an unreadable tokenizer_config.json; `job/missing` when
                neither a template nor an end token is known.
        """
        folder = Path(folder)
        config = _read_json(folder / "tokenizer_config.json")
        tokens = {key: _token_text(config.get(key)) for key in _TOKEN_KEYS}
        file = folder / "chat_template.jinja"
        source = file.read_text() if file.is_file() else _template_of(config)
        if source is None:
            if not tokens["eos_token"]:
                where, rule = f"{folder}/tokenizer_config.json: eos_token", "ends a turn: needed"
                raise JobError("job/missing", where, None, rule)
            source = PLAIN_TEMPLATE
        return ChatTemplate(source, tokens)

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False, where: str = ""
    ) -> str:
        """The text of these turns; with the opening of an assistant turn if asked.

        Raises:
            JobError: `data/row` with the template's own complaint.
        """
        turns = [{"role": each.role, "content": each.content} for each in messages]
        try:
            return _compile(self.source).render(
                messages=turns, add_generation_prompt=add_generation_prompt, **self.tokens
            )
        except TemplateError as error:
            roles = [each.role for each in messages]
            rule = f"the chat template refuses this conversation: {error}"
            raise JobError("data/row", where or "messages", roles, rule) from error

    def render_marked(self, messages: Sequence[Message], where: str = "") -> Rendered:
        """The text with its assistant turns marked, by rendering every prefix.

        Raises:
            JobError: `data/row` when a prefix of the conversation does not render to a prefix of
                the text: then no part of it can be attributed to a turn.
        """
        text = self.render(messages, where=where)
        learnt, turn_starts, done = [], [], 0
        for index, message in enumerate(messages):
            upto = messages[: index + 1]
            if message.role == "assistant":
                start = self._prefix(text, messages[:index], where, add_generation_prompt=True)
                end = self._prefix(text, upto, where)
                learnt.append((start, start + len(text[start:end].rstrip())))
                done = end
            else:
                turn_starts.append(done)
                if message.role == "user":  # templates may fold the system turn into the user's
                    done = self._prefix(text, upto, where)
        return Rendered(text, tuple(learnt), tuple(turn_starts))

    def _prefix(self, text: str, messages: Sequence[Message], where: str, **options: Any) -> int:
        part = self.render(messages, where=where, **options)
        if not text.startswith(part):
            rule = "the chat template renders the beginning of this conversation differently alone"
            raise JobError("data/row", where or "messages", f"{len(messages)} turns", rule)
        return len(part)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        rule = f"is not valid JSON: {error}"
        raise JobError("job/syntax", str(path), None, rule) from error


def _token_text(value: Any) -> str:
    return value.get("content", "") if isinstance(value, dict) else value or ""


def _template_of(config: dict[str, Any]) -> str | None:
    named = config.get("chat_template")
    if isinstance(named, list):  # several templates: the one for plain chat
        by_name = {each["name"]: each["template"] for each in named}
        return by_name.get("default")
    return named


_compiled: dict[str, Any] = {}


def _compile(source: str) -> Any:
    if source not in _compiled:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        _compiled[source] = environment.from_string(source)
    return _compiled[source]


def _refuse(message: str) -> None:
    raise TemplateError(message)
