"""Chat templates, loss masks, limits, the account of tokens, the split and the cache."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.data.prepare import DataSettings, prepare, small_tokenizer
from phalanx.data.sources import read_examples
from phalanx.data.tokenise import TextTokenizer, train_tokenizer
from phalanx.errors import JobError


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


def test_every_sample_learns_something_and_its_last_target_ends_the_turn(tmp_path, folder):
    rows = [
        {"messages": chat("uhello", "ahi there", "uand now?", "athat")},
        {"messages": chat("uWhat does it do?", "aIt does this.")},
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


TURNS = chat("uwhat?", "athis", "uand?", "athat", "ulast?", "anone")


def balanced(found):
    """The account of a `Prepared`, after checking it against its samples and its list."""
    audit, dropped = found.audit, list(found.dropped())
    assert audit.tokens_trained == found.train.num_counted
    assert audit.tokens_trained + audit.tokens_masked == found.train.num_tokens
    assert audit.tokens_in == found.train.num_tokens + audit.tokens_dropped
    assert audit.tokens_held_out == found.held_out.num_tokens
    assert audit.samples == len(found.train) and audit.samples_held_out == len(found.held_out)
    for part, lost in (
        ("train", audit.tokens_dropped),
        ("held_out", audit.tokens_held_out_dropped),
    ):
        assert sum(each["dropped_tokens"] for each in dropped if each["part"] == part) == lost
    in_train = [each for each in dropped if each["part"] == "train"]
    assert len(in_train) == audit.rows_dropped + audit.rows_cut
    assert all(each["reason"] and each["where"] for each in dropped)
    return audit


@pytest.mark.parametrize(
    ("too_long", "rows", "samples", "dropped", "cut"),
    [
        ("drop", "text", 1, 1, 0),
        ("truncate", "text", 2, 0, 1),
        ("split", "text", 3, 0, 1),
        ("drop", "chat", 0, 1, 0),
        ("truncate", "chat", 1, 0, 1),
        ("split", "chat", 3, 0, 1),
    ],
)
def test_every_token_is_accounted_for(tmp_path, folder, too_long, rows, samples, dropped, cut):
    given = [{"text": "short"}, {"text": "x" * 45}]
    if rows == "chat":
        given, samples = [{"messages": TURNS}, {"messages": TURNS[:2]}], samples + 1
    found = prepared(tmp_path, folder, given, max_tokens=30, too_long=too_long)
    audit = balanced(found)
    assert (audit.samples, audit.rows_dropped, audit.rows_cut) == (samples, dropped, cut)
    assert found.longest == audit.longest_sample <= 30


words = st.text("ab \n", max_size=60)
exchange = st.tuples(words.filter(str.strip), words.filter(str.strip))


@given(
    texts=st.none() | st.lists(words, min_size=1, max_size=12),
    chats=st.lists(st.lists(exchange, min_size=1, max_size=5), min_size=1, max_size=6),
    settings_=st.fixed_dictionaries(
        {
            "max_tokens": st.integers(2, 80),
            "too_long": st.sampled_from(["drop", "split", "truncate"]),
            "held_out_frac": st.sampled_from([0.0, 0.3]),
            "max_rows": st.integers(0, 5),
        }
    ),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_rows_and_limits_are_accounted_for(tmp_path, folder, texts, chats, settings_):
    rows = [{"text": each} for each in texts] if texts is not None else [
        {"messages": chat(*(f"{role}{text}" for pair in each for role, text in zip("ua", pair)))}
        for each in chats
    ]  # fmt: skip
    try:
        found = prepared(tmp_path, folder, rows, **settings_)
    except JobError as refusal:
        assert refusal.code == "data/empty" or "exchange" in str(refusal)
        return
    audit = balanced(found)
    tokenizer = TextTokenizer(folder)
    whole = [
        row for _, row in tokenizer.encode_examples(read_examples(str(tmp_path / "rows.jsonl")))
    ]
    taken = audit.tokens_in + audit.tokens_held_out + audit.tokens_held_out_dropped
    if not audit.rows_beyond_max:
        assert taken == sum(len(row.tokens) for row in whole) + audit.tokens_repeated
        assert audit.rows_in + audit.rows_held_out == len(rows)
    end = tokenizer.token_id("eos_token")
    for part in (found.train, found.held_out):
        for sample in (part[index] for index in range(len(part))):
            assert len(sample.tokens) <= settings_["max_tokens"]
            assert sample.counted.any() and not sample.counted[0]
            assert sample.tokens[0] == tokenizer.token_id("bos_token")
            if texts is None:
                assert sample.tokens[np.flatnonzero(sample.counted)[-1]] == end


def test_later_parts_begin_like_documents(tmp_path, folder):
    found = prepared(tmp_path, folder, [{"messages": TURNS}], max_tokens=30, too_long="split")
    tokenizer = TextTokenizer(folder)
    texts = [
        tokenizer.decode(found.train[at].tokens, skip_special=False)
        for at in range(len(found.train))
    ]
    assert len(texts) == 3 and all(text.startswith("<bos>User:") for text in texts)
    assert found.audit.tokens_repeated == 2
    assert [each["reason"] for each in found.dropped()] == ["split into 3"]


def test_long_rows_are_an_error_that_counts_them(tmp_path, folder):
    row = {"prompt": "a", "completion": LONG}
    longer = {"prompt": "a", "completion": LONG * 2}
    told = r"rows.jsonl:2 = (\d+) tokens: is longer than data.max_tokens = 30"
    with pytest.raises(JobError, match=f"{told}; no other row is; set data.too_long") as bad:
        prepared(tmp_path, folder, [{"prompt": "a", "completion": "b"}, row], max_tokens=30)
    assert bad.value.legal == ("drop", "split", "truncate")
    more = [{"prompt": "a", "completion": "b"}, row, longer]
    whole = r", the first of 2 such rows; the longest has \d+ tokens \(.*rows.jsonl:3\)"
    with pytest.raises(JobError, match=told + whole):
        prepared(tmp_path, folder, more, max_tokens=30)


def test_without_a_maximum_the_models_context_is_the_limit(tmp_path, folder):
    rows = [{"text": "and " * 40}]
    assert prepared(tmp_path, folder, rows, max_tokens=0).longest > 30
    with pytest.raises(JobError, match="the model's context of 30 tokens"):
        prepared(tmp_path, folder, rows, max_tokens=0, context_tokens=30)
    own = tmp_path / "model"
    shutil.copytree(folder, own)
    (own / "config.json").write_text('{"text_config": {"max_position_embeddings": 31}}')
    with pytest.raises(JobError, match="the model's context of 31 tokens"):
        prepared(tmp_path, own, rows, max_tokens=0)


def test_split_refuses_an_exchange_that_cannot_be_cut(tmp_path, folder):
    rows = [{"messages": chat("ua", "ab", "ua", f"a{LONG}")}]
    with pytest.raises(JobError, match="one exchange alone is") as bad:
        prepared(tmp_path, folder, rows, max_tokens=30, too_long="split")
    assert bad.value.legal == ("drop", "truncate")


def test_rows_without_anything_to_learn_are_dropped_and_listed(tmp_path, folder):
    rows = [{"messages": TURNS}, {"messages": TURNS[:1]}, {"messages": TURNS}]
    rows.append({"messages": [*TURNS[:1], TURNS[1] | {"weight": 0}]})
    found = prepared(tmp_path, folder, rows)
    listed = [(each["where"][-1], each["reason"]) for each in found.dropped()]
    assert listed == [
        ("2", "no assistant turn"),
        ("3", "duplicate"),
        ("4", "nothing in it is learnt"),
    ]
    audit = balanced(found)
    assert (audit.rows_in, audit.rows_dropped, audit.rows_duplicate) == (4, 3, 1)
    assert found.where("train", 0).endswith("rows.jsonl:1")


def test_one_long_text_has_a_held_out_part(tmp_path, folder):
    path = tmp_path / "book.txt"
    path.write_text("\n".join(f"line {number} of a book" for number in range(300)))
    settings_ = DataSettings(source=str(path), max_tokens=64, too_long="split", held_out_frac=0.2)
    found = prepare(settings_, folder)
    assert 0.05 < len(found.held_out) / (len(found.train) + len(found.held_out)) < 0.4
    balanced(found)


def test_held_out_source_is_never_trained_on(tmp_path, folder):
    (tmp_path / "own.jsonl").write_text('{"text": "held out"}\n{"text": "both"}\n')
    rows = [{"text": "both"}, {"text": "one"}, {"text": "two"}]
    own = str(tmp_path / "own.jsonl")
    found = prepared(tmp_path, folder, rows, held_out_source=own, held_out_frac=0.5)
    assert (len(found.train), len(found.held_out)) == (2, 2)
    assert not set(found.train.keys) & set(found.held_out.keys)
    assert [each["reason"] for each in found.dropped()] == ["also in data.held_out_source"]
    assert balanced(found).rows_held_out == 2
    (tmp_path / "own.jsonl").write_text('{"text": "held out"}\n')
    assert len(prepared(tmp_path, folder, rows, held_out_source=own).train) == 3


def test_max_rows_takes_the_same_rows_wherever_they_stand(tmp_path, folder):
    rows = [{"text": f"row number {index}"} for index in range(40)]
    one = prepared(tmp_path, folder, rows, max_rows=10)
    two = prepared(tmp_path, folder, rows[::-1] + rows[:3], max_rows=10)
    assert sorted(one.train.keys) == sorted(two.train.keys) and len(one.train) == 10
    assert one.audit.rows_beyond_max == two.audit.rows_beyond_max == 30
    assert prepared(tmp_path, folder, rows, max_rows=40).audit.rows_beyond_max == 0


def test_own_chat_template_decides_the_samples(tmp_path, folder):
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}")
    rows = [{"messages": TURNS[:2]}]
    plain = prepared(tmp_path, folder, rows)
    other = prepared(tmp_path, folder, rows, chat_template=str(own))
    assert plain.path != other.path
    text = TextTokenizer(folder).decode(other.train[0].tokens, skip_special=False)
    assert text == "[user]what?<eos>[assistant]this<eos>"
    own.write_text(own.read_text() + "{# changed #}")
    assert prepared(tmp_path, folder, rows, chat_template=str(own)).path != other.path


def test_nothing_to_learn_is_refused(tmp_path, folder):
    rows = [{"prompt": "a", "completion": LONG}]
    with pytest.raises(JobError, match="1 x too long") as caught:
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
