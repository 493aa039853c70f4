"""`plan`, `simulate` and `job show`: exit codes, files, one clear line for what is wrong."""

import json
import subprocess
import sys

import pytest

from phalanx.cli.app import run
from phalanx.hardware import read_machine
from phalanx.plan import Plan

TOY = "examples/toy-4d.toml"


def test_a_plan_that_fits_exits_zero_and_writes_the_lockfile(tmp_path, capsys):
    lockfile = tmp_path / "plan.json"
    assert run(["plan", TOY, "--output", str(lockfile)]) == 0
    assert "fits:" in capsys.readouterr().out
    plan = Plan.load(lockfile)
    assert plan.program("train").grid().size == 16
    assert [spec.policy_name for spec in plan.program("train").built_specs()] == [
        *("fsdp", "replicate", "megatron")
    ]


def test_a_plan_that_does_not_fit_exits_one_and_says_by_how_much(capsys):
    assert run(["plan", TOY, "--limits.memory_bytes", "2 MiB"]) == 1
    assert "does not fit: the fullest device needs 3.4" in capsys.readouterr().out


def test_simulate_writes_a_trace_and_draws_the_schedule(tmp_path, capsys):
    trace = tmp_path / "t.json"
    assert run(["simulate", TOY, "--trace", str(trace)]) == 0
    assert "rank 1 1F0  1B0" in capsys.readouterr().out
    events = json.loads(trace.read_text())["traceEvents"]
    computes = [e for e in events if e["ph"] == "X" and e["name"].startswith("0F0/")]
    assert len({event["pid"] for event in computes}) == 8


def test_json_is_versioned_and_alone_on_stdout(capsys):
    assert run(["simulate", TOY, "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["format_version"] == 1 and document["kind"] == "simulation"
    rows = {row["quantity"]: row for row in document["report"]["rows"]}
    assert rows["step time"]["source"] == "simulated"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--plan.pipeline", "1f1"], "registry/unknown", "1f1b"),
        (["--plan.pipelin", "1f1b"], "job/unknown-key", "plan.pipeline"),
        (["--plan.mesh", "{pp=2, shard=3}"], "mesh/product", "16 devices"),
        (["--plan.data.prefetch", "x"], "job/bad-value", "list"),
        (["--limits.memory_bytes", "2 GBit"], "unit/unknown", "GiB"),
        (["--on", "16xh10"], "registry/unknown", "h100"),
        (["--on", "here"], "job/bad-value", "8xh100"),
        (["--plan.mesh", "{pp=16}", "--plan.data=''", "--plan.tensor=''"], "order/illegal", "8"),
        (["--plan.mesh", "{pp=16}"], "plan/illegal", "pp"),
    ],
)
def test_bad_input_is_one_line_with_a_way_out_and_exit_two(arguments, code, says, capsys):
    assert run(["simulate", TOY, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error[{code}]") and says in error
    assert error.count("\n") == 1


def test_job_show_tells_where_each_value_comes_from(capsys):
    assert run(["job", "show", TOY, "--train.lr=1e-4", "--json", "-"]) == 0
    values = json.loads(capsys.readouterr().out)["values"]
    origin = {
        value["key"]: value["from"] if "from" in value else value["origin"] for value in values
    }
    assert origin["model.layers"].startswith("toy-4d.toml:")
    assert (origin["train.lr"], origin["train.seed"]) == ("flag", "default")


def test_planning_and_simulating_load_no_torch():
    code = (
        "import sys\n"
        "from phalanx.cli.app import run\n"
        f"assert run(['simulate', {TOY!r}]) == 0\n"
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_model_is_played_without_a_job_file(capsys):
    words = ["--train.method", "full", "--plan.mesh.pp", "4", "--plan.pipeline", "1f1b"]
    assert run(["simulate", "llama-3.1-8b", "--on", "4xh100", *words]) == 0
    assert "rank 3 3F0  3B0" in capsys.readouterr().out


def test_plan_and_simulate_count_the_same_memory_of_a_device(capsys, tmp_path):
    words = ["--train.method", "full", "--plan.mesh.tp", "2"]
    words += ["--plan.tensor", "megatron", "--json", str(tmp_path / "out.json")]
    run(["simulate", "llama-3.1-8b", "--on", "2xh100", *words])
    report = json.loads((tmp_path / "out.json").read_text())["report"]
    rows = {row["quantity"]: row["value"] for row in report["rows"]}
    usable = read_machine("h100").usable_bytes
    assert rows["memory, limit of a device"] == usable


def test_the_layout_of_a_lockfile_is_played_on_its_devices(capsys, tmp_path):
    lockfile, words = str(tmp_path / "plan.json"), ["--train.method", "full"]
    rows = ["--seq", "4k", "--global-tokens", "128k", "--on", "8xh100", "-o", lockfile]
    assert run(["plan", "llama-3.1-8b", *rows, *words]) == 0
    role = Plan.load(lockfile).program("train")
    capsys.readouterr()
    tokens = ["--train.global_batch_tokens", str(128 * 1024), "--json", "-"]
    assert run(["simulate", "llama-3.1-8b", "--plan", lockfile, *words, *tokens]) == 0
    report = json.loads(capsys.readouterr().out)["report"]
    assert report["title"] == "job on 8xh100"
    told = {row["quantity"]: row["value"] for row in report["rows"]}
    assert told["tokens of a step"] == 128 * 1024
    axes = [axis for axis, degree in role.mesh.items() if degree > 1]
    assert axes and all(f"bytes sent on {axis}, busiest rank" in told for axis in axes)
    assert run(["simulate", "llama-3.1-8b", "--plan", str(tmp_path / "none.json")]) == 2
    assert "plan/format" in capsys.readouterr().err
