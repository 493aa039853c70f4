"""What `phalanx plan` refuses rather than leaves unread, and how it words what it answers."""

import json

import pytest

from phalanx.cli.app import run
from phalanx.hardware import read_machine
from phalanx.hardware.write import machine_toml

WORK = "prompts=32,samples=4,prompt=100,answer=500"
ROWS = ("--seq", "4k", "--global-tokens", "64k", "--on", "8xh100")


def plan(*words):
    return run(["plan", *words])


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("--serve", "--on", "1xh100", "--data", "chat.jsonl"), "--data"),
        (("--serve", "--on", "1xh100", "--lora", "8"), "--lora"),
        (("--serve", "--on", "1xh100", "--deadline", "12h"), "--deadline"),
        (("--serve", "--on", "1xh100", "--explain"), "--explain"),
        (("--rl", WORK, "--on", "8xh100", "--emit", "verl"), "--emit"),
        (("--rl", WORK, "--on", "8xh100", "-o", "plan.json"), "--output"),
        (("--rl", WORK, "--on", "8xh100", "--rate", "3"), "--rate"),
    ],
)
def test_an_option_that_a_question_leaves_unread_is_refused_by_name(capsys, words, flag):
    assert plan("qwen3-8b", *words) == 2
    error = capsys.readouterr().err
    assert flag in error and "means nothing beside" in error


def test_a_training_configuration_is_no_server(tmp_path, capsys):
    (tmp_path / "accelerate.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 8\n"
    )
    path = str(tmp_path / "accelerate.yaml")
    assert plan("qwen3-8b", "--serve", "--on", "1xh100", "--from", path) == 2
    assert "configures training" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--base-bits", "4"), "frozen weights"),
        (("--plan.row_tokens", "6000"), "nearest legal values: 4096, 8192"),
        (("--plan.mesh.tp", "3"), "multiplies to 3 devices"),
        (("--plan.mesh.tp", "16"), "multiplies to 16 devices"),
        (("--expert-imbalance", "2"), "has no experts"),
        (("--software", "foo"), "megatron"),
        (("--deadline", "0s", "--tokens", "1B"), "must be above 0"),
        (("--tokens", "1e30"), "from 1 to 1e+18"),
        (("--tokens", "1B", "--train.steps", "10"), "contradict each other"),
        (("--train.epochs", "3"), "passes over a data file"),
        (("--plan.on", "2xh100"), "is given twice"),
    ],
)
def test_what_is_asked_of_a_part_that_the_job_lacks_is_refused(capsys, words, says):
    assert plan("qwen3-8b", *ROWS, *words) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("imbalance", ["129", "1e9", "0.5", "nan"])
def test_no_expert_takes_more_than_all_tokens(capsys, imbalance):
    words = ("--lora", "8", "--seq", "1024", "--global-tokens", "8k", "--on", "8xh100")
    assert plan("qwen3-30b-a3b", *words, "--expert-imbalance", imbalance) == 2
    assert "--expert-imbalance" in capsys.readouterr().err
    assert plan("qwen3-30b-a3b", *words, "--expert-imbalance", "1.3") == 0


@pytest.mark.parametrize("longest", ["40k", "trace.csv"])
def test_requests_longer_than_the_context_are_refused(tmp_path, capsys, longest):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,50000,10\n")
    words = ("--prompt", longest) if longest == "40k" else ("--trace", str(trace))
    assert plan("qwen3-8b", "--serve", "--on", "1xh100", *words) == 2
    assert "has positions for 40,960 tokens" in capsys.readouterr().err


def test_numbers_beyond_reason_stay_readable(capsys):
    words = ("--serve", "--on", "1xh100", "--rate", "1e9", "--answer", "16")
    assert plan("qwen3-8b", *words) == 1
    text = capsys.readouterr().out
    assert "> 1,000 %" in text and "e+0" not in text


def test_a_default_that_does_not_go_with_a_flag_is_called_a_default(capsys):
    assert plan("qwen3-8b", "--seq", "8k", "--on", "8xh100") == 2
    assert "it is the default: say how many tokens a step has" in capsys.readouterr().err


def test_a_file_as_fast_as_the_best_plan_is_left_alone(tmp_path, capsys):
    words = ("--seq", "4k", "--global-tokens", "256k", "--on", "8xh100", "--tokens", "1B")
    assert plan("qwen3-8b", *words, "--emit", f"megatron:{tmp_path}") == 0
    capsys.readouterr()
    assert plan("--from", str(tmp_path / "megatron.sh"), "--on", "8xh100") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "the file's plan fits" in text
    assert "change for" not in text or int(text.split("change for ")[1].split(" %")[0]) > 3


