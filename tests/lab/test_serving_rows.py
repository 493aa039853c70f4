"""Published serving rows: how they are read, which cannot be predicted, how far predictions go."""

import csv
import time

import numpy as np
import pytest

from phalanx.errors import JobError
from phalanx.lab.csv_rows import CsvRow, seen_table
from phalanx.lab.serving_degrees import Degrees, aggregated_degrees, split_degrees
from phalanx.lab.serving_names import precision_of, software_of
from phalanx.lab.serving_predict import predict_serving
from phalanx.lab.serving_rows import LOAD_INPUTS, METRICS, read_serving

ROLES = [
    f"{role}_{name}" for role in ("prefill", "decode") for name in ("workers", "tp", "attention_dp")
]
NUMBERS = ("n_devices", "tp", "pp", "ep", "attention_dp", *ROLES)
COMPLETE = {
    "source_id": "somewhere", "model": "meta-llama/Llama-3.1-70B",
    "hardware": "NVIDIA H100 SXM 80GB", "n_devices": "4", "tp": "4", "mode": "aggregated",
    "dtype": "fp8", "engine": "vLLM", "engine_version": "0.19.0", "input_len_tokens": "1024",
    "output_len_tokens": "128", "concurrency": "16", "batch_size": "16", "ttft_ms": "200",
    "tpot_ms": "20", "output_tokens_per_s_per_device": "", "e2e_latency_ms": "", "scenario": "",
    "notes": "", "request_rate_qps": "",
}  # fmt: skip


def cells(**text):
    numbers = {name: float(text[name]) for name in NUMBERS if text.get(name)}
    return CsvRow(2, text, numbers)


def read(tmp_path, *rows):
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, COMPLETE)
        table.writeheader()
        table.writerows([COMPLETE | row for row in rows])
    return read_serving(path)


@pytest.fixture(scope="module")
def seen():
    return read_serving(seen_table("serving"))


@pytest.fixture(scope="module")
def predicted(seen):
    start = time.perf_counter()
    found = predict_serving(seen)
    assert time.perf_counter() - start < 20
    return found


@pytest.mark.parametrize(
    ("columns", "degrees"),
    [
        ({"n_devices": "8", "tp": "8", "ep": "8"}, Degrees(8, 1, 8, 1)),
        ({"tp": "64", "ep": "8"}, Degrees(8, 1, 8, 1)),
        ({"tp": "1", "ep": "8", "attention_dp": "64"}, Degrees(1, 1, 8, 8)),
        ({"tp": "4", "ep": "16", "attention_dp": "4"}, Degrees(1, 1, 4, 4)),
        ({"n_devices": "1"}, Degrees()),
        ({"n_devices": "28", "tp": "28"}, None),
        ({"n_devices": "8"}, None),
        ({"n_devices": "12", "tp": "24", "notes": "tp counts NeuronCores"}, Degrees(12)),
    ],
)
def test_degrees_in_the_forms_that_exporters_print(columns, degrees):
    assert aggregated_degrees(cells(**columns)) == degrees


def test_rows_that_are_printed_in_two_forms_are_read_as_one_plan(seen):
    """The same measurement with tp 64 and with tp 8: the reading of the first is no guess."""
    plans = {}
    for row in seen:
        if row.source_id == "aiconfigurator_silicon" and not row.missing and row.kind == "closed":
            key = (row.model, row.hardware, row.software, *sorted(row.measured.items()))
            plans.setdefault(key, set()).add(row.degrees)
    assert len(plans) > 2000
    assert sum(len(degrees) > 1 for degrees in plans.values()) <= 0.01 * len(plans)


def test_split_deployments_need_the_number_of_workers():
    both = {"prefill_workers": "2", "prefill_tp": "4", "decode_workers": "1", "decode_tp": "8"}
    prompts, answers = split_degrees(cells(**both, n_devices="16"))
    assert (prompts.devices, answers.devices) == (8, 8)
    assert split_degrees(cells(**both, n_devices="12")) is None
    assert split_degrees(cells(**both | {"decode_workers": ""})) is None


