"""The same measurement, written by somebody else: what a table means does not hang on its style."""

import csv

import pytest

from phalanx.lab.rl_rows import predict_rl, read_rl
from phalanx.lab.row_dtype import plain_dtype
from phalanx.lab.serving_predict import predict_serving
from phalanx.lab.serving_rows import read_serving
from phalanx.lab.targets import judged
from phalanx.lab.training_predictions import predict_training
from phalanx.lab.training_rows import read_training
from phalanx.lab.validation import validate
from tests.lab.tables import row, text

MEASURED = row(
    memory_gb="60", memory_kind="max allocated GiB", zero_or_fsdp="ZeRO-1", schedule="1F1B",
    recompute="Full", notes="Expert TP 1", source="MLPerf Training v5.0", framework="PyTorch",
    interconnect="InfiniBand NDR 400 Gb/s per GPU",
)  # fmt: skip
SERVED = {
    "source_id": "somewhere", "source": "an in-house sweep", "source_check": "",
    "source_date": "2025-11-02", "model": "meta-llama/Llama-3.1-70B",
    "hardware": "NVIDIA H100 SXM 80GB", "n_devices": "4", "tp": "4", "mode": "aggregated",
    "dtype": "FP8", "engine": "vLLM", "engine_version": "", "input_len_tokens": "1024",
    "output_len_tokens": "128", "concurrency": "16", "ttft_ms": "200", "tpot_ms": "20",
    "scenario": "", "notes": "", "latency_statistic": "",
}  # fmt: skip
STEP = row(
    workload="rl_grpo", model="qwen3-30b-a3b", n_devices="32", global_batch_seqs="512",
    seq_len_tokens="8192", framework="NeMo RL", params_b="", layers="", hidden="",
    notes="On policy; generation TP 2 PP 1; generation batch 1024; average sequence length 3000",
)  # fmt: skip


def write(path, *rows):
    path.write_text(text(*rows))
    return path


def styled(cells, style, header=str):
    return {header(name): style(cell) for name, cell in cells.items()}


@pytest.mark.parametrize("style", [str.upper, str.lower])
def test_capitals_mean_nothing(tmp_path, style):
    for cells, read, predict in (
        (MEASURED, read_training, predict_training),
        (SERVED, read_serving, predict_serving),
        (STEP, read_rl, predict_rl),
    ):
        (plain,) = predict(read(write(tmp_path / "plain.csv", cells)))
        (other,) = predict(read(write(tmp_path / "other.csv", styled(cells, style, str.upper))))
        assert plain == other and not getattr(plain, "reason", "")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("bfloat16", "bf16"), ("BF-16", "bf16"), ("torch.bfloat16", "bf16"), ("half", "fp16"),
        ("float16", "fp16"), ("Float8_E4M3FN", "fp8"), ("E5M2", "fp8"), ("float 4", "fp4"),
        ("NVFP4", "fp4"), ("W4A16", "int4"), ("w8a8", "int8"), ("amp_bf16", "bf16"),
    ],
)  # fmt: skip
def test_a_format_is_known_however_it_is_spelled(dtype, name):
    assert name in plain_dtype(dtype)


def test_a_format_that_is_not_known_is_not_guessed(tmp_path):
    (served,) = predict_serving(read_serving(write(tmp_path / "s.csv", SERVED | {"dtype": "q5k"})))
    (trained,) = predict_training(read_training(write(tmp_path / "t.csv", row(dtype="q5k"))))
    assert served.reason == trained.reason == "insufficient input: dtype"


@pytest.mark.parametrize("notes", ["expert TP 0", "rank 0", "expert tp x", "rank -1"])
@pytest.mark.parametrize("workload", ["pretrain", "lora"])
def test_numbers_in_notes_that_cannot_be_are_not_read(tmp_path, notes, workload):
    cells = row(model="mixtral-8x7b", workload=workload, notes=notes, params_b="", layers="",
                hidden="")  # fmt: skip
    without = predict_training(read_training(write(tmp_path / "a.csv", cells | {"notes": ""})))
    assert predict_training(read_training(write(tmp_path / "t.csv", cells))) == without


