"""Templates and tokenizer configs: marks that fit the text, or one clear line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from phalanx.data.chat import PLAIN_TEMPLATE, ChatTemplate
from phalanx.data.marks import mark_turns
from phalanx.data.rows import Example, Message
from phalanx.errors import PhalanxError
from tests.data.templates import SPECIAL, STOCK, WITH_BLOCKS
from tests.fuzz.inputs import json_values, near_bytes, near_tables, near_texts, outcome

CALL = json.dumps({"tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]})
ROWS = [
    Example((Message("user", "Qone"), Message("assistant", "Ayes"))),
    Example(
        (
            Message("system", "Qbrief"),
            Message("user", "Qone"),
            Message("assistant", "Ayes"),
            Message("user", "Qtwo"),
            Message("assistant", "<think>\nAr\n</think>\n\nAno"),
        )
    ),
    Example((Message("user", "Qx"), Message("assistant", "", CALL), Message("tool", "Q7"))),
]
CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "<end>", "lstrip": False},
    "chat_template": [{"name": "default", "template": PLAIN_TEMPLATE}],
}
fuzzed = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("template")


def marked(template: Any) -> None:
    """Marks lie in order inside the text, and hold no question."""
    for row in ROWS if isinstance(template, ChatTemplate) else ():
        found = outcome(mark_turns, template, row, SPECIAL)
        if isinstance(found, PhalanxError):
            continue
        edges = [edge for start, end in found.learnt for edge in (start, end)]
        assert edges == sorted(edges) and all(0 <= edge <= len(found.text) for edge in edges)


@pytest.mark.parametrize("name", [*STOCK, "blocks"])
@fuzzed
@given(data=st.data())
def test_slips_in_a_template_are_refused_or_harmless(folder, name: str, data: st.DataObject):
    source = data.draw(near_texts(STOCK.get(name, WITH_BLOCKS)))
    file = folder / "own.jinja"
    file.write_bytes(source.encode("utf-8", "surrogatepass"))
    marked(outcome(ChatTemplate.from_folder, folder, file))


@fuzzed
@given(content=st.binary() | st.text().map(str.encode))
@example(content=b"{{ " + b"(" * 5000)
@example(content=b"{{ " + b"9" * 5000 + b" }}")
@example(content=b"{{ 'a' * 999999999999 }}")
@example(content=b"{{ messages.x.y }}")
@example(content=b"{% generation %}{% generation %}{% endgeneration %}{% endgeneration %}")
@example(content=b"{% for m in messages %}{% generation %}")
def test_any_template_is_compiled_or_refused(folder, content: bytes):
    file = folder / "any.jinja"
    file.write_bytes(content)
    marked(outcome(ChatTemplate.from_folder, folder, file))


@fuzzed
@given(table=near_tables(CONFIG, json_values))
@example(table=CONFIG | {"chat_template": {"default": "x"}})
def test_wrong_entries_of_a_config_are_refused_or_harmless(folder, table: dict[str, Any]):
    text = json.dumps(table).encode("utf-8", "surrogatepass")
    (folder / "tokenizer_config.json").write_bytes(text)
    marked(outcome(ChatTemplate.from_folder, folder))


@fuzzed
@given(data=near_bytes(json.dumps(CONFIG).encode()))
def test_bit_rot_in_a_config_is_refused_or_harmless(folder, data: bytes):
    (folder / "tokenizer_config.json").write_bytes(data)
    marked(outcome(ChatTemplate.from_folder, folder))