def test_emit_makes_its_folder_and_says_where_it_cannot(tmp_path, capsys):
    folder = tmp_path / "a" / "b"
    assert plan("qwen3-8b", *ROWS, "--emit", f"megatron:{folder}") == 0
    assert list(folder.iterdir())
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    assert plan("qwen3-8b", *ROWS, "--emit", f"megatron:{tmp_path}/file/x") == 2
    assert "cannot be made" in capsys.readouterr().err


def test_devices_that_would_do_do_not_stand_beside_nothing_was_found(capsys):
    words = ("--seq", "4k", "--global-tokens", "1M", "--tokens", "15T", "--deadline", "30d")
    assert plan("qwen3-8b", *words, "--on", "8xh100") == 1
    text = capsys.readouterr().out
    assert "devices would do" in text and "nothing that fits" not in text


def test_figures_of_a_machine_are_explained_with_their_units(capsys):
    assert plan("qwen3-8b", *ROWS, "--explain") == 0
    text = capsys.readouterr().out
    assert "3.35 TB/s" in text.split("memory_bandwidth = ")[1].split("(")[0]
    assert "FLOP/s" in text.split("matmul = ")[1].split("(")[0]
    assert "e+0" not in text


def test_servings_counts_and_rates_are_plain_words(capsys):
    words = ("--serve", "--on", "1xh100", "--rate", "5000")
    assert plan("qwen3-8b", *words) == 1
    text = capsys.readouterr().out
    assert "5,000 a second" in text and "e+0" not in text
    assert "1 way to cut engines priced" in text
    assert max(map(len, text.splitlines())) <= 100


def test_no_price_is_explained_where_none_is_known(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.toml").write_text(machine_toml(read_machine("h20")))
    assert plan("qwen3-0.6b", "--seq", "1k", "--global-tokens", "16k", "--on", "here") == 0
    text = capsys.readouterr().out
    assert "price unknown" in text and "list price" not in text


def test_a_run_that_is_not_there_is_named_whole(capsys):
    assert plan("qwen3-8b", *ROWS, "--measured", "/none/such") == 2
    assert "/none/such" in capsys.readouterr().err


def test_short_steps_of_rl_are_told_in_units(capsys):
    assert plan("qwen3-8b", "--rl", WORK, "--on", "8xh100", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "plan-rl"
    assert plan("qwen3-8b", "--rl", WORK.replace("500", "5000"), "--on", "8xh100") == 0
    assert "e+0" not in capsys.readouterr().out


def test_counts_of_very_large_clusters_are_read_at_a_glance(capsys):
    assert plan("qwen3-8b", "--serve", "--on", "100000xh100", "--rate", "90000") == 0
    text = capsys.readouterr().out
    assert " engines of" in text and "90,000 a second" in text
    assert not any(word.isdecimal() and len(word) > 3 for word in text.split())
    assert plan("qwen3-8b", "--serve", "--on", "7xh100", "--rate", "1", "--ttft", "1 s") == 0
    assert "1 devices" not in capsys.readouterr().out


def test_a_budget_without_prices_cannot_be_answered(capsys):
    words = ("--seq", "4k", "--global-tokens", "64k", "--tokens", "100M", "--budget", "100")
    assert plan("qwen3-8b", *words, "--on", "8xgh200-alps") == 2
    assert "no price" in capsys.readouterr().out
    assert plan("qwen3-8b", *words, "--on", "8xgh200-alps,1xh100") in (0, 1)


@pytest.mark.parametrize(
    "words",
    [
        ("--model", "qwen3-8b", "--model.dtype", "float32"),
        ("--model.dtype", "float32", "qwen3-8b"),
        ("--model", "qwen3-8b", "--model.dtype=float32"),
    ],
)
def test_keys_and_the_model_stand_in_any_order(tmp_path, words):
    out = tmp_path / "out.json"
    assert plan(*words, "--full", *ROWS, "--json", str(out)) in (0, 1)
    document = json.loads(out.read_text())
    assert document["model"]["name"] == "qwen3-8b"
    assert document["model_bytes"] == 4 * document["model"]["params"]  # float32


def test_a_misspelt_option_is_told_with_the_nearest(capsys):
    assert plan("qwen3-8b", *ROWS, "--deadlin", "12h") == 2
    assert "--deadlin: is no option" in (error := capsys.readouterr().err)
    assert "nearest legal values: --deadline" in error
    assert plan("qwen3-8b", "llama-3.1-8b", *ROWS) == 2
    assert "one job file or model" in capsys.readouterr().err
