"""The command line: whatever it is given, a verdict or one clear line, and never a traceback."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.cli import app, main
from phalanx.errors import CODES
from tests.fuzz.inputs import near_tables, near_texts, to_toml, values, words

VALID = {
    "model": {"name": "toy", "layers": 4, "width": 8},
    "train": {"method": "pretrain", "item_tokens": [5, 7, 3]},
    "limits": {"memory_bytes": "2 GiB"},
    "plan": {
        "on": "4xh100",
        "mesh": {"pp": 2, "shard": 2},
        "pipeline": {"name": "1f1b"},
        "data": [{"name": "fsdp", "axis": "shard", "prefetch": 1, "reshard_after_forward": True}],
        "grain": "operator",
        "costs": {
            "send": 1,
            "mlp.F": 2,
            "mlp.B": 4,
            "optimizer": 1,
            "all_gather": 1,
            "reduce_scatter": 1,
        },
    },
}
# A step of a billion micro-batches is legal and takes its time: numbers stay small here.
small = st.one_of(
    st.booleans(),
    st.integers(-2, 9),
    st.sampled_from([0.5, -1.0, float("nan"), float("inf")]),
    words,
    st.text(max_size=4),
    st.dates(),
)
small_values = st.recursive(
    small,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def job_file(tmp_path_factory):
    """In the folder that commands run in: some of them write files by the names that they get."""
    folder = tmp_path_factory.mktemp("jobs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder / "job.toml"


def require_clear(argv: list[str], codes: Sequence[int] = (0, 1, 2)) -> str:
    """What the command said on stdout; it ends with 0 or 1, or with 2 and one line."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(argv)
    said = err.getvalue()
    assert code in codes and "Traceback" not in said, f"{code}: {said}"
    if code == 2:
        heads = [line for line in said.splitlines() if line.startswith("error[")]
        assert len(heads) == 1 and said.startswith(heads[0]), said
        assert heads[0].removeprefix("error[").partition("]: ")[0] in CODES
    return out.getvalue()


def test_the_valid_job_is_planned(job_file):
    job_file.write_text(to_toml(VALID))
    assert "fits" in require_clear(["plan", str(job_file)], codes=(0,))


@settings(max_examples=80, deadline=None)
@given(table=near_tables(VALID, small_values))
@example(table=VALID | {"plan": VALID["plan"] | {"mesh": {"pp": "2", "shard": 2}}})
@example(table=VALID | {"plan": VALID["plan"] | {"mesh": {"pp": 4.0}}})
@example(table=VALID | {"plan": VALID["plan"] | {"costs": {"send": "x"}}})
@example(table=VALID | {"plan": VALID["plan"] | {"data": [{"name": "fsdp", "prefetch": "x"}]}})
@example(table=VALID | {"plan": VALID["plan"] | {"data": [3]}})
@example(table=VALID | {"train": {"item_tokens": [5, "x"]}})
@example(table=VALID | {"plan": VALID["plan"] | {"data": [{"name": "fsdp", "prefetch": -1}]}})
@example(table=VALID | {"model": {"name": "toy", "layers.": 4}})
def test_near_misses_of_a_job_are_planned_or_refused(job_file, table: dict[str, Any]):
    job_file.write_text(to_toml(table))
    said = require_clear(["plan", str(job_file), "--json", "-"])
    assert not said or json.loads(said)["kind"] == "plan"


@settings(max_examples=40, deadline=None)
@given(table=near_tables(VALID))
@example(table=VALID | {"model": {"name": "toy"}, "plan": {"mesh": {"two\nlines": 1}}})
def test_any_job_is_shown_or_refused(job_file, table: dict[str, Any]):
    job_file.write_text(to_toml(table))
    require_clear(["job", "show", str(job_file)])
    require_clear(["job", "show", str(job_file), "--json", "-"])


flags = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["--json", "--on", "-o", "--explain", "--plan.mesh", "--help", "--", "-"]),
    st.tuples(st.sampled_from(["--plan.mesh", "--plan.data", "--on", "--train.lr"]), values).map(
        lambda pair: f"{pair[0]}={pair[1]}"
    ),
    near_texts("--plan.mesh={pp=2}"),
)


@settings(max_examples=60, deadline=None)
@given(verb=st.sampled_from(["plan", "simulate", "job", "systems", "policies"]), words=st.data())
def test_any_words_are_understood_or_refused(job_file, verb: str, words: st.DataObject):
    job_file.write_text(to_toml(VALID))
    chosen = words.draw(st.lists(flags, max_size=3))
    first = [str(job_file)] if verb in ("plan", "simulate") else []
    require_clear([verb, *first, *chosen])


@pytest.mark.parametrize(
    "flag",
    [
        "--train.lr=nan",
        "--train.lr=inf",
        "--data.held_out_frac=nan",
        "--limits.memory_bytes=nan",
        "--limits.time_s=1e999 h",
        "--train.item_tokens=[5, -1]",
        "--train.item_tokens=[true]",
        "--plan.data=[{name='fsdp', prefetch=-1}]",
        "--plan.data=[{name='fsdp', reshard_after_forward='no'}]",
        "--plan.mesh={pp = 2.0, shard = 2}",
        "--on=00xh100",
    ],
)
def test_values_without_a_meaning_are_refused(job_file, flag: str):
    job_file.write_text(to_toml(VALID))
    assert not require_clear(["plan", str(job_file), flag], codes=(2,))


def test_bytes_that_are_no_text_are_shown(job_file):
    """How Python hands over arguments that are not UTF-8."""
    job_file.write_text(to_toml(VALID))
    require_clear(["job", "show", str(job_file), "--model.name", "\udcff"])


def test_every_verb_shows_its_help():
    for verb in app.verbs():
        assert require_clear([verb, "--help"])
