"""`phalanx train` from the command line to the export: launched here, by torchrun, from Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import phalanx
from phalanx.cli import main
from phalanx.engines.checkpoint import Manifest, latest
from phalanx.engines.signs import read_sign
from tests.cli.train_inputs import FLAGS, words
from tests.tiny_run import write_base, write_pairs

pytestmark = pytest.mark.dist
HOSTILE = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_MIXED_PRECISION": "fp16",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7",
    "FSDP_SHARDING_STRATEGY": "NO_SHARD",
    "CUDA_VISIBLE_DEVICES": "5",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "3",
    "TOKENIZERS_PARALLELISM": "true",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "WANDB_PROJECT": "other",
    "WANDB_API_KEY": "0" * 40,
    "LOCAL_RANK": "3",
    "MASTER_PORT": "1",
    "SLURM_JOB_ID": "9",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
ACCELERATE_YAML = "distributed_type: DEEPSPEED\nmixed_precision: fp16\nnum_processes: 8\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, data and a cache of its own."""
    folder = tmp_path_factory.mktemp("train")
    write_base(folder)
    write_pairs(folder / "pairs.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder


def arguments(place, name, flags=None):
    given = ["train", "--model", str(place / "base"), "--data", str(place / "pairs.jsonl")]
    return [*given, "--folder", str(place / name), *words(flags)]


@pytest.fixture(scope="module")
def plain(place):
    """A run of two processes; its folder."""
    assert (
        main([*arguments(place, "plain"), "--procs", "2", "--json", str(place / "out.json")]) == 0
    )
    return place / "plain"


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [entry["loss"] for line in lines if "loss" in (entry := json.loads(line))]


def environment(**values: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(phalanx.__file__).parent.parent)} | values


def test_a_run_ends_with_a_table_an_export_and_the_next_command(place, plain):
    document = json.loads((place / "out.json").read_text())
    assert document["kind"] == "train" and document["folder"] == str(plain)
    rows = {(row["quantity"], row["source"]): row for row in document["report"]["rows"]}
    for quantity in ("training/step time", "training/peak memory"):
        predicted, measured = (rows[quantity, source] for source in ("formula", "measured"))
        assert measured["target"] == predicted["value"] > 0 and measured["value"] > 0
    plan = json.loads((plain / "plan.json").read_text())
    assert {row["quantity"] for row in plan["predictions"]} >= {"training/step time"}
    first_step = (plain / "metrics.jsonl").stat()
    assert (plain / "plan.json").stat().st_mtime < first_step.st_mtime
    assert (plain / "export" / "model.safetensors").exists()
    assert (plain / "adapter" / "adapter_config.json").exists()


def test_a_folder_with_a_run_is_kept(place, plain, capsys):
    assert main([*arguments(place, "plain"), "--procs", "2"]) == 2
    assert "go on with it by" in capsys.readouterr().err


def test_what_lies_around_on_a_machine_changes_nothing(place, plain):
    folder = place / "hostile"
    for where in (folder, folder / "home" / ".cache" / "huggingface" / "accelerate"):
        where.mkdir(parents=True)
        (where / "default_config.yaml").write_text(ACCELERATE_YAML)
    (folder / "ds_config.json").write_text('{"train_batch_size": 99}')
    (folder / ".deepspeed_env").write_text("RANK=9\n")
    command = [sys.executable, "-m", "phalanx", *arguments(place, "hostile/run"), "--procs", "2"]
    hostile = environment(**HOSTILE, HOME=str(folder / "home"))
    done = subprocess.run(
        command, env=hostile, cwd=folder, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    keys = [
        json.loads((each / "plan.json").read_text())["job_key"] for each in (plain, folder / "run")
    ]
    assert keys[0] == keys[1] and losses(folder / "run") == losses(plain)


def test_torchrun_gives_the_same_run_and_only_rank_0_speaks(place, plain):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "phalanx", *arguments(place, "torchrun")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("serve it: phalanx serve") == 1
    assert done.stderr.count("predicted: training/step time") == 1
    assert losses(place / "torchrun") == pytest.approx(losses(plain), rel=1e-6)


def test_an_error_under_torchrun_is_said_once(place):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "phalanx", *arguments(place, "bad", {"train.adapter": "/nowhere"})]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400)
    assert done.returncode != 0
    assert done.stderr.count("error[") == 1 and "/nowhere" in done.stderr


def test_python_gets_an_object(place):
    said: list[str] = []
    run = phalanx.train(
        model=str(place / "base"),
        data=str(place / "pairs.jsonl"),
        procs=2,
        folder=place / "python",
        keys=FLAGS,
        say=said.append,
    )
    assert run.result.steps == 40 and any(line.startswith("step 40/40") for line in said)
    assert "| training/step time |" in run.explain()
    frame = run.to_pandas()
    assert list(frame[frame.kind == "step"].step) == list(range(1, 41))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_told_to_stop_saves_and_goes_on_later(place, number, capsys):
    folder = place / f"stopped-{number.name}"
    command = [sys.executable, "-m", "phalanx", *arguments(place, folder.name)]
    process = subprocess.Popen(
        [*command, "--procs", "2"], env=environment(), stderr=subprocess.PIPE, text=True
    )
    wait_for_step(folder, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert f"; go on with: phalanx train --resume {folder}" in err
    assert 1 <= steps_of(folder) < FLAGS["train.steps"] and not (folder / "export").exists()
    if number == signal.SIGINT:
        return
    assert main(["train", "--resume", str(folder), "--train.lr", "1"]) == 2
    assert "error[plan/job]: train.lr = 1.0: cannot change" in capsys.readouterr().err
    make_older(folder)
    assert main(["train", "--resume", str(folder), "--procs", "2"]) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == list(range(1, FLAGS["train.steps"] + 1))
    assert (folder / "export").exists()


def make_older(folder: Path) -> None:
    """The run as a release wrote it that did not have one of the keys."""
    job, newest = folder / "job.json", latest(folder / "checkpoints")
    manifest, table = Manifest.load(newest), json.loads(job.read_text())
    for sections in (table["sections"], manifest.sections):
        del sections["train"]["label_smoothing"]
    job.write_text(json.dumps(table))
    (newest / "manifest.json").unlink()
    replace(manifest, job_key="of fewer keys").save(newest)


def wait_for_step(folder: Path, process: subprocess.Popen) -> None:
    end_s = time.monotonic() + 300
    while steps_of(folder) < 3:
        assert time.monotonic() < end_s
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)


def steps_of(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return sum('"kind": "step"' in line for line in lines)


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, "error[world/dead]: rank 1 on {}: was ended by signal 9"),
        (signal.SIGSTOP, "error[world/timeout]: rank 1 on {}: has been stopped by a signal"),
    ],
)
def test_a_rank_that_dies_or_hangs_is_named_on_the_command_line(place, number, told):
    folder = place / f"hurt-{number.name}"
    command = [sys.executable, "-m", "phalanx", *arguments(place, folder.name)]
    command += ["--procs", "2", "--plan.hang_s", "3"]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    wait_for_step(folder, process)
    os.kill(read_sign(folder, 1).pid, number)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2
    (line,) = [line for line in err.splitlines() if line.startswith("error[")]
    assert line.startswith(told.format(os.uname().nodename))
    assert "last collective: " in line and "#" in line
