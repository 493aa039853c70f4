"""Chat templates, loss masks, limits, the account of tokens, the split and the cache."""

from __future__ import annotations

import json

import numpy as np
import pytest

from phalanx.data import cached
from phalanx.data.chat import ChatTemplate
from phalanx.data.prepare import DataSettings, prepare, small_tokenizer
from phalanx.data.sources import Message
from phalanx.data.tokenise import TextTokenizer, train_tokenizer
from phalanx.errors import JobError

# a template in the manner of Gemma: the system turn folded into the user's, turns that alternate
FOLDING = (
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}{% set head = messages[0].content + '\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set head = '' %}{% set turns = messages %}"
    "{% endif %}"
    "{% for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ (head if loop.first else '') + m.content | trim }}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    texts = ["What does it do? It does this and that, and nothing else."] * 3
    return train_tokenizer(texts, 300, tmp_path_factory.mktemp("tokenizer"))


def chat(*turns):
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[t[0]], "content": t[1:]} for t in turns]


def source(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared(tmp_path, folder, rows, **settings):
    settings = {"held_out_frac": 0.0, "max_tokens": 500} | settings
    return prepare(DataSettings(source=source(tmp_path, *rows), **settings), folder)


def test_marks_are_what_the_assistant_says_to_the_end_of_turn():
    template = ChatTemplate(FOLDING, {"bos_token": "<s>"})
    turns = [
        Message("system", "be brief"),
        Message("user", "one?"),
        Message("assistant", " yes "),
        Message("user", "two?"),
        Message("assistant", "no"),
    ]
    text = template.render_marked(turns)
    assert [text.text[a:b] for a, b in text.learnt] == ["yes<end>", "no<end>"]
    second_user = text.turn_starts[-1]
    assert text.text[second_user:].startswith("<turn>user\ntwo?")


def test_template_complaint_names_the_row():
    with pytest.raises(JobError, match="turns must alternate") as caught:
        ChatTemplate(FOLDING).render([Message("assistant", "x")], where="rows.jsonl:7")
    assert caught.value.code == "data/row" and "rows.jsonl:7" in str(caught.value)


def test_template_that_rewrites_earlier_turns_is_refused():
    shortened = "{% for m in messages %}{{ m.content if loop.last else '...' }}|{% endfor %}"
    with pytest.raises(JobError, match="differently alone"):
        ChatTemplate(shortened).render_marked(
            [Message("user", "long"), Message("assistant", "a"), Message("user", "b")]
        )


def test_template_cannot_leave_its_sandbox():
    with pytest.raises(JobError):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}").render([])


def test_every_sample_learns_something_and_its_last_target_ends_the_turn(tmp_path, folder):
    rows = [
        {"messages": chat("uhello", "ahi there", "uand now?", "athat")},
        {"prompt": "What does it do?", "completion": "It does this."},
        {"messages": chat("sbe brief", "uwhat?", "athis")},
    ]
    found = prepared(tmp_path, folder, rows)
    tokenizer = TextTokenizer(folder)
    end = tokenizer.token_id("eos_token")
    learnt = []
    for index in range(len(found.train)):
        sample = found.train[index]
        counted = np.flatnonzero(sample.counted)
        assert sample.tokens[counted[-1]] == end and not sample.counted[0]
        learnt.append(tokenizer.decode(sample.tokens[counted], skip_special=False))
    assert learnt == ["hi there<eos>that<eos>", "It does this.<eos>", "this<eos>"]


def test_text_counts_all_but_its_first_token(tmp_path, folder):
    found = prepared(tmp_path, folder, [{"text": "It does this and that"}])
    tokenizer = TextTokenizer(folder)
    sample = found.train[0]
    assert sample.tokens[0] == tokenizer.token_id("bos_token")
    assert sample.tokens[-1] == tokenizer.token_id("eos_token")
    assert sample.counted.tolist() == [False] + [True] * (len(sample.tokens) - 1)


LONG = "and that " * 40


