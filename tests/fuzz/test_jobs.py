"""Job files and flags: whatever is written, a job or one clear line; what is legal comes back."""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.errors import PhalanxError
from phalanx.job import Job, load_job, parse_flags
from phalanx.job.sections import SECTIONS
from tests.fuzz.inputs import near_tables, near_texts, outcome, to_toml, toml_value, values, words

VALID = {
    "model": {"name": "toy", "layers": 3, "width": 8},
    "data": {"max_tokens": 64, "held_out_frac": 0.1, "too_long": "split"},
    "train": {"method": "pretrain", "lr": 1e-3, "item_tokens": [5, 7], "seed": 3},
    "limits": {"memory_bytes": "2 GiB", "time_s": "3 min"},
    "plan": {
        "on": "2xh100",
        "mesh": {"pp": 2},
        "pipeline": "1f1b",
        "data": [{"name": "fsdp", "axis": "shard", "prefetch": 1}],
        "costs": {"send": 1, "mlp.F": 2.5},
    },
}
TEXT = """
[model]
name = "toy"
layers = 3   # of the model
[train]
item_tokens = [5, 7]
lr = 1e-3
[limits]
memory_bytes = "2 GiB"
[plan]
mesh = {pp = 2, tp = 1}
[[plan.data]]
name = "fsdp"
"""
FIELDS = {(section, each.name): each for section in SECTIONS for each in fields(SECTIONS[section])}


@pytest.fixture(scope="module")
def job_file(tmp_path_factory):
    return tmp_path_factory.mktemp("jobs") / "job.toml"


def loaded(job_file, content: str | bytes, flags: tuple[str, ...] = ()) -> Any:
    job_file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return outcome(lambda: load_job(job_file, parse_flags(list(flags))))


def test_the_valid_ones_are_read(job_file):
    for content in (TEXT, to_toml(VALID)):
        assert isinstance(loaded(job_file, content), Job)


@settings(max_examples=60, deadline=None)
@given(content=st.text() | st.binary())
@example(content=b"\xff\xfe")
@example(content="x = " + "[" * 100_000)
@example(content="[model]\nlayers = " + "1" * 5000)
@example(content='["two\\nlines"]\n')
def test_any_file_is_a_job_or_refused(job_file, content: str | bytes):
    assert isinstance(loaded(job_file, content), PhalanxError), "a job names a model"


@settings(max_examples=150, deadline=None)
@given(content=near_texts(TEXT))
def test_slips_of_the_pen_are_refused_or_harmless(job_file, content: str):
    assert isinstance(loaded(job_file, content), Job | PhalanxError)


@settings(max_examples=200, deadline=None)
@given(table=near_tables(VALID))
@example(table=VALID | {"train": {"lr": 10**400}})
@example(table=VALID | {"limits": {"time_s": 10**400}})
@example(table=VALID | {"model": {"two\nlines": 1}})
def test_wrong_entries_are_refused_or_harmless(job_file, table: dict[str, Any]):
    assert isinstance(loaded(job_file, to_toml(table)), Job | PhalanxError)


flags = st.one_of(
    st.text(max_size=8),
    st.tuples(
        st.sampled_from(sorted(FIELDS)).map(".".join) | st.text(max_size=6),
        st.sampled_from(["", ".", ".x", ".mesh.y"]),
        st.sampled_from(["", "=", " "]),
        st.text(max_size=6) | values.map(toml_value),
    ).map(lambda parts: "--" + "".join(parts)),
)


@settings(max_examples=200, deadline=None)
@given(words=st.lists(flags, max_size=4))
@example(words=["--plan.pipeline=3", "--plan.pipeline.x=2"])
@example(words=["--train.steps=" + "[" * 3000])
@example(words=["--train.steps=" + "9" * 5000])
def test_any_flags_are_taken_or_refused(words: list[str]):
    job = outcome(lambda: load_job(None, parse_flags(["--model.name", "toy", *words])))
    assert isinstance(job, Job | PhalanxError)


@pytest.mark.parametrize("path", ["/", "", "a\0b", "x" * 5000])
def test_paths_that_are_no_files_are_refused(path: str):
    assert outcome(load_job, path).code == "job/not-found"


# ---- legal jobs come back ------------------------------------------------------------------------

names = words.filter(lambda word: word not in ("true", "false", "inf", "nan"))  # TOML's own words


def legal(each: Field) -> st.SearchStrategy[Any]:
    """Values that a key takes, from what it says of itself."""
    kind, low, high = str(each.type), each.metadata["low"], each.metadata["high"]
    if kind == "tuple":
        choices = each.metadata["choices"]
        of_words = st.sampled_from(choices) if choices else words
        of_numbers = st.integers(int(low or 0), 99)
        member = of_numbers if each.metadata["kind"] == tuple[int, ...] else of_words
        return st.lists(member, max_size=3).map(tuple)
    if each.metadata["choices"]:
        return st.sampled_from(each.metadata["choices"])
    if kind == "bool":
        return st.booleans()
    if kind == "int":
        low = int(low or 0)
        return st.integers(low, low + 1000 if high is None else int(high))
    if kind == "float":
        return st.floats(low, high, allow_nan=False, allow_infinity=False)
    if kind.startswith("Mapping"):
        return st.dictionaries(words, st.integers(1, 9), max_size=3)
    options = st.fixed_dictionaries({"name": names}, optional={"prefetch": st.integers(0, 4)})
    return words if kind == "str" else names | options


@st.composite
def legal_tables(draw: st.DrawFn) -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {"model": {"name": draw(words)}}
    for section, name in draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=9, unique=True)):
        table.setdefault(section, {})[name] = draw(legal(FIELDS[section, name]))
    return table


@settings(max_examples=80, deadline=None)
@given(table=legal_tables())
def test_legal_values_come_back_from_a_file_and_from_flags(job_file, table):
    from_file = loaded(job_file, to_toml(table))
    assert isinstance(from_file, Job), from_file
    for section, content in table.items():
        for name, value in content.items():
            assert getattr(getattr(from_file, section), name) == value
    given_flags = [
        f"--{section}.{name}={value if FIELDS[section, name].type == 'str' else toml_value(value)}"
        for section, content in table.items()
        for name, value in content.items()
    ]
    from_flags = load_job(None, parse_flags(given_flags))
    assert from_flags.to_dict() == from_file.to_dict()
    assert from_flags.result_key == from_file.result_key
    again = loaded(job_file, to_toml(from_file.to_dict()))
    assert again.to_dict() == from_file.to_dict()


@pytest.mark.parametrize("content", ['steps = "5"', 'lr = "1e-3"', 'item_tokens = "[1, 2]"'])
def test_text_in_a_file_is_no_number(job_file, content: str):
    refusal = loaded(job_file, f'[model]\nname = "toy"\n[train]\n{content}\n')
    assert isinstance(refusal, PhalanxError) and refusal.code == "job/bad-value"
