"""One strict reader: what an annotation says is taken, all else is refused where it stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import pytest

from phalanx.errors import JobError, PlanError
from phalanx.strict import LOCKFILE, parse_toml, read_record, read_value

HUGE = 10**400  # beyond any float


@dataclass(frozen=True)
class Inner:
    size: int


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    share: float = field(default=0.5, metadata={"low": 0.0, "high": 1.0})
    word: str = field(default="a", metadata={"choices": ("a", "bee")})
    sizes: tuple[int, ...] = field(default=(), metadata={"low": 1})
    loose: Any = field(default=None, metadata={"kind": str | None})


@pytest.mark.parametrize(
    ("value", "kind", "read"),
    [
        ("x", str, "x"),
        (True, bool, True),
        (3, int, 3),
        (3, float, 3.0),
        ([1, 2], tuple[int, ...], (1, 2)),
        ([1, "x"], tuple[int, str], (1, "x")),
        ([1], Sequence[float], (1.0,)),
        ((1,), list[int], [1]),
        ({"a": 1}, Mapping[str, float], {"a": 1.0}),
        (None, int | None, None),
        ("x", str | Mapping[str, Any], "x"),
        ({"size": 2}, Inner | None, Inner(2)),
        ({"a": (1, None, {"b": 2.5})}, Any, {"a": [1, None, {"b": 2.5}]}),
    ],
)
def test_what_the_annotation_says_is_taken(value, kind, read):
    found = read_value(value, kind, "x")
    assert found == read and type(found) is type(read)


@pytest.mark.parametrize(
    ("value", "kind", "where"),
    [
        (3, str, "x"),
        (1, bool, "x"),
        (True, int, "x"),
        (2.0, int, "x"),
        (2**63, int, "x"),
        (True, float, "x"),
        (float("nan"), float, "x"),
        (float("-inf"), float, "x"),
        (HUGE, float, "x"),
        ("ab", tuple[str, ...], "x"),
        ([1, "2"], tuple[int, ...], "x[1]"),
        ([1], tuple[int, str], "x"),
        ({"a": {"b": 1}}, Mapping[str, Mapping[str, str]], "x.a.b"),
        ({1: 2}, Mapping[str, int], "x"),
        ([], str | Mapping[str, Any], "x"),
        ({"a": [date(2024, 1, 1)]}, Any, "x.a[0]"),
        ({"a": HUGE}, Any, "x.a"),
        ([float("nan")], Any, "x[0]"),
        ({1: 2}, Any, "x"),
    ],
)
def test_all_else_is_refused_where_it_stands(value, kind, where):
    with pytest.raises(JobError) as caught:
        read_value(value, kind, "x")
    assert (caught.value.code, caught.value.where) == ("job/bad-value", where)


def test_numbers_of_more_digits_than_python_prints_are_shown_by_their_size():
    with pytest.raises(JobError, match=r"x = \[a number of 16610 bits\]: must be a number"):
        read_value([10**5000], float, "x")


def test_a_record_is_read_with_its_defaults():
    read = read_record(Outer, {"name": "n", "inner": {"size": 2}, "sizes": [1, 2]}, "x")
    assert read == Outer("n", Inner(2), sizes=(1, 2))


@pytest.mark.parametrize(
    ("change", "code", "where", "legal"),
    [
        ({"nmae": 1}, "job/unknown-key", "x.nmae", "name"),
        ({"inner": {}}, "job/missing", "x.inner.size", None),
        ({"inner": None}, "job/bad-value", "x.inner", None),
        ({"share": 1.5}, "job/bad-value", "x.share", 1.0),
        ({"word": "be"}, "job/bad-value", "x.word", "bee"),
        ({"sizes": [3, 0]}, "job/bad-value", "x.sizes[1]", 1),
        ({"loose": 3}, "job/bad-value", "x.loose", None),
    ],
)
def test_records_are_refused_with_the_nearest_legal(change, code, where, legal):
    with pytest.raises(JobError) as caught:
        read_record(Outer, {"name": "n", "inner": {"size": 2}} | change, "x")
    assert (caught.value.code, caught.value.where) == (code, where)
    assert legal is None or legal in caught.value.legal


def test_a_lockfile_names_every_field():
    with pytest.raises(PlanError) as caught:
        read_record(Outer, {"name": "n", "inner": {"size": 2}}, "plan.json: ", LOCKFILE)
    assert (caught.value.code, caught.value.where) == ("plan/format", "plan.json: share")


def test_deep_tables_are_refused_before_anything_walks_them():
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(JobError, match="levels deep") as caught:
        read_value(deep, Any, "x")
    assert len(str(caught.value)) < 300


def test_an_annotation_that_cannot_be_read_is_a_bug():
    with pytest.raises(TypeError, match="complex"):
        read_value(1, complex, "x")


@pytest.mark.parametrize(
    "content",
    [b"\xff", b"x = " + b"[" * 100_000, b"x = " + b"9" * 5000, "x"],
    ids=["not UTF-8", "deep", "digits", "no value"],
)
def test_what_is_no_toml_is_refused(content):
    with pytest.raises(JobError) as caught:
        parse_toml(content, "a file")
    assert (caught.value.code, caught.value.where) == ("job/syntax", "a file")
