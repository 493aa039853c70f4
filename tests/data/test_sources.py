"""Sources: the built-in pairs, files of four kinds, folders of them."""

from __future__ import annotations

import json
import os.path
import sys
import textwrap
import tracemalloc

import pytest

from phalanx.data import python_docs, readers, sources
from phalanx.data.python_docs import question_answer_pairs
from phalanx.errors import JobError

LIBRARY = python_docs._library()


@pytest.fixture(scope="module")
def pairs():
    return question_answer_pairs()


def test_pairs_are_the_documentation_that_python_shows(pairs):
    by_name = {pair.name: pair for pair in pairs}
    for function in (textwrap.dedent, textwrap.shorten, os.path.commonprefix):
        module = {"genericpath": "genericpath"}.get(function.__module__, function.__module__)
        pair = by_name[f"{module}.{function.__name__}"]
        told = " ".join(function.__doc__.split())
        assert told.startswith(" ".join(pair.answer.split()))
        assert function.__name__ in pair.question


def test_pairs_are_many_public_and_distinct(pairs):
    assert len(pairs) > 3000
    assert len({pair.answer for pair in pairs}) == len(pairs)
    assert not [p for p in pairs if any(part.startswith("_") for part in p.name.split("."))]
    assert {"os.path.join"} & {pair.name for pair in pairs}


def test_pairs_are_the_same_list_in_whatever_order_a_folder_names_its_files(monkeypatch):
    class Shuffled(type(LIBRARY)):
        def rglob(self, pattern):
            return reversed(sorted(super().rglob(pattern)))

    found = []
    for folder in (LIBRARY / "email", Shuffled(LIBRARY / "email")):
        monkeypatch.setattr(python_docs, "_library", lambda folder=folder: folder)
        found.append(question_answer_pairs())
    assert found[0] == found[1] and len(found[0]) > 50


def _file(tmp_path, *rows, name="chat.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def read(source):
    return list(sources.read_examples(str(source)))


def turns(row):
    return [(message.role, message.content) for message in row.messages]


ASKED = [("user", "a"), ("assistant", "b")]
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": MESSAGES},
        {"messages": MESSAGES, "prompt": "of another column", "text": None},
        {"messages": [dict(m, content=[{"type": "text", "text": m["content"]}]) for m in MESSAGES]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"conversations": MESSAGES},
        {"prompt": "a", "completion": "b"},
        {"instruction": "a", "input": "", "output": "b"},
        {"instruction": "a", "output": "b", "text": "both at once"},
    ],
)
def test_all_forms_of_a_conversation_are_the_same_row(tmp_path, row):
    (found,) = read(_file(tmp_path, row))
    (plain,) = read(_file(tmp_path, {"messages": MESSAGES}))
    assert turns(found) == ASKED and found.key == plain.key


def test_rows_have_their_line_and_blank_lines_are_none(tmp_path):
    path = _file(tmp_path, {"text": "one"}, "", "  ", {"text": "plain"}, {"text": "plain"})
    rows = read(path)
    assert [row.where.rsplit(":")[-1] for row in rows] == ["1", "4", "5"]
    assert [row.text for row in sources.distinct(rows)] == ["one", "plain"]


def test_an_instruction_is_asked_with_its_input(tmp_path):
    (row,) = read(_file(tmp_path, {"instruction": "add", "input": "1 and 2", "output": "3"}))
    assert turns(row) == [("user", "add\n\n1 and 2"), ("assistant", "3")]


