"""Traces that say which prompts begin alike: what is read, and which blocks are the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import JobError
from phalanx.planner.request_prefixes import prefixes_of
from phalanx.planner.request_trace import poisson, read_requests

# the format of github.com/kvcache-ai/Mooncake, FAST25-release/traces
MOONCAKE = [
    {"timestamp": 0, "input_length": 1200, "output_length": 500, "hash_ids": [0, 1, 2]},
    {"timestamp": 0, "input_length": 512, "output_length": 4, "hash_ids": [0]},
    {"timestamp": 27482, "input_length": 655, "output_length": 52, "hash_ids": [0, 9]},
]


def written(tmp_path, rows, name="t.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(rows if isinstance(rows[0], str) else map(json.dumps, rows)))
    return str(path)


def row(**values):
    return {"arrival_s": 0.0, "prompt_tokens": 100, "output_tokens": 5} | values


def test_a_trace_of_mooncake_is_read_as_it_is(tmp_path):
    found = read_requests(written(tmp_path, MOONCAKE))
    assert found.arrival_s.tolist() == [0.0, 0.0, 27.482]
    assert found.prompt_tokens.tolist() == [1200, 512, 655]
    assert found.output_tokens.tolist() == [500, 4, 52]
    first, second, third = found.prefixes.block_keys(found.prompt_tokens, 16)
    assert [len(keys) for keys in (first, second, third)] == [75, 32, 40]  # whole blocks of 16
    assert (first[:32] == second).all() and (first[:32] == third[:32]).all()
    assert not set(first[32:]) & set(third[32:])


def test_own_columns_say_the_same_in_json_and_in_a_table(tmp_path):
    lines = [row(prefix_ids=[7, 3], prefix_block_tokens=40), row(), row(prefix_ids=[7])]
    lines[2]["prefix_block_tokens"] = 40
    table = ["arrival_s,prompt_tokens,output_tokens,prefix_ids,prefix_block_tokens"]
    table += ["0,100,5,7 3,40", "0,100,5,,", '0,100,5,"[7]",40']
    for path in (written(tmp_path, lines), written(tmp_path, table, "t.csv")):
        found = read_requests(path)
        keys = found.prefixes.block_keys(found.prompt_tokens, 16)
        assert [len(each) for each in keys] == [5, 0, 2]  # of 80, 0 and 40 tokens that ids cover
        assert (keys[0][:2] == keys[2]).all()


def test_columns_of_others_beside_our_own_are_not_read(tmp_path):
    found = read_requests(written(tmp_path, [row(arrival_s=at, timestamp=9 - at) for at in (1, 2)]))
    assert found.arrival_s.tolist() == [0.0, 1.0]


def test_without_ids_nobody_shares(tmp_path):
    assert read_requests(written(tmp_path, [row(), row()])).prefixes is None
    bare = [{name: value for name, value in MOONCAKE[0].items() if name != "hash_ids"}]
    assert read_requests(written(tmp_path, bare)).prefixes is None


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=6),
    st.integers(1, 70),
    st.integers(1, 200),
)
def test_blocks_are_the_same_where_all_tokens_up_to_their_end_are(ids, block_tokens, longest):
    """Against tokens written out: (place, ids so far); others' are their own."""
    lengths = np.asarray([max(len(its) * block_tokens, 1) % longest + 1 for its in ids])
    keys = prefixes_of(ids, block_tokens).block_keys(lengths, 16)
    texts: dict[tuple, int] = {}
    for at, (its, length) in enumerate(zip(ids, lengths.tolist())):
        named = min(len(its) * block_tokens, length)
        assert len(keys[at]) == named // 16
        tokens = [(place, tuple(its[: place // block_tokens + 1])) for place in range(named)]
        for block, key in enumerate(keys[at].tolist()):
            assert texts.setdefault(tuple(tokens[: block * 16 + 16]), key) == key
    assert sorted(set(texts.values())) == list(range(len(texts)))  # small, however long the ids


def test_engines_that_take_turns_keep_their_own_prefixes():
    ids = [[0, at] for at in range(5)]
    halves = [prefixes_of(ids, 16).every(2, first) for first in (0, 1)]
    assert [len(half.starts) - 1 for half in halves] == [3, 2]
    keys = halves[1].block_keys(np.full(2, 40), 16)
    assert keys[0][0] == keys[1][0] and keys[0][1] != keys[1][1]


def test_drawn_requests_share_a_system_prompt():
    keys = poisson(1.0, 3, 100, 5, shared_tokens=40).prefixes.block_keys(np.full(3, 100), 16)
    assert [each.tolist() for each in keys] == [[0, 1]] * 3
    assert poisson(1.0, 3, 100, 5).prefixes is None


@pytest.mark.parametrize(
    ("rows", "code", "says"),
    [
        ([MOONCAKE[0] | {"hash_ids": [0, 1]}], "job/bad-value", "1200 tokens begin 3 blocks"),
        ([MOONCAKE[0] | {"hash_ids": [0, 1, 2, 3]}], "job/bad-value", "4 ids"),
        ([MOONCAKE[0] | {"hash_ids": [0, 1.5, 2]}], "job/bad-value", "whole numbers"),
        ([MOONCAKE[0] | {"hash_ids": [0, True, 2]}], "job/bad-value", "whole numbers"),
        ([MOONCAKE[0] | {"hash_ids": [0, -1, 2]}], "job/bad-value", "hash_ids = -1"),
        ([MOONCAKE[0] | {"hash_ids": {"0": 1}}], "job/bad-value", "list of whole numbers"),
        ([MOONCAKE[0] | {"input_length": None}], "job/missing", "input_length"),
        ([MOONCAKE[0] | {"timestamp": "noon"}], "job/bad-value", "timestamp"),
        (MOONCAKE[::-1], "job/bad-value", "request 2"),
        ([row(prefix_ids=[1])], "job/missing", "prefix_block_tokens"),
        ([row(prefix_ids=[1], prefix_block_tokens=0)], "job/bad-value", "prefix_block_tokens"),
        ([row(prefix_ids=[1] * 4, prefix_block_tokens=40)], "job/bad-value", "begin 3 blocks"),
        ([row(prefix_ids="1 a", prefix_block_tokens=40)], "job/bad-value", "prefix_ids = 'a'"),
        (
            [row(prefix_ids=[1], prefix_block_tokens=size) for size in (16, 32)],
            "job/bad-value",
            "the same in all lines",
        ),
    ],
)
def test_ids_that_mean_nothing_are_one_clear_line(tmp_path, rows, code, says):
    with pytest.raises(JobError, match=says) as caught:
        read_requests(written(tmp_path, rows))
    assert caught.value.code == code
    assert "\n" not in str(caught.value)
