"""Chat templates: a conversation into text, by the model's own jinja2 template, in a sandbox.

The template is `chat_template.jinja` of a model folder or the entry of its `tokenizer_config.json`;
a tokenizer without one gets `PLAIN_TEMPLATE`. `data.marks` says which part of the text is learnt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from phalanx.data.rows import Message
from phalanx.errors import JobError, shown

# "User:", a line with the turn, the end token; the same for "Assistant:" and "System:".
PLAIN_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ message.role | capitalize }}:\n{{ message.content | trim }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:\n{% endif %}"
)
# What `{% generation %}` blocks put around their text; private characters that no row may hold.
OPENING, CLOSING = "\U000f1a01", "\U000f1a02"
_TOKEN_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")
# Templates that write the day get this one (Llama 3's own where it knows none): what a job trains
# on must not depend on the day on which its rows were prepared.
_DAY = date(2024, 7, 26)
# What a template's own code may raise, be it called with a row that it did not expect.
_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
_NO_TEMPLATE = (TemplateError, SyntaxError, ValueError, RecursionError, OverflowError)


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
    def from_folder(folder: str | Path, template_file: str | Path = "") -> ChatTemplate:
        """The template of a model folder; `PLAIN_TEMPLATE` with its tokens when it names none.

        Args:
            folder: with `tokenizer_config.json`.
            template_file: a template to use instead ("": none).

        Raises:
            JobError: `job/syntax` for an unreadable tokenizer_config.json or a template that is no
                jinja2; `job/missing` when neither a template nor an end token is known.
        """
        folder = Path(folder)
        config = _read_json(folder / "tokenizer_config.json")
        where = f"{folder}/tokenizer_config.json"
        tokens = {key: _token_text(config.get(key), f"{where}: {key}") for key in _TOKEN_KEYS}
        where, source = _find_source(folder, config, template_file)
        if source is None:
            if not tokens["eos_token"]:
                where, rule = f"{folder}/tokenizer_config.json: eos_token", "ends a turn: needed"
                raise JobError("job/missing", where, None, rule)
            source = PLAIN_TEMPLATE
        try:
            _compile(source)
        except _NO_TEMPLATE as error:
            line = getattr(error, "lineno", None)
            at = f"{where}:{line}" if line else where
            rule = f"is no jinja2 template: {error}"
            raise JobError("job/syntax", at, None, rule) from error
        return ChatTemplate(source, tokens)

    @property
    def has_generation_blocks(self) -> bool:
        """Whether it marks itself what an assistant says."""
        return bool(_compile(self.source).has_generation_blocks)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        where: str = "",
        tools: str = "",
        keep_marks: bool = False,
    ) -> str:
        """The text of these turns; with the opening of an assistant turn if asked.

        Args:
            where: file and line, for errors.
            tools: definitions of functions, as JSON.
            keep_marks: leave `OPENING` and `CLOSING` around generation blocks.

        Raises:
            JobError: `data/row` with the template's own complaint.
        """
        compiled = _compile(self.source)
        try:
            text = compiled.template.render(
                messages=[each.to_dict() for each in messages],
                add_generation_prompt=add_generation_prompt,
                tools=json.loads(tools) if tools else None,
                **self.tokens,
            )
        except _FAILURES as error:
            roles = [each.role for each in messages]
            told = str(error) or type(error).__name__
            rule = f"the chat template refuses this conversation: {told}"
            raise JobError("data/row", where or "messages", roles, rule) from error
        if keep_marks or not compiled.has_generation_blocks:
            return text
        return text.replace(OPENING, "").replace(CLOSING, "")


def has_template(folder: str | Path) -> bool:
    """Whether a model folder says how a conversation is written."""
    folder = Path(folder)
    return _find_source(folder, _read_json(folder / "tokenizer_config.json"), "")[1] is not None


def has_end_token(folder: str | Path) -> bool:
    """Whether a model folder names the token that ends a turn, which `PLAIN_TEMPLATE` needs."""
    path = Path(folder) / "tokenizer_config.json"
    return bool(_token_text(_read_json(path).get("eos_token"), f"{path}: eos_token"))


def _find_source(
    folder: Path, config: dict[str, Any], template_file: str | Path
) -> tuple[str, str | None]:
    if template_file:
        return str(template_file), _read_template(Path(template_file))
    own = folder / "chat_template.jinja"
    if own.is_file():
        return str(own), _read_template(own)
    for name, table in (("tokenizer_config.json", config), ("chat_template.json", None)):
        table = _read_json(folder / name) if table is None else table
        where = f"{folder}/{name}: chat_template"
        if table.get("chat_template") is not None:
            return where, _template_of(table["chat_template"], where)
    return where, None


def _read_template(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise JobError("job/syntax", str(path), None, f"is not UTF-8: {error.reason}") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        rule = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise JobError("job/not-found", "data.chat_template", path, rule) from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        table = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        rule = f"is not valid JSON: {error}"
        raise JobError("job/syntax", str(path), None, rule) from error
    if not isinstance(table, dict):
        raise JobError("job/syntax", str(path), shown(table), "must be a table")
    return table


def _token_text(value: Any, where: str) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise JobError("job/bad-value", where, shown(value), "must be the text of a token")
    return text or ""


def _template_of(named: Any, where: str) -> str | None:
    if isinstance(named, list):  # several templates: the one for plain chat
        tables = [each for each in named if isinstance(each, dict)]
        named = {str(each.get("name")): each.get("template") for each in tables}.get("default")
    if named is not None and not isinstance(named, str):
        raise JobError("job/bad-value", where, shown(named), "must be a jinja2 template")
    return named


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: what an assistant says, marked as such."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.generation_blocks += 1  # type: ignore[attr-defined]
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{OPENING}{caller()}{CLOSING}"


@dataclass(frozen=True)
class _Compiled:
    template: Any
    has_generation_blocks: bool


_compiled: dict[str, _Compiled] = {}


def _compile(source: str) -> _Compiled:
    if source not in _compiled:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.generation_blocks = 0  # type: ignore[attr-defined]
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _DAY.strftime
        environment.filters["tojson"] = _to_json
        template = environment.from_string(source)
        blocks = environment.generation_blocks  # type: ignore[attr-defined]
        _compiled[source] = _Compiled(template, blocks > 0)
    return _compiled[source]


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """As templates expect it: plain text, nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    raise TemplateError(message)
