"""Profiles of data: the samples that training would see, or an honest guess at them."""

import json
from dataclasses import replace
from itertools import islice

import pytest

from phalanx.data.limits import DataSettings
from phalanx.data.rows import Example, Message
from phalanx.data.sources import read_examples
from phalanx.data.tokenise import TextTokenizer, train_tokenizer
from phalanx.errors import JobError
from phalanx.models.named import NamedModel, named_model
from phalanx.planner.profile import BYTES_PER_TOKEN, TOKENS_PER_TURN, ByteCounter, profile_of
from tests.planner.plan_cases import CONFIG


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, request):
    if request.node.get_closest_marker("demo") is None:  # its tokenizer takes a while to make
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def chat(tmp_path):
    path = tmp_path / "chat.jsonl"
    rows = [[("user", "why? " * 10), ("assistant", f"because {at} " * at)] for at in range(1, 41)]
    lines = [
        json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]})
        for turns in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def settings(source, **changes):
    return DataSettings(**({"source": str(source), "held_out_frac": 0.0} | changes))


LLAMA = NamedModel("m", replace(CONFIG, family="llama"), "made")


def test_bytes_are_counted_by_hand():
    turns = (Message("user", "x" * 43), Message("assistant", "y" * 86), Message("user", "z"))
    ((_, found),) = ByteCounter().encode_examples([Example(turns, "", "row 1")])
    content = [round(43 / BYTES_PER_TOKEN), round(86 / BYTES_PER_TOKEN), 1]
    assert content == [10, 20, 1]
    assert len(found.tokens) == 1 + sum(content) + 3 * TOKENS_PER_TURN
    assert found.counted.sum() == 20 + 1  # the answer and the token that ends it
    first = 1 + TOKENS_PER_TURN + 10
    assert found.ends == (first + TOKENS_PER_TURN + 20,) and found.cuts == found.ends
    assert found.counted[found.ends[0] - 1] and not found.counted[first]


def test_plain_text_begins_and_ends_with_a_token_and_all_but_the_first_count():
    ((_, found),) = ByteCounter().encode_examples([Example((), "x" * 430, "row 1")])
    assert len(found.tokens) == 102 and found.counted.sum() == 101


def test_turns_that_are_not_learnt_do_not_count():
    turns = (Message("user", "x"), Message("assistant", "y", "", False))
    ((_, found),) = ByteCounter().encode_examples([Example(turns, "", "row 1")])
    assert not found.counted.any() and found.ends == ()


def test_without_a_tokenizer_bytes_count_and_the_profile_says_so(chat):
    found = profile_of(LLAMA, settings(chat))
    assert found.is_assumption and "bytes" in found.counted_by
    assert found.audit.rows_in == len(found.samples) == 40
    assert found.quantile(0.5) <= found.quantile(0.99) <= found.longest
    assert 0 < found.counted_frac < 1
    table = found.to_dict()
    assert table["tokens"] == found.samples.num_tokens and json.dumps(table)


def test_the_model_s_own_tokenizer_counts_where_it_is_here(chat, tmp_path):
    folder = train_tokenizer(["why? because " * 9], 300, tmp_path / "words")
    model = NamedModel("m", CONFIG, "made", folder)
    found = profile_of(model, settings(chat))
    assert not found.is_assumption and found.counted_by == "the model's own tokenizer"
    assert found.samples.num_tokens != profile_of(LLAMA, settings(chat)).samples.num_tokens


def test_limits_cut_what_is_counted_from_bytes_as_they_cut_tokens(chat):
    whole = profile_of(LLAMA, settings(chat))
    limit = whole.quantile(0.5)
    dropped = profile_of(LLAMA, settings(chat, max_tokens=limit, too_long="drop"))
    assert dropped.longest <= limit and dropped.audit.rows_dropped > 0
    with pytest.raises(JobError, match="max_tokens"):
        profile_of(LLAMA, settings(chat, max_tokens=limit))


def test_a_changed_file_is_counted_again(chat):
    before = profile_of(LLAMA, settings(chat)).samples.num_tokens
    chat.write_text(chat.read_text() + chat.read_text().replace("why", "how"))
    assert profile_of(LLAMA, settings(chat)).samples.num_tokens == 2 * before


def test_data_without_a_row_is_refused(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(JobError) as raised:
        profile_of(LLAMA, settings(empty))
    assert raised.value.code == "data/empty"


@pytest.mark.demo
def test_bytes_come_near_the_tokenizer_on_real_text():
    """All of python-docs: 252,399 and 253,439 tokens on Python 3.11 (measured)."""
    examples = list(islice(read_examples("python-docs"), 300))
    exact = TextTokenizer(named_model("gemma-3-270m").tokenizer_folder)
    tokens, counted = ([], [])
    for counter in (exact, ByteCounter()):
        rows = [row for _, row in counter.encode_examples(examples)]
        tokens.append(sum(len(row.tokens) for row in rows))
        counted.append(sum(int(row.counted.sum()) for row in rows))
    assert tokens[1] == pytest.approx(tokens[0], rel=0.1)
    assert counted[1] == pytest.approx(counted[0], rel=0.1)


def test_definitions_of_tools_count_as_tokens_that_nobody_learns():
    turns = (Message("user", "sum?"), Message("assistant", "42"))
    tools = json.dumps([{"name": "add", "description": "x" * 430}])
    ((_, bare),) = ByteCounter().encode_examples([Example(turns, "", "row 1")])
    ((_, told),) = ByteCounter().encode_examples([Example(turns, "", "row 1", tools)])
    more = len(told.tokens) - len(bare.tokens)
    assert more == round(len(tools) / BYTES_PER_TOKEN)
    assert told.counted.sum() == bare.counted.sum() and not told.counted[: 1 + more].any()
    assert told.ends == tuple(end + more for end in bare.ends)


def test_rows_that_are_held_out_are_counted_beside_those_that_train(chat):
    whole = profile_of(LLAMA, settings(chat))
    parted = profile_of(LLAMA, settings(chat, held_out_frac=0.3))
    assert whole.held_out == 0 < parted.held_out
    assert len(parted.samples) + parted.held_out == len(whole.samples)
    assert parted.to_dict()["held_out_samples"] == parted.held_out
