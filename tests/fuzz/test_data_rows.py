"""Files of rows: whatever bytes they hold, rows or one clear line that names the file."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from phalanx.data import readers
from phalanx.data.chat import ChatTemplate
from phalanx.data.marks import mark_turns
from phalanx.data.rows import Example
from phalanx.data.sources import content_hash, read_examples
from phalanx.errors import PhalanxError
from tests.data.templates import SPECIAL, STOCK, WITH_BLOCKS
from tests.fuzz.inputs import json_values, near_bytes, near_tables, near_texts, outcome

CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CHAT = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "7", "name": "f"},
        {"role": "assistant", "content": "it is 7", "weight": 1},
    ],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}
VALID = [
    CHAT,
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"prompt": "a", "completion": "b"},
    {"instruction": "a", "input": "b", "output": "c"},
    {"text": "a caf\u00e9"},
]
LINES = "".join(json.dumps(row) + "\n" for row in [VALID[-1]] * 3)
LIST = json.dumps([CHAT, CHAT], indent=1)
fuzzed = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rows")


def read(folder, name: str, data: bytes) -> Any:
    """The rows of a file, or the refusal, which names the file; with a line, one that exists."""
    path = folder / name
    path.write_bytes(data)
    content_hash(str(path))
    found = outcome(lambda: list(read_examples(str(path))))
    if isinstance(found, PhalanxError):
        assert str(path) in str(found)
    else:
        assert found and all(isinstance(row, Example) and row.key >= 0 for row in found)
        assert all(row.where.startswith(str(path)) for row in found)
    return found


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(readers, "_CHUNK_CHARS", 11)
    monkeypatch.setattr(readers, "_TEXT_BYTES", 64)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.parquet"])
@fuzzed
@given(data=st.binary() | st.text().map(str.encode))
@example(data=b"[" * 100_000)
@example(data=b'{"text": ' + b"9" * 5000 + b"}")
@example(data=b'{"text": "\\ud800"}')
@example(data=b"[" + b'{"text": "a"},' * 3)
@example(data=b"\x00")
@example(data=b"PAR1" * 5)
def test_any_bytes_are_rows_or_refused(folder, name: str, data: bytes):
    read(folder, name, data)


@fuzzed
@given(text=near_texts(LINES))
def test_slips_in_lines_are_refused_with_their_line(folder, text: str):
    found = read(folder, "b.jsonl", text.encode("utf-8", "surrogatepass"))
    if isinstance(found, PhalanxError) and found.code == "data/row":
        assert "b.jsonl:" in found.where


@fuzzed
@given(data=near_bytes(LIST.encode()))
def test_bit_rot_in_a_list_is_refused_with_its_line(folder, data: bytes):
    found = read(folder, "c.json", data)
    if isinstance(found, PhalanxError) and found.code == "data/row":
        line = int(found.where.split("c.json:")[1].split(":")[0])
        assert 1 <= line <= data.count(b"\n") + 1


@fuzzed
@given(row=st.sampled_from(VALID).flatmap(lambda row: near_tables(row, json_values)))
def test_wrong_entries_are_refused_or_harmless(folder, row: dict[str, Any]):
    found = read(folder, "d.jsonl", json.dumps(row).encode("utf-8", "surrogatepass"))
    rows = [] if isinstance(found, PhalanxError) else found
    for each in rows:
        for source in (*STOCK.values(), WITH_BLOCKS) if each.messages else ():
            template = ChatTemplate(source, {"bos_token": "<s>"})
            marked = outcome(mark_turns, template, each, SPECIAL)
            if not isinstance(marked, PhalanxError):
                assert all(start <= end <= len(marked.text) for start, end in marked.learnt)


@pytest.mark.parametrize("row", VALID[1:])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bit_rot_in_parquet_is_refused_or_harmless(folder, row, data: st.DataObject):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    buffer = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist([row] * 3), buffer)
    read(folder, "e.parquet", data.draw(near_bytes(buffer.getvalue())))


@fuzzed
@given(source=st.text(max_size=40).filter(lambda text: "/" not in text))
@example(source="")
@example(source=".")
@example(source="a\0b")
@example(source="x" * 5000)
def test_any_name_of_a_source_is_found_or_refused(tmp_path, monkeypatch, source: str):
    monkeypatch.chdir(tmp_path)
    assert isinstance(outcome(content_hash, source), PhalanxError)
