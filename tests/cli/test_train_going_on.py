"""`phalanx train --resume` refuses before it starts a process; a restart finds its checkpoints."""

from __future__ import annotations

import json

import pytest

from phalanx.cli import main
from phalanx.engines.placed import Placed
from phalanx.engines.run_folder import alone_in, read_job, write_job
from phalanx.engines.whole.rank_job import _placed
from phalanx.engines.whole.train_job import Asked
from phalanx.job import load_job
from tests.cli.train_inputs import FLAGS
from tests.tiny_run import write_base, write_pairs

pytestmark = pytest.mark.usefixtures("no_process")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(tmp_path, base):
    """A run that was stopped, as its folder shows it."""
    data = write_pairs(tmp_path / "pairs.jsonl")
    flags = {"model.name": str(base), "data.source": str(data), "plan.devices": 2}
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-00000003").mkdir(parents=True)
    write_job(load_job(None, FLAGS | flags), folder, {"samples": "other", "weights": "other"})
    return folder


def refused(capsys, *words):
    assert main(["train", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("error")]
    assert out == "" and "Traceback" not in err
    return line


def test_other_rows_under_the_same_name_are_refused(run, capsys):
    line = refused(capsys, "--resume", run)
    assert line.startswith("error[plan/job]: samples = ") and "rows, tokenizer" in line
    table = json.loads((run / "job.json").read_text())
    assert table["inputs"]["samples"] == "other"  # as the run began, whatever was refused since


def test_another_base_under_the_same_name_is_refused(run, capsys):
    write_job(read_job(run), run, {"weights": "other"})
    assert refused(capsys, "--resume", run).startswith("error[plan/job]: weights = ")


def test_a_run_that_has_come_to_its_end_does_not_go_on(run, capsys):
    keys = ("steps", "num_ranks", "num_tokens", "num_counted", "step_s", "tokens_per_s")
    result = dict.fromkeys(keys, 9) | {"loss_before": None, "loss_after": None, "evaluations": []}
    (run / "train.json").write_text(json.dumps(result))
    assert "has come to its end after step 9" in refused(capsys, "--resume", run)


def test_a_run_without_a_checkpoint_does_not_go_on(run, capsys):
    (run / "checkpoints" / "step-00000003").rmdir()
    assert "holds no checkpoint" in refused(capsys, "--resume", run)


def test_names_that_mean_nothing_in_another_folder_tell_where_the_run_began(
    run, base, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    flags = {"model.name": str(base), "data.source": "pairs.jsonl", "plan.devices": 2}
    write_job(load_job(None, FLAGS | flags), run, {"samples": "other"})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    line = refused(capsys, "--resume", run)
    assert line.startswith("error[job/not-found]: data.source = pairs.jsonl: is not here")
    assert f"began in {tmp_path}:" in line


def test_a_run_that_is_under_way_is_left_alone(run, capsys):
    with alone_in(run):
        assert "a run is under way in it" in refused(capsys, "--resume", run)


@pytest.mark.parametrize("left", ["step-00000003", ".step-00000003.partial", "best-00000003"])
def test_a_restart_goes_on_from_checkpoints_of_steps_alone(tmp_path, left):
    (tmp_path / "checkpoints" / left).mkdir(parents=True)
    place = {"rank": 0, "num_ranks": 2, "local_rank": 0, "num_local_ranks": 2}
    place |= {"address": "127.0.0.1", "port": 1, "restarts": 1}
    asked = Asked(job=load_job(None, {"model.name": "tiny"}), folder=tmp_path)
    again = _placed(asked, Placed(**place))
    assert again.is_retry and again.resume is (left == "step-00000003")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"train.early_stop": 2}, "train.early_stop = 2: counts evaluations"),
        ({"train.keep_best": "true", "data.held_out_frac": 0}, "data.held_out_frac = 0"),
    ],
)
def test_what_looks_at_evaluations_needs_some(run, base, tmp_path, capsys, flags, told):
    words = ["--model", base, "--data", tmp_path / "pairs.jsonl", "--folder", tmp_path / "new"]
    given = [word for key, value in flags.items() for word in (f"--{key}", value)]
    assert told in refused(capsys, *words, "--model.dtype", "float32", *given)
    assert not (tmp_path / "new").exists()