def test_engines_and_precisions_by_the_words_of_sources():
    row = cells(engine="SGLang", engine_version="0.5.8.post1", dtype="fp8/fp8_block", model="x")
    assert (software_of(row), precision_of(row)) == ("sglang:0.5.8", "fp8")
    row = cells(engine="TensorRT-LLM", source_date="2025-10-29", model="nvidia/Qwen3-32B-NVFP4")
    assert (software_of(row), precision_of(row)) == ("trtllm:2025h2", "fp4")


def test_a_latency_follows_from_first_and_other_tokens(tmp_path):
    (row,) = read(tmp_path, {})
    assert row.measured["latency_s"] == pytest.approx(0.2 + 127 * 0.02)
    (row,) = read(tmp_path, {"e2e_latency_ms": "900"})  # ended early: of no known length
    assert "latency_s" not in row.measured


@pytest.mark.parametrize(
    ("lacks", "missing"),
    [
        ({"tp": ""}, "tp"),
        ({"concurrency": "", "batch_size": ""}, LOAD_INPUTS),
        ({"output_len_tokens": ""}, "output_len_tokens"),
        ({"input_len_tokens": "0.5"}, "input_len_tokens"),
        ({"hardware": "Huawei Ascend NPU (type not stated)"}, "hardware of one kind"),
        ({"hardware": "AMD MI300X (x8), AMD MI325X (x8)"}, "hardware of one kind"),
        ({"mode": "disaggregated"}, "workers of each kind"),
        ({"notes": "draft acceptance 50 %"}, "tokens accepted per step"),
    ],
)
def test_a_row_without_minimum_inputs_says_which(tmp_path, lacks, missing):
    (row,) = read(tmp_path, lacks)
    assert row.missing == (missing,)
    (prediction,) = predict_serving([row])
    assert not prediction.values
    assert prediction.reason == f"insufficient input: {missing}"


@pytest.mark.parametrize(
    ("names", "unknown"),
    [({"model": "Nobody/Knows-7B"}, "model: Nobody/Knows-7B"), ({"hardware": "Abacus"},
     "accelerator: Abacus")],
)  # fmt: skip
def test_what_phalanx_does_not_know_is_no_lack_of_the_row(tmp_path, names, unknown):
    (row,) = read(tmp_path, names)
    assert not row.missing
    (prediction,) = predict_serving([row])
    assert (dict(prediction.values), prediction.reason) == ({}, f"unknown {unknown}")


def test_a_trace_at_a_rate_is_predicted_whether_or_not_the_engine_keeps_up(tmp_path):
    trace = {"concurrency": "", "batch_size": "", "scenario": "300 requests, 10 requests/s",
             "notes": "max_num_seqs 64"}  # fmt: skip
    slow, fast = read(tmp_path, *(trace | {"request_rate_qps": rate} for rate in ("0.5", "50")))
    assert (slow.kind, slow.concurrency, slow.num_requests) == ("open", 64, 300)
    calm, crowded = (each.values for each in predict_serving([slow, fast]))
    assert crowded["ttft_s"].value > 10 * calm["ttft_s"].value
    assert crowded["tpot_s"].value > calm["tpot_s"].value


def test_text_in_a_number_is_one_clear_error(tmp_path):
    with pytest.raises(JobError, match=r"line 2, ttft_ms"):
        read(tmp_path, {"ttft_ms": "fast"})


def test_every_complete_row_is_predicted_inside_its_bars(seen, predicted):
    complete = [row for row in seen if not row.missing]
    assert len(complete) > 3000
    assert sum(row.is_predictable for row in complete) > 0.99 * len(complete)
    for row, prediction in zip(seen, predicted, strict=True):
        assert row.is_predictable == bool(prediction.values)
        for value, low, high in prediction.values.values():
            assert 0 < low <= value <= high < np.inf


def test_errors_of_seen_rows_stay_within_the_targets(seen, predicted):
    """In sample; what folds miss is in the table's `cross_validation`."""
    errors = {name: [] for name in METRICS}
    for row, prediction in zip(seen, predicted, strict=True):
        for name in row.measured.keys() & prediction.values.keys():
            errors[name].append(abs(prediction.values[name].value / row.measured[name] - 1))
    medians = {name: np.median(values) for name, values in errors.items()}
    assert medians["tpot_s"] < 0.10
    assert medians["latency_s"] < 0.10
    assert medians["ttft_s"] < 0.25
