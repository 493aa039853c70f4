"""Plans written for other programs: each is priced as that program runs it."""

import json

import pytest

from phalanx.cli.app import run

MODEL = ("llama-3.1-8b", "--lora", "16", "--global-tokens", "64k", "--on", "8xh100")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    lines = [
        json.dumps({"prompt": f"what is {at}? ", "completion": "it is so. " * (1 + at * 37 % 3000)})
        for at in range(200)
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def plan(*words):
    return run(["plan", *words])


def test_a_plan_that_was_written_fits_when_it_is_read_again(folder, capsys):
    words = (*MODEL, "--data", "chat.jsonl")
    assert plan(*words, "--emit", "trl:out", "--json", "plan.json") == 0
    assert json.loads((folder / "plan.json").read_text())["fits"]
    capsys.readouterr()
    files = "out/accelerate.yaml,out/sft.yaml"
    assert plan("--from", files, "--data", "chat.jsonl", "--on", "8xh100") == 0
    assert "the file's plan fits" in " ".join(capsys.readouterr().out.split())


def test_the_program_whose_memory_counts_is_named(capsys):
    words = (*MODEL, "--data", "chat.jsonl", "--emit", "trl:out")
    assert plan(*words) == 0
    assert "priced as transformers runs it" in capsys.readouterr().out
    assert plan(*words, "--software", "torch") == 0
    assert "priced as torch runs it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-o", "none/plan.json"), "--output = none/plan.json: cannot be written"),
        (("-o", "plan.json", "--emit", "trl"), "ask twice"),
        (("--emit", "vllm"), "vllm serves; this plan does not"),
    ],
)
def test_files_that_cannot_be_written_are_one_line(capsys, words, says):
    assert plan(*MODEL, "--data", "chat.jsonl", *words) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error


def test_a_file_without_a_model_asks_for_one(folder, capsys):
    (folder / "accelerate.yaml").write_text("distributed_type: FSDP\nnum_processes: 8\n")
    assert plan("--from", "accelerate.yaml", "--on", "8xh100") == 2
    assert "accelerate.yaml names no model" in capsys.readouterr().err


def test_a_file_without_a_batch_is_compared_on_the_batch_of_the_best_plan(folder, capsys):
    """accelerate's file names none: a row on each data rank, unless a batch is asked for."""
    text = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 8\n"
    (folder / "accelerate.yaml").write_text(text)
    words = ["llama-3.1-8b", "--from", "accelerate.yaml", "--seq", "4096", "--on", "8xh100"]
    for batch, rows in (([], 8), (["--global-tokens", "131072"], 32)):
        assert plan(*words, *batch, "--json", "out.json") == 0
        found = json.loads((folder / "out.json").read_text())["given"][0]["columns"]
        assert found["data"] * found["micro_rows"] * found["num_micro"] == rows
        assert f"batches of {rows} rows" in capsys.readouterr().out
    assert plan(*words, "--global-tokens", "40960") == 0
    assert "no multiple of 8 data ranks" in capsys.readouterr().out


def test_a_device_without_bf16_gets_files_in_fp16_and_the_plan_says_so(folder, capsys):
    words = ("llama-3.1-8b", "--lora", "16", "--seq", "1024", "--global-tokens", "64k")
    assert plan(*words, "--on", "4xT4", "--emit", "trl:old") == 0
    assert "4xT4 has no bf16 units" in " ".join(capsys.readouterr().out.split())
    assert "mixed_precision: fp16" in (folder / "old/accelerate.yaml").read_text()
    assert plan(*words, "--on", "4xA10", "--emit", "trl:new") == 0
    assert "no bf16" not in capsys.readouterr().out
    assert "mixed_precision: bf16" in (folder / "new/accelerate.yaml").read_text()


@pytest.mark.parametrize(("on", "dtype"), [("4xT4", "float16"), ("4xA10", "bfloat16")])
def test_a_server_is_started_in_the_format_that_its_devices_multiply(folder, on, dtype):
    words = ("llama-3.1-8b", "--serve", "--rate", "1", "--prompt", "500", "--answer", "100")
    assert plan(*words, "--on", on, "--emit", "vllm:out") == 0
    text = "\n".join(path.read_text() for path in (folder / "out").iterdir())
    assert dtype in text
