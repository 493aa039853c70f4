"""The table of efficiencies: what is in it, and the script that makes it."""

import json
from importlib import import_module
from importlib.resources import files

import pandas as pd
import pytest

from phalanx.cost.efficiency import CLASSES, efficiency_of
from phalanx.hardware import machine_names, read_machine

script = import_module("benchmarks.cluster_efficiency")
ROW = {
    "source_id": "a", "status": "ok", "workload": "pretrain", "hardware": "NVIDIA H100 SXM 80GB",
    "n_devices": 8, "dtype": "BF16", "tp": 2, "zero_or_fsdp": "FSDP2", "micro_batch_seqs": 1,
    "global_batch_seqs": 8, "seq_len_tokens": 1024, "step_time_s": 1.0, "params_b": 1.2,
    "layers": 4, "hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": "4096", "vocab": 1000,
}  # fmt: skip
EMPTY = "pp cp ep experts source_check recompute tokens_per_s_per_device tflops_per_device".split()


def write(path, *changes):
    rows = [dict.fromkeys(EMPTY) | ROW | change for change in changes]
    pd.DataFrame(rows).to_csv(path, index=False)


@pytest.mark.parametrize("name", machine_names())
@pytest.mark.parametrize("method", ["lora", "full", "pretrain"])
def test_every_machine_has_a_class_with_bars(name, method):
    found = efficiency_of(read_machine(name), method)
    assert 0 < found.low < found.median < found.high <= 1
    expected, least, most = found.step_s(1.0)
    assert 1.0 <= least < expected < most
    assert str(found.num_rows) in found.describe() and found.num_rows >= 10


def test_the_table_counts_what_it_rests_on():
    table = json.loads((files("phalanx.cost") / "efficiency.json").read_text())
    assert set(table["classes"]) == set(CLASSES)
    for entry in table["classes"].values():
        assert entry["num_rows"] == sum(entry["rows_of_sources"].values())
        assert set(entry["rows_of_sources"]) == set(entry["medians_of_sources"])


def test_a_row_counts_once_and_others_are_counted_by_reason(tmp_path, capsys):
    training, accelerators, out = (tmp_path / name for name in ("t.csv", "a.csv", "out.json"))
    write(
        training,
        {},
        {"step_time_s": 2.0},
        {"source_id": "b", "step_time_s": None, "tokens_per_s_per_device": 1024.0},  # 1 s
        {"pp": 2},
        {"status": "crash_or_oom"},
        {"source_check": "written from memory"},
        {"hardware": "abacus"},
        {"step_time_s": 1e-9},
        {"hidden": None},
    )
    names = {name: 1000.0 for name in script.IN_ACCELERATORS.values()}
    pd.DataFrame({"name": names.keys(), "measured_max_fp8_tflops": names.values()}).to_csv(
        accelerators, index=False
    )
    script.main(str(training), str(accelerators), str(out))
    found = json.loads(out.read_text())
    (entry,) = found["classes"].values()
    assert entry["rows_of_sources"] == {"a": 2, "b": 1}
    first, second = entry["medians_of_sources"]["a"], entry["medians_of_sources"]["b"]
    assert first == pytest.approx(0.75 * second, abs=2e-3)  # of 1 s and 2 s against 1 s
    assert entry["median"] == pytest.approx((first + second) / 2, abs=2e-3)
    assert found["rows_not_used"] == dict.fromkeys(
        ("pp > 1", "failed", "from memory", "machine without a file", "faster than the roofline",
         "sizes not given"), 1,
    )  # fmt: skip