def test_calls_and_weights_belong_to_the_identity_of_a_row(tmp_path):
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    with_call = {"role": "assistant", "content": None, "tool_calls": [call]}
    rows = [
        {"messages": MESSAGES},
        {"messages": [MESSAGES[0], MESSAGES[1] | {"weight": 0}]},
        {"messages": [MESSAGES[0], with_call]},
        {"messages": MESSAGES, "tools": [{"name": "f"}]},
    ]
    found = read(_file(tmp_path, *rows))
    assert len({row.key for row in found}) == 4
    assert not found[1].messages[1].learnt and found[0].messages[1].learnt
    called = found[2].messages[1].to_dict()["tool_calls"][0]["function"]
    assert called == {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("{", "chat.jsonl:1"),
        ("[1, 2", "chat.jsonl:1"),
        ('{"text": ' + "[" * 100_000, "is not valid JSON"),
        ('{"text": ' + "1" * 5000 + "}", "is not valid JSON"),
        ({"question": "a"}, "['question']: is a row of no known form"),
        ("7", "= 7: is a row of no known form"),
        ({"messages": []}, "must be a list"),
        ({"messages": "hello"}, "must be a list"),
        ({"messages": ["hello"]}, "messages[0] = 'hello': must be a turn"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "'bot': is no role; nearest legal"),
        ({"messages": [{"role": "user"}]}, "messages[0].content = None"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content = 3"),
        ({"messages": [{"role": "user", "content": " "}]}, "a turn without content"),
        ({"messages": [{"role": "user", "content": []}]}, "a turn without content"),
        ({"messages": [dict(MESSAGES[1], weight=0.5)]}, "messages[0].weight = 0.5"),
        ({"messages": [dict(MESSAGES[1], tool_calls=[{}])]}, "must name the function"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "content[0].type = 'image_url': is no part of text",
        ),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "conversations[0].from = 'bot'"),
        ({"prompt": "a", "completion": ""}, "completion = '': is empty"),
        ({"instruction": "a", "output": 3}, "output = 3: must be text"),
        ('{"text": "half a pair: \\ud83d"}', "surrogates not allowed"),
    ],
)
def test_unusable_rows_are_named_by_line(tmp_path, row, told):
    with pytest.raises(JobError) as caught:
        read(_file(tmp_path, row))
    assert caught.value.code == "data/row" and told in str(caught.value)
    assert "chat.jsonl:1" in str(caught.value)


def test_one_form_in_a_file(tmp_path):
    with pytest.raises(JobError, match=r"chat.jsonl:2 = .*another form than .*chat.jsonl:1"):
        read(_file(tmp_path, {"text": "a"}, {"messages": MESSAGES}))
    (tmp_path / "own").mkdir()
    _file(tmp_path / "own", {"text": "a"}, name="a.jsonl")
    _file(tmp_path / "own", {"messages": MESSAGES}, name="b.jsonl")
    assert len(read(tmp_path / "own")) == 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "is a file without a row"),
        (b" \n\n", "is a file without a row"),
        (b"\xef\xbb\xbf{}", "byte-order mark"),
        (b"\xff\xfe{\x00}\x00", "is UTF-16"),
        (b'{"text": "a"}\n{"text": "caf\xe9"}\n', ":2: is not UTF-8"),
    ],
)
def test_files_in_other_clothes_are_named_by_line(tmp_path, name, data, told):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(JobError) as caught:
        read(tmp_path / name)
    assert name in str(caught.value) and told in str(caught.value)


def test_a_list_is_read_element_by_element(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_CHUNK_CHARS", 7)
    rows = [{"text": f"row {number} \u00e9 \n [{{"} for number in range(40)]
    for text in (
        json.dumps(rows),
        json.dumps(rows, indent=1),
        json.dumps(rows, ensure_ascii=False),
    ):
        (tmp_path / "rows.json").write_text(text)
        assert [row.text for row in read(tmp_path / "rows.json")] == [row["text"] for row in rows]
    lines = [row.where.rsplit(":")[-1] for row in read(tmp_path / "rows.json")]
    assert set(lines) == {"1"}
    (tmp_path / "rows.json").write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    lines = [row.where.rsplit(":")[-1] for row in read(tmp_path / "rows.json")]
    assert lines == [str(number + 2) for number in range(40)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[\n{"text": "a"},\n{"text" "b"}]', "rows.json:3: is not valid JSON"),
        ('[\n{"text": "a"}\n{"text": "b"}]', "rows.json:3 = "),
        ('[{"text": "a"},', "the end of the file"),
        ('[\n{"text": "a"}]\n]', "expected nothing behind the list"),
        ('[{"text": "a', "is not valid JSON"),
        ('{"rows": [\n{"text": "a"}]}', "rows.json:1"),
    ],
)
def test_a_broken_list_is_named_by_line(tmp_path, text, told):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(JobError) as caught:
        read(tmp_path / "rows.json")
    assert told in str(caught.value)


