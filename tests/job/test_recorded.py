"""A job that another release wrote down is known again key by key."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.job import changes, load_job

NOW = load_job(None, {"model.name": "toy", "train.item_tokens": "[5, 7]"}).result_table
KEYS = [(section, key) for section, table in NOW.items() for key in table]
DEFAULTS = load_job(None, {"model.name": "x"}).result_table
AT_DEFAULT = [
    (s, k) for s, k in KEYS if NOW[s][k] == DEFAULTS[s][k] and (s, k) != ("model", "name")
]


def written(drop=(), **values):
    """The table as JSON gives it back, without some keys and with others set."""
    table = json.loads(json.dumps(NOW))
    for section, key in drop:
        del table[section][key]
    for dotted, value in values.items():
        section, key = dotted.split("__")
        table[section][key] = value
    return table


@given(drop=st.sets(st.sampled_from(AT_DEFAULT)))
def test_keys_at_their_default_may_be_absent_from_the_record(drop):
    assert changes(written(drop), NOW) == changes(NOW, written(drop)) == []


@pytest.mark.parametrize(("section", "key"), [("model", "name"), ("train", "item_tokens")])
def test_an_absent_key_that_is_set_now_differs_from_its_default(section, key):
    (change,) = changes(written([(section, key)]), NOW)
    default = json.loads(json.dumps(load_job(None, {"model.name": " "}).result_table))
    assert change.key == f"{section}.{key}" and change.now == written()[section][key]
    assert change.was == ("" if section == "model" else default[section][key])


def test_every_difference_is_named_with_both_values():
    told = [each.told() for each in changes(written(train__lr=0.5, data__max_rows=9), NOW)]
    assert told == ["data.max_rows was 9 and is 0", "train.lr was 0.5 and is 0.001"]


def test_what_a_later_release_noted_is_not_taken_for_nothing():
    (change,) = changes(written(train__momentum=None), NOW)
    assert change.told() == "train.momentum was None and is unknown to this release"
    (change,) = changes(written() | {"judge": {"name": "x"}}, NOW)
    assert change.key == "judge.name"


@pytest.mark.parametrize("table", [{}, {"train": 5}, {"train": []}, {"train": {"lr": {"a": []}}}])
def test_any_table_is_compared(table):
    assert [each.key for each in changes(table, NOW)]
