"""`phalanx plan` with a model, a data file and clusters: what it says, and what it refuses."""

import json
import subprocess
import sys

import pytest

from phalanx.cli.app import run
from phalanx.plan import Plan

MODEL = "qwen3-8b"
THREE = "2xH100,8xH100,v5p-8"


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "chat.jsonl"
    lines = [
        json.dumps({"prompt": f"what is {at}? ", "completion": f"it is {at}. " * (1 + at % 30)})
        for at in range(400)
    ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "plan-cache"))


def plan(*words):
    return run(["plan", *words])


def test_three_clusters_are_told_in_a_screen(chat, capsys):
    assert plan(MODEL, "--data", chat, "--lora", "16", "--on", THREE) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 100
    assert sum(line.startswith(name) for line in lines for name in THREE.split(",")) >= 6
    for part in ("LoRA of rank 16 trains", "assumption", "4 chips", "fastest", "of usable"):
        assert part in text


def test_the_same_question_has_the_same_answer(chat, capsys):
    texts = []
    for _ in range(2):
        assert plan(MODEL, "--data", chat, "--lora", "16", "--on", "2xh100") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_json_says_what_the_text_says_and_more(chat, tmp_path):
    out = tmp_path / "plan.json"
    words = ("--data", chat, "--lora", "8", "--on", "2xh100,v5p-8", "--json", str(out))
    assert plan(MODEL, *words) == 0
    document = json.loads(out.read_text())
    assert document["kind"] == "plan" and document["format_version"] == 1 and document["fits"]
    first, second = document["clusters"]
    assert (first["cluster"], second["cluster"]) == ("2xh100", "4xv5p")
    for cluster in (first, second):
        assert cluster["hours"]["least"] < cluster["hours"]["expected"] < cluster["hours"]["most"]
        assert cluster["peak_bytes"] < cluster["usable_bytes"]
        assert sum(cluster["shares"].values()) == pytest.approx(1.0)
    assert document["data"]["rows"] < 400 and document["model"]["params"] == 8_190_735_360


def test_the_lockfile_is_that_of_the_best_cluster(chat, tmp_path, capsys):
    path = tmp_path / "lock.json"
    words = ("--data", chat, "--on", "1xh100,8xh100", "-o", str(path))
    assert plan(MODEL, *words) == 0
    lock = Plan.load(path)
    assert lock.hardware["machine"] == "h100" and lock.program("train").grid().size == 8
    assert lock.program("train").built_specs() and len(lock.predictions) == 3
    assert f"lockfile of 8xh100: {path}" in " ".join(capsys.readouterr().out.split())
    assert plan(MODEL, *words, "--objective.minimise", "cost") == 0
    assert Plan.load(path).program("train").grid().size == 1


def test_what_does_not_fit_exits_one_with_the_three_nearest_that_do(chat, capsys):
    assert plan("qwen3-32b", "--data", chat, "--full", "--on", "2xH100") == 1
    text = capsys.readouterr().out
    assert "does not fit" in text and "memory: moments" in text
    near = text.split("nearest jobs that fit")[1].splitlines()
    flags = [line.split("  ")[0] for line in near[3:6]]
    assert flags[0] == "--lora 16" and flags[1].startswith("--on ") and len(set(flags)) == 3
    assert max(map(len, text.splitlines())) <= 100


def test_the_flags_of_the_nearest_make_it_fit(chat, capsys):
    words = ("qwen3-32b", "--data", chat)
    assert plan(*words, "--full", "--on", "2xH100") == 1
    near = capsys.readouterr().out.split("nearest jobs that fit")[1].splitlines()
    for line in near[4:6]:
        assert plan(*words, "--full", *line.split("  ")[0].split()) == 0
    assert plan(*words, "--lora", "16", "--on", "2xH100") == 0


def test_explain_names_terms_and_sources(chat, capsys):
    assert plan(MODEL, "--data", chat, "--on", "2xh100", "--explain") == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in ("memory, weights", "step by the formula, compute", "efficiencies",
                 "ml-engineering", "AWS p5.48xlarge", "data.source"):  # fmt: skip
        assert part in text