def test_a_json_file_may_hold_a_row_a_line(tmp_path):
    assert len(read(_file(tmp_path, {"text": "a"}, {"text": "b"}, name="rows.json"))) == 2


def test_a_text_file_is_a_document_and_a_long_one_several(tmp_path, monkeypatch):
    text = "".join(f"line {number} \u00e9\n" + "\n" * (number % 5 == 4) for number in range(50))
    (tmp_path / "a.txt").write_text(text)
    assert [row.text for row in read(tmp_path / "a.txt")] == [text]
    monkeypatch.setattr(readers, "_TEXT_BYTES", 100)
    rows = read(tmp_path / "a.txt")
    assert "".join(row.text for row in rows) == text and len(rows) > 5
    assert all(row.text.endswith("\n") for row in rows)
    at = [int(row.where.rsplit(":")[-1]) for row in rows]
    assert at == [1 + text[: text.index(row.text)].count("\n") for row in rows]
    (tmp_path / "a.txt").write_text("\u00e9" * 500)  # no place to cut but between characters
    assert "".join(row.text for row in read(tmp_path / "a.txt")) == "\u00e9" * 500


def test_parquet_rows_are_the_rows_of_json(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"messages": MESSAGES, "id": number} for number in range(700)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = read(tmp_path / "rows.parquet")
    assert len(found) == 700 and turns(found[-1]) == ASKED
    assert found[-1].where.endswith("rows.parquet: row 700")
    bad = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}]
    parquet.write_table(arrow.Table.from_pylist(bad), tmp_path / "bad.parquet")
    with pytest.raises(JobError, match=r"bad.parquet: row 2"):
        read(tmp_path / "bad.parquet")
    parquet.write_table(arrow.Table.from_pylist([{"id": 1}]), tmp_path / "none.parquet")
    with pytest.raises(JobError, match="has no column"):
        read(tmp_path / "none.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-9])
    with pytest.raises(JobError, match="is not valid parquet"):
        read(tmp_path / "cut.parquet")


def test_parquet_without_its_library_names_the_command(tmp_path, monkeypatch):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(JobError, match=r"pip install 'phalanx-parallel\[data\]'") as caught:
        read(tmp_path / "rows.parquet")
    assert caught.value.code == "environment/missing"


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    for name, text in (("b/2.jsonl", "two"), ("a.jsonl", "one"), ("b/10.txt", "ten")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": text}) if "json" in name else text)
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.jsonl").write_text("hidden")
    assert [row.text for row in read(tmp_path)] == ["one", "ten", "two"]
    before = sources.content_hash(str(tmp_path))
    (tmp_path / "README.md").write_text("changed")
    assert sources.content_hash(str(tmp_path)) == before
    (tmp_path / "b" / "10.txt").write_text("eleven")
    assert sources.content_hash(str(tmp_path)) != before


def test_a_folder_without_data_is_refused(tmp_path):
    with pytest.raises(JobError, match="is a folder without data"):
        read(tmp_path)
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(JobError, match="is a link to nothing"):
        read(tmp_path)


def test_absent_file_names_what_is_there(tmp_path):
    (tmp_path / "chats.jsonl").touch()
    with pytest.raises(JobError, match=r"nearest legal values: chats\.jsonl") as caught:
        read(tmp_path / "chat.jsonl")
    assert caught.value.code == "job/not-found"
    (tmp_path / "chats.csv").touch()
    with pytest.raises(JobError, match=r"no known kind \(\.csv\).*\.parquet"):
        read(tmp_path / "chats.csv")


def test_key_depends_on_content_only(tmp_path):
    first = read(_file(tmp_path, {"text": "x"}, {"text": "a"}))[1]
    second = read(_file(tmp_path, {"text": "a"}))[0]
    assert first.key == second.key and first.where != second.where


def test_memory_of_reading_does_not_grow_with_the_file(tmp_path):
    row = json.dumps({"text": "word " * 40})
    (tmp_path / "a.jsonl").write_text(f"{row}\n" * 12_000)
    (tmp_path / "a.json").write_text(f"[{','.join([row] * 12_000)}]")
    for name in ("a.jsonl", "a.json"):
        tracemalloc.start()
        assert sum(1 for _ in sources.read_examples(str(tmp_path / name))) == 12_000
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 5e6, name
