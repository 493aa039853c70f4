"""Rows of steps of reinforcement learning: what notes say, what lacks, how far prices are off."""

import csv
import gzip
import math
from pathlib import Path

import numpy as np
import pytest

from phalanx.cost.rl_efficiency import rl_efficiency
from phalanx.lab.csv_rows import seen_table
from phalanx.lab.rl_rows import predict_rl, read_rl

NOTES = (
    "1-step Off; generation TP 16 PP 1; generation batch 1024; average sequence length 5698 tokens"
)
ROW = {
    "source_id": "mine", "source": "s", "source_check": "", "status": "ok",
    "workload": "rl_grpo", "model": "qwen3-235b-a22b", "hardware": "NVIDIA H100 SXM 80GB",
    "n_devices": "256", "dtype": "BF16", "framework": "NeMo RL", "tp": "2", "pp": "8", "cp": "2",
    "ep": "16", "global_batch_seqs": "512", "seq_len_tokens": "8192", "step_time_s": "300",
    "notes": NOTES,
}  # fmt: skip


def read(tmp_path: Path, **changes):
    row = ROW | changes
    path = tmp_path / "rows.csv"
    with gzip.open(seen_table("training"), "rt") as file:
        header = next(csv.reader(file))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, header, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerow(row)
    return read_rl(path)


def test_a_row_says_its_generation_in_its_notes(tmp_path):
    (row,) = read(tmp_path)
    assert row.is_complete and not row.is_colocated and row.devices == 128
    assert (row.serving_tensor, row.work.num_answers, row.work.num_updates) == (16, 1024, 2.0)
    assert row.work.prompt_tokens + row.work.lengths.mean_tokens == 5698
    assert row.work.lengths.limit_tokens + row.work.prompt_tokens == 8192
    assert row.work.staleness == 1
    assert float(row.plans.data) == 128 / (2 * 8 * 2)
    assert float(row.plans.step_tokens) == pytest.approx(512 * 5698)


def test_on_policy_rows_have_one_pool(tmp_path):
    (row,) = read(tmp_path, notes=NOTES.replace("1-step Off", "On policy"))
    assert row.is_colocated and row.devices == 256 and row.work.staleness == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"notes": ""}, "serving tensor"),
        ({"hardware": "abacus"}, "hardware"),
        ({"n_devices": ""}, "n_devices"),
        ({"workload": "rl_swe"}, "environments"),
        ({"n_devices": "4"}, "divide"),
        ({"model": "none such"}, ""),
    ],
)
def test_what_a_row_lacks_is_named_and_it_has_no_price(tmp_path, changes, says):
    (row,) = read(tmp_path, **changes)
    assert not row.is_complete and says in "; ".join(row.missing)
    assert predict_rl([row]) == [None]


def test_other_workloads_are_no_rows_of_this_kind(tmp_path):
    assert read(tmp_path, workload="pretrain") == []


def test_seen_rows_are_within_a_sixth_in_the_middle_and_the_table_says_so():
    rows = [row for row in read_rl(seen_table("training")) if row.is_complete]
    steps = predict_rl(rows)
    errors = [step.total_s / row.measured_step_s - 1 for step, row in zip(steps, rows)]
    assert len(rows) == rl_efficiency().num_rows >= 16
    assert float(np.median(np.abs(errors))) < 0.17
    assert str(len(rows)) in rl_efficiency().describe()
    assert rl_efficiency().low < 1 < rl_efficiency().high


def test_more_devices_answer_and_learn_faster(tmp_path):
    times = []
    for devices in ("128", "256", "512"):
        (row,) = read(tmp_path, n_devices=devices, notes=NOTES.replace("1-step Off", "On policy"))
        (step,) = predict_rl([row])
        assert math.isclose(
            step.total_s,
            step.generation_s + step.learning_s + step.weights_s + step.states_s,
        )
        times.append(step.total_s)
    assert times == sorted(times, reverse=True)
