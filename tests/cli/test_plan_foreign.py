"""`phalanx plan --from FILE` and `--emit TARGET`: plans of other programs, priced and written."""

import json

import pytest

from phalanx.cli.app import run
from phalanx.planner.importers import read_foreign
from tests.planner.importers.samples import SAMPLES

DENSE = "vllm serve meta-llama/Llama-3.1-8B -tp 2 --max-num-seqs 64\n"
MIXTURE = "vllm serve Qwen/Qwen3-30B-A3B -tp 2 -dp 2 --enable-expert-parallel\n"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "plan-cache"))


@pytest.fixture
def file(tmp_path):
    def write(name, text):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def plan(*words):
    return run(["plan", *words])


@pytest.mark.parametrize("text, engine", [(DENSE, {"tensor": 2}), (MIXTURE, {"expert": 4})])
def test_a_servers_line_is_priced_as_it_is_cut(text, engine, file, tmp_path, capsys):
    out = str(tmp_path / "out.json")
    words = ("--on", "4xh100", "--prompt", "500", "--answer", "50", "--rate", "2")
    assert plan("--from", file("serve.sh", text), *words, "--json", out) == 0
    (given,) = json.loads((tmp_path / "out.json").read_text())["given"]
    assert given["answer"]["engine"].items() >= engine.items()
    assert given["answer"]["knee_per_s"] > 0


def test_what_a_server_could_be_instead_is_said(file, capsys):
    words = ("--on", "4xh100", "--prompt", "500", "--answer", "50")
    assert plan("--from", file("serve.sh", DENSE), *words) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "the file's engine serves it" in text and "at most 64 at once on each" in text
    assert "the file starts 1 of these 2 engines" in text
    best = text.split("change: ")[1]
    assert "requests/s, TTFT P99" in best.split(")")[0]  # what the change is good for
    assert plan("--from", file("serve.sh", DENSE.replace("-tp 2", "-tp 3")), *words) == 0
    assert "the file's engine cannot be had here" in capsys.readouterr().out


def test_limits_of_a_server_are_in_its_price(file, tmp_path):
    def given(flags):
        out, words = tmp_path / "out.json", ("--on", "2xh100", "--prompt", "500", "--answer", "50")
        text = f"vllm serve meta-llama/Llama-3.1-8B -tp 2 {flags}\n"
        assert plan("--from", file("serve.sh", text), *words, "--json", str(out)) == 0
        return json.loads(out.read_text())["given"][0]

    free = given("")["answer"]
    few = given("--max-num-seqs 4")["answer"]
    assert few["max_running"] == 4 and few["knee_per_s"] < free["knee_per_s"] / 3
    small = given("--gpu-memory-utilization 0.3")["answer"]
    taken = (0.92 - 0.3) * 79.65 * 2**30 * 2  # both ranks hold half of every token's cache
    bytes_of_token = 2 * 8 * 128 * 32 * 2
    lost = free["kv_tokens"] - small["kv_tokens"]
    assert abs(lost * bytes_of_token / taken - 1) < 0.1
    two = given("--data-parallel-size 2")
    assert two["answer"] is None and "takes 4 devices, and 2xh100 has 2" in two["changes"][0]


def test_the_best_engines_are_written_and_read_again(tmp_path, capsys):
    words = ("--serve", "--on", "4xh100", "--prompt", "500", "--answer", "50", "--rate", "2")
    assert plan("llama-3.1-8b", *words, "--emit", f"vllm:{tmp_path}") == 0
    assert "serve.sh" in capsys.readouterr().out
    server = read_foreign(tmp_path / "serve.sh")
    assert server.model.endswith("llama-3.1-8b") and server.devices == 4


def test_a_script_that_names_no_model_is_priced_by_its_sizes(file, tmp_path):
    out = str(tmp_path / "out.json")
    script = file(*SAMPLES["megatron"])
    assert plan("--from", script, "--on", "128xh100", "--json", out) == 0
    document = json.loads((tmp_path / "out.json").read_text())
    assert abs(document["model"]["params"] - 8.03e9) < 0.01e9


def test_the_method_of_a_file_counts_more_than_rows_of_one_length(file, tmp_path):
    out = str(tmp_path / "out.json")
    script = file("sft.yaml", SAMPLES["trl"][1].replace("load_in_4bit: true\n", ""))
    assert plan("--from", script, "--on", "2xh100", "--seq", "2048", "--json", out) == 0
    model = json.loads((tmp_path / "out.json").read_text())["model"]
    assert model["trained"] < model["params"] / 50


def test_keys_without_a_counterpart_are_told_and_stand_in_the_json(file, tmp_path, capsys):
    text = SAMPLES["trl"][1].replace("load_in_4bit: true", "colour: blue")
    script = file("sft.yaml", text)
    assert plan("--from", script, "--on", "2xh100") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "unknown: colour (line 7), trl 1.16.0 has no such key" in said
    assert "not modelled: use_liger_kernel (line 19)" in said
    assert plan("--from", script, "--on", "2xh100", "--json", str(tmp_path / "out.json")) == 0
    document = json.loads((tmp_path / "out.json").read_text())["file"]
    assert document["values"]["lora_rank"] == {"value": 32, "from": "line 4: lora_r"}
    assert {note["key"] for note in document["notes"]} >= {"colour", "use_liger_kernel"}


def test_a_file_that_nobody_knows_exits_two_in_one_line(file, capsys):
    assert plan("--from", file("a.yaml", "colour: blue\n"), "--on", "2xh100") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "foreign/ambiguous" in error
