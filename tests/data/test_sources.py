"""Sources: the built-in pairs and JSON-lines files."""

from __future__ import annotations

import json
import os.path
import textwrap

import pytest

from phalanx.data import sources
from phalanx.data.python_docs import question_answer_pairs
from phalanx.errors import JobError


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


def test_pairs_are_the_same_list_every_time(pairs):
    assert question_answer_pairs() == pairs


def _file(tmp_path, *rows):
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def test_three_forms_of_rows(tmp_path):
    path = _file(
        tmp_path,
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        "",
        {"prompt": "a", "completion": "c"},
        {"text": "plain"},
        {"text": "plain"},
    )
    rows = sources.read_examples(path)
    assert [[m.role for m in row.messages] for row in rows] == [["user", "assistant"]] * 2 + [[]]
    assert rows[2].text == "plain" and rows[2].where.endswith("chat.jsonl:4")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("{", "chat.jsonl:1"),
        ({"question": "a"}, "['question']: is a row of no known form"),
        ({"messages": []}, "must be a list"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "'bot': is no role; nearest legal"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content = 3"),
        ({"text": ""}, "no known form"),
    ],
)
def test_unusable_rows_are_named_by_line(tmp_path, row, told):
    with pytest.raises(JobError) as caught:
        sources.read_examples(_file(tmp_path, row))
    assert caught.value.code == "data/row" and told in str(caught.value)


def test_absent_file_names_what_is_there(tmp_path):
    (tmp_path / "chats.jsonl").touch()
    with pytest.raises(JobError, match=r"chats\.jsonl") as caught:
        sources.read_examples(str(tmp_path / "chat.jsonl"))
    assert caught.value.code == "job/not-found"


def test_key_depends_on_content_only(tmp_path):
    first = sources.read_examples(_file(tmp_path, {"text": "x"}, {"text": "a"}))[1]
    second = sources.read_examples(_file(tmp_path, {"text": "a"}))[0]
    assert first.key == second.key and first.where != second.where
