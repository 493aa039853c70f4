"""`simulate --documents`: files of lengths, and what is said of a step that is played with them."""

from __future__ import annotations

import json

import pytest

from phalanx.cli.app import run
from phalanx.errors import JobError
from phalanx.job import load_job
from phalanx.planner.document_step import read_documents, simulate_documents

JOB = """
[model]
name = "llama-3.1-8b"
[train]
method = "pretrain"
[plan]
on = "16xh100"
mesh = { replicate = 2, shard = 2, pp = 4 }
pipeline = { name = "interleaved", virtual = 2 }
data = ["fsdp", { name = "replicate", axis = "replicate" }]
"""
EVEN = [[[2048, 2048]] * 4] * 4


@pytest.fixture
def job_path(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def write_lines(path, documents) -> str:
    path.write_text("".join(json.dumps(rank) + "\n" for rank in documents))
    return str(path)


def values(found) -> dict[str, float]:
    return {row.quantity: row.value for row in found.report.rows}


def test_equal_documents_spread_nothing_and_unequal_ones_do(job_path):
    job = load_job(job_path)
    even = values(simulate_documents(job, EVEN))
    assert even["slowest data rank over the mean"] == pytest.approx(1.0)
    assert even["tokens of a step"] == 4 * 4 * 4096
    uneven = simulate_documents(job, [*EVEN[:3], [[4096]] * 4])
    assert uneven.slowest == 3
    assert values(uneven)["slowest data rank over the mean"] > 1.0
    assert values(uneven)["step time"] > even["step time"]


def test_the_trace_is_that_of_the_slowest_data_rank(job_path):
    found = simulate_documents(load_job(job_path), [*EVEN[:3], [[4096]] * 4])
    trace = found.trace()
    assert trace.end_s == pytest.approx(float(found.step.pipeline_s.max()))
    assert len(trace) == 4 * 2 * 2 * 4  # ranks, chunks, directions, items
    assert trace.notes["data_rank"] == 3


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("[[1, 2]\n", "line 1"),
        ('[[1]]\n{"a": 1}\n', "line 2"),
        ("[[1.5]]\n", "line 1"),
        ('[["x"]]\n', "line 1"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, lines, says):
    path = tmp_path / "documents.jsonl"
    path.write_text(lines)
    with pytest.raises(JobError, match=says):
        read_documents(str(path))


def test_a_file_that_is_not_there_is_one_clear_error(tmp_path):
    with pytest.raises(JobError) as caught:
        read_documents(str(tmp_path / "none.jsonl"))
    assert caught.value.code == "job/not-found"


@pytest.mark.parametrize(
    ("documents", "flags", "says"),
    [
        ([], {}, "a line per data rank"),
        ([[]] * 4, {}, "a line per data rank"),
        (EVEN[:3], {}, "each of 4 data ranks"),
        ([*EVEN[:3], [[2048]] * 3], {}, "4 micro-batches"),
        ([*EVEN[:3], [[-1]] * 4], {}, "lengths >= 1"),
        (EVEN, {"plan.data": "fsdp"}, "policies of this plan use 8 of 16"),
    ],
)
def test_documents_that_do_not_match_the_plan_are_refused(job_path, documents, flags, says):
    with pytest.raises(JobError, match=says):
        simulate_documents(load_job(job_path, flags), documents)


def test_the_verb_plays_a_file_and_writes_what_it_played(job_path, tmp_path, capsys):
    file = write_lines(tmp_path / "documents.jsonl", EVEN)
    trace, picture = tmp_path / "t.json", tmp_path / "p.svg"
    arguments = ["--documents", file, "--trace", str(trace), "--picture", str(picture)]
    assert run(["simulate", str(job_path), *arguments]) == 0
    assert "slowest data rank over the mean" in capsys.readouterr().out
    assert len(json.loads(trace.read_text())["traceEvents"]) >= 64
    assert picture.stat().st_size > 1000
    assert run(["simulate", str(job_path), "--documents", str(tmp_path / "none")]) == 2