@pytest.mark.parametrize(
    ("notes", "missing"),
    [
        (STEP["notes"].replace("TP 2", "TP 0"), "serving tensor"),
        (STEP["notes"].replace("3000", "9000"), "an average length of at most seq_len_tokens"),
    ],
)
def test_one_odd_step_of_reinforcement_learning_stops_no_validation(tmp_path, notes, missing):
    path = write(tmp_path / "t.csv", STEP | {"notes": notes}, STEP)
    found = validate(read_training(path), [], read_rl(path))
    assert found.predicted == 1
    assert [reason for *_, reason in found.unpriced] == [f"insufficient input: {missing}"]


def test_rows_that_were_quoted_from_memory_are_not_compared(tmp_path):
    check = {"source_check": "from memory of the published document"}
    path = write(tmp_path / "s.csv", SERVED | check, SERVED)
    (score,) = (found := validate([], read_serving(path))).sources
    assert (score.rows, score.from_memory) == (2, 1)
    assert {point.line for point in found.points} == {3}


@pytest.mark.parametrize("status", ["crash_or_oom", "OOM", "CUDA out of memory", "failed"])
def test_runs_that_failed_are_known_by_any_word_for_it(tmp_path, status):
    (found,) = read_training(write(tmp_path / "t.csv", row(status=status)))
    assert found.failed


def test_submissions_are_known_by_what_their_source_says_not_by_its_key(tmp_path):
    cells = row(framework="PyTorch", source_id="unheard of", source="MLPerf Training v5.1 closed")
    assert read_training(write(tmp_path / "t.csv", cells))[0].software.startswith("megatron:")
    other = cells | {"source": "a paper"}
    assert read_training(write(tmp_path / "t.csv", other))[0].software.startswith("torch:")


def test_columns_that_say_nothing_of_a_row_may_be_absent(tmp_path):
    cells = {name: cell for name, cell in row().items() if cell and name != "framework"}
    path = tmp_path / "t.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, cells)
        writer.writeheader()
        writer.writerow(cells)
    (answer,) = predict_training(read_training(path))
    assert answer.step_s and not answer.reason


def test_one_broken_cell_costs_a_table_one_row(tmp_path):
    trained = write(tmp_path / "t.csv", row(), row(tp="2-4"), row(memory_gb="60-70"))
    served = write(tmp_path / "s.csv", SERVED, SERVED | {"concurrency": "16+"})
    found = validate(read_training(trained), read_serving(served))
    assert (found.rows, found.complete, found.predicted) == (5, 2, 2)
    reasons = {line: reason for *_, line, reason in found.unpriced}
    assert "a number in memory_gb" in reasons[4] and found.reasons()["without a number in tp"] == 1


def test_an_unknown_model_is_served_by_the_sizes_that_its_row_prints(tmp_path):
    sizes = {
        "params_b": "70.6", "layers": "80", "hidden": "8192", "heads": "64", "kv_heads": "8",
        "ffn": "28672", "vocab": "128256",
    }  # fmt: skip
    nothing = dict.fromkeys(sizes, "")
    path = write(
        tmp_path / "s.csv",
        SERVED | nothing,
        SERVED | sizes | {"model": "nobody knows"},
        SERVED | nothing | {"model": "nobody knows"},
    )
    known, printed, unknown = predict_serving(read_serving(path))
    assert printed == known and not printed.reason
    assert unknown.reason == "unknown model: nobody knows"


def test_a_handful_of_rows_is_no_share_of_bars(tmp_path):
    few = validate(read_training(write(tmp_path / "t.csv", row())), [])
    many = validate(read_training(write(tmp_path / "m.csv", *[row()] * 20)), [])
    bars = [
        next(each["met"] for each in judged(found) if "bars" in each["name"])
        for found in (few, many)
    ]
    assert bars[0] is None and bars[1] is not None
