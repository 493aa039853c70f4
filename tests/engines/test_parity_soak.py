"""Trained = served on the demo model: 200 prompts of 32 tokens each, all forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.data.prepare import Prepared, prepare
from phalanx.engines.whole.processes import run_module
from phalanx.engines.whole.train_job import asked_anew, train
from phalanx.job import Job, load_job
from phalanx.models.source import data_settings, model_source
from phalanx.report import Report

NUM_PROMPTS = 200
FLAGS = {
    "model.name": "gemma3-270m",
    "data.source": "python-docs",
    "data.max_rows": 1600,
    "data.max_tokens": 256,
    "data.too_long": "drop",
    "data.held_out_frac": 0.2,
    "train.steps": 12,
    "train.warmup_steps": 2,
    "train.global_batch_tokens": 2048,
    "train.eval_rows": 8,
}


def held_out(job: Job) -> Prepared:
    source = model_source(job, str)
    return prepare(data_settings(job, source.config), source.tokenizer_folder)


def prompts(job: Job) -> list[list[int]]:
    """Different questions of held-out rows."""
    found: dict[tuple[int, ...], None] = {}
    for row in held_out(job).held_out:
        found[tuple(row.tokens[: max(1, int(row.counted.argmax()))].tolist())] = None
    return [list(each) for each in found][:NUM_PROMPTS]


@pytest.mark.slow
@pytest.mark.demo
@pytest.mark.dist
@pytest.mark.timeout(3600)
def test_trained_is_served_on_two_hundred_prompts(tmp_path: Path):
    job = load_job(None, FLAGS)
    run = train(asked_anew(job, tmp_path / "run"), str).folder
    asked = prompts(job)
    assert len(asked) == NUM_PROMPTS
    table = run_module("phalanx.engines.parity", [str(run)], json.dumps(asked))
    report = Report.from_dict(table)
    print(report.to_markdown())
    assert not report.missed
    assert report.notes["parity"].startswith("trained = served: 200 prompts x 32 tokens, forms ")