def test_a_job_file_is_priced_on_clusters_and_its_own_steps_are_kept(chat, tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text(
        f'[model]\nname = "{MODEL}"\n[data]\nsource = "{chat}"\n[train]\nsteps = 7\n'
        "[plan]\nmesh = { shard = 2 }\n"
    )
    assert plan(str(path), "--on", "2xh100,4xh100") == 0
    text = capsys.readouterr().out
    assert "7 steps of 4,096 tokens" in text
    assert "2xh100: the job's mesh (shard 2) was kept" in text
    assert "(shard 2) is not for 4xh100" in text


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--on", "2xh10"], "registry/unknown", "h100"),
        (["--on", "0xh100"], "job/bad-value", "at least one"),
        (["--on", "here"], "job/bad-value", "phalanx run"),
        ([], "job/bad-value", "phalanx run"),
        (["--on", "2xh100,"], "job/bad-value", "commas"),
        (["--on", "2xh100", "--lora", "4", "--full"], "job/syntax", "contradict"),
        (["--on", "2xh100", "--lora", "0"], "job/bad-value", "at least 1"),
        (["--on", "2xh100", "--full", "--train.method", "lora"], "job/syntax", "twice"),
        (["--on", "2xh100", "--plan.devices", "4"], "job/bad-value", "contradicts"),
        (["--on", "2xh100", "--plan.row_tokens", "9"], "job/bad-value", "never cut"),
        (["--on", "2xh100", "--limits.memory_bytes", "nan"], "job/bad-value", "number"),
        (["--on", "2xh100", "--train.lora_targets", "q_prj"], "job/bad-value", "q_proj"),
        (["--on", "2xh100", "--model", "qwen3-32b"], "job/syntax", "twice"),
        (["--on", "2xh100", "--objective.minimise", "tiem"], "job/bad-value", "time"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_bad_input_is_one_line_with_a_way_out_and_exit_two(words, code, says, chat, capsys):
    assert plan(MODEL, "--data", chat, *words) == 2
    error = _error(capsys)
    assert error.startswith(f"error[{code}]") and says in error


def _error(capsys):
    """The one line of the error; what takes long may say so before."""
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "counting" not in line]
    return error


def test_unknown_models_missing_and_empty_data_are_one_line(tmp_path, chat, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for words, says in (
        (["qwen3-9b", "--data", chat], "qwen3-8b"),
        ([MODEL, "--data", str(empty)], "data/empty"),
        ([MODEL, "--data", str(tmp_path / "no.jsonl")], "job/not-found"),
        (["--data", chat], "job/missing"),
        ([str(tmp_path / "no.toml")], "job/not-found"),
    ):
        assert plan(*words, "--on", "2xh100") == 2
        assert says in _error(capsys)


def test_a_machine_without_a_price_that_counts_is_refused(tmp_path, chat, capsys):
    from importlib.resources import files

    text = (files("phalanx.hardware") / "h100.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(text.replace('value = "6.88 $/h"', "value = nan"))
    assert plan(MODEL, "--data", chat, "--on", f"2x{path}") == 2
    assert "price" in capsys.readouterr().err


def test_no_lockfile_is_written_for_what_does_not_fit(tmp_path, chat, capsys):
    path = tmp_path / "lock.json"
    words = ("--data", chat, "--on", "2xh100", "--limits.memory_bytes", "1 MiB", "-o", str(path))
    assert plan(MODEL, *words) == 2 and not path.exists()
    assert "no plan to write" in capsys.readouterr().err


def test_pricing_a_model_and_a_file_loads_no_torch(chat):
    words = ["plan", MODEL, "--data", chat, "--lora", "16", "--on", "2xh100"]
    code = (
        "import sys\n"
        "from phalanx.cli.app import run\n"
        f"assert run({words!r}) == 0\n"
        "assert not {'torch', 'transformers', 'matplotlib', 'pandas'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


PRETRAIN = ("qwen3-8b", "--seq", "4k", "--global-tokens", "1M", "--on", "16xh100")


def test_rows_of_one_length_need_no_data_and_are_pretraining(capsys, tmp_path):
    out = tmp_path / "plan.json"
    assert plan(*PRETRAIN, "--json", str(out)) == 0
    text = capsys.readouterr().out
    assert "batches of 256 rows of 4,096 tokens" in text and "of this step" in text
    document = json.loads(out.read_text())
    assert (
        document["of_one_step"]
        and document["steps"] == 1
        and document["data"] == {"seq_tokens": 4096}
    )
    assert document["model"]["trained"] == document["model"]["params"]
    assert plan(*PRETRAIN, "--tokens", "10B") == 0
    assert "9,537 steps of 1,048,576 tokens" in capsys.readouterr().out


def test_a_deadline_and_a_budget_say_how_many_devices_would_do(capsys):
    words = (*PRETRAIN, "--tokens", "10B")
    assert plan(*words, "--deadline", "2d", "--budget", "90k") == 0
    assert "h100: 8 devices would do" in " ".join(capsys.readouterr().out.split())
    assert plan(*words, "--deadline", "3h") == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "too slow" in text and "devices would do" in text
    assert plan(*words, "--budget", "10") == 1
    assert "too dear" in capsys.readouterr().out


def test_the_largest_context_and_micro_batch_are_told(capsys):
    assert plan(*PRETRAIN, "--largest", "context") == 0
    assert "largest context 40,960 tokens" in " ".join(capsys.readouterr().out.split())
    assert plan(*PRETRAIN, "--largest", "micro-batch") == 0
    assert "largest micro-batch" in capsys.readouterr().out


def test_llama_405b_on_16384_devices_is_told_in_a_screen(capsys):
    words = ("--model", "llama-3.1-405b", "--on", "16384xH100", "--seq", "8192")
    assert plan(*words, "--global-tokens", "16M") == 0
    lines = capsys.readouterr().out.splitlines()
    text = " ".join(" ".join(lines).split())
    assert len(lines) <= 25 and max(map(len, lines)) <= 100
    for part in (
        "2,048 rows of 8,192",
        "simulated only",
        "illegal",
    ):
        assert part in text


def test_an_architecture_that_the_trainer_lacks_is_priced_and_said_to_be_simulated_only(capsys):
    words = ("deepseek-ai/DeepSeek-V3", "--seq", "4k", "--global-tokens", "4M")
    assert plan(*words, "--on", "512xh200", "--precision", "fp8") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "671 B parameters" in text and "this architecture" in text and "products in fp8" in text


def test_a_configuration_of_another_program_is_priced_beside_the_best_plan(tmp_path, capsys):
    path = tmp_path / "axolotl.yml"
    path.write_text(
        "base_model: Qwen/Qwen3-8B\nadapter: lora\nlora_r: 16\nlora_alpha: 32\n"
        "lora_target_linear: true\nsequence_len: 2048\nsample_packing: true\n"
        "micro_batch_size: 4\ngradient_accumulation_steps: 2\ngradient_checkpointing: true\n"
        "datasets:\n  - path: nobody/nothing\n    type: chat_template\n"
    )
    assert plan("--from", str(path), "--on", "8xh100") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "batches of 64 rows of 2,048 tokens" in text
    assert "the file's plan fits" in text and "recomputation full -> none" in text


def test_the_best_plan_is_written_for_other_programs(tmp_path, capsys):
    folder = tmp_path / "out"
    folder.mkdir()
    assert plan(*PRETRAIN, "--emit", f"torchtitan:{folder}") == 0
    assert (folder / "torchtitan.toml").read_text() and "torchtitan of" in capsys.readouterr().out
    assert plan(*PRETRAIN, "--emit", "nothing") == 2
    assert "registry/unknown" in _error(capsys)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--seq", "64k"], "40,960"),
        (["--seq", "5000"], "1050000, 1045000"),
        (["--seq", "0"], "above 0"),
        (["--seq", "-4"], "above 0"),
        (["--seq", "4k", "--tokens", "0"], "from 1 to"),
        (["--seq", "4k", "--global-tokens", "1.5"], "whole number"),
        (["--seq", "4k", "--data", "x.jsonl"], "contradict"),
        (["--seq", "4k", "--deadline", "12h"], "--tokens"),
        (["--seq", "4k", "--deadline", "soon"], "unit of s"),
        (["--seq", "4k", "--budget", "free"], "dollars"),
        (["--seq", "4k", "--tokens", "1T", "--budget", "0"], "above 0"),
        (["--seq", "4k", "--largest", "model"], "micro-batch"),
        (["--seq", "4k", "--precision", "fp2"], "fp8"),
        (["--seq", "4k", "--software", "caffe"], "registry/unknown"),
        (["--seq", "4k", "--expert-imbalance", "nan"], "at least 1"),
        (["--seq", "4k", "--deadline", "1h", "--limits.time_s", "2h"], "twice"),
        (["--from", "nothing.yml"], "nothing.yml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_bad_questions_are_one_line_with_a_way_out_and_exit_two(words, says, capsys):
    batch = () if "--global-tokens" in words else ("--global-tokens", "1M")
    assert plan("qwen3-8b", "--on", "8xh100", *batch, *words) == 2
    assert says in _error(capsys)


def test_a_batch_smaller_than_its_ranks_names_batches_that_are_not(capsys):
    words = ("qwen3-8b", "--on", "4096xh100", "--seq", "4k", "--global-tokens", "4k")
    assert plan(*words) == 1
    text = capsys.readouterr().out
    assert "no legal plan" in text and "batches of 1 row of" in text
    near = [line for line in text.splitlines() if line.startswith("--global-tokens ")]
    assert near and plan(*words[:5], *near[0].split("  ")[0].split()) == 0