@pytest.mark.parametrize(
    ("too_long", "samples", "dropped", "cut"),
    [("drop", 1, 2, 0), ("truncate", 3, 0, 2), ("split", 6, 0, 2)],
)
def test_every_token_is_accounted_for(tmp_path, folder, too_long, samples, dropped, cut):
    rows = [
        {"text": "short"},
        {"text": "x" * 45},
        {"messages": chat("uwhat?", "athis", "uand?", "athat", "ulast?", "anone")},
    ]
    found = prepared(tmp_path, folder, rows, max_tokens=30, too_long=too_long)
    audit = found.audit
    assert (audit.samples, audit.rows_dropped, audit.rows_cut) == (samples, dropped, cut)
    assert audit.tokens_trained == found.train.num_counted
    assert audit.tokens_trained + audit.tokens_masked == found.train.num_tokens
    assert audit.tokens_in == found.train.num_tokens + audit.tokens_dropped
    assert found.train.lengths.max() <= 30


def test_long_rows_are_an_error_unless_said_otherwise(tmp_path, folder):
    with pytest.raises(JobError, match=r"rows.jsonl:1 = \d+ tokens: has .*max_tokens = 30") as bad:
        prepared(tmp_path, folder, [{"prompt": "a", "completion": LONG}], max_tokens=30)
    assert bad.value.legal == ("drop", "split", "truncate")


def test_split_refuses_an_exchange_that_cannot_be_cut(tmp_path, folder):
    rows = [{"messages": chat("ua", "ab", "ua", f"a{LONG}")}]
    with pytest.raises(JobError, match="one exchange has"):
        prepared(tmp_path, folder, rows, max_tokens=30, too_long="split")


def test_nothing_to_learn_is_refused(tmp_path, folder):
    rows = [{"prompt": "a", "completion": LONG}]
    with pytest.raises(JobError) as caught:
        prepared(tmp_path, folder, rows, max_tokens=30, too_long="drop")
    assert caught.value.code == "data/empty"
    with pytest.raises(JobError, match="no assistant turn"):
        prepared(tmp_path, folder, [{"messages": chat("ua")}])


def test_turn_without_an_end_token_is_refused(tmp_path, folder):
    own = tmp_path / "endless"
    own.mkdir()
    (own / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (own / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    with pytest.raises(JobError, match="does not end an assistant turn"):
        prepared(tmp_path, own, [{"prompt": "a", "completion": "b"}])


def test_split_follows_content_not_position(tmp_path, folder):
    rows = [{"text": f"row number {index}"} for index in range(60)]
    one = prepared(tmp_path, folder, rows, held_out_frac=0.25)
    two = prepared(tmp_path, folder, [*rows[::-1], {"text": "new"}], held_out_frac=0.25)
    held = [set(each.held_out.keys.tolist()) for each in (one, two)]
    assert held[0] and held[0] <= held[1] and len(held[1] - held[0]) <= 1
    assert held[0].isdisjoint(one.train.keys.tolist())
    assert len(one.train) + len(one.held_out) == 60


def test_cache_is_used_and_depends_on_content(tmp_path, folder):
    first = prepared(tmp_path, folder, [{"text": "one"}])
    stamp = first.path.stat().st_mtime_ns
    again = prepared(tmp_path, folder, [{"text": "one"}])
    assert again.path == first.path and again.path.stat().st_mtime_ns == stamp
    assert np.array_equal(again.train.tokens_T, first.train.tokens_T)
    assert prepared(tmp_path, folder, [{"text": "two"}]).path != first.path
    assert prepared(tmp_path, folder, [{"text": "one"}], max_tokens=99).path != first.path


def test_failed_writer_leaves_nothing_behind(tmp_path):
    def write(path):
        path.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cached.cached_file(tmp_path / "kind" / "result", write)
    assert list((tmp_path / "kind").iterdir()) == []


def test_small_tokenizer_is_the_same_for_the_same_text(tmp_path):
    path = source(tmp_path, *({"text": f"some words to learn {i}"} for i in range(30)))
    folder = small_tokenizer(path, 290)
    tokenizer = TextTokenizer(folder)
    text = "some words, naïve café\n\ttoo"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size <= 290
    before = (folder / "tokenizer.json").read_bytes()
    again = train_tokenizer([f"some words to learn {i}" for i in range(30)], 290, tmp_path / "two")
    assert (again / "tokenizer.json").read_bytes() == before


def test_bad_settings_name_what_is_legal():
    with pytest.raises(JobError, match="nearest legal values: truncate"):
        DataSettings(too_long="truncated")
    with pytest.raises(JobError, match="max_tokens = 1"):
        DataSettings(max_tokens=1)
