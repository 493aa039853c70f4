"""Tables of strangers through all of `lab validate`: scores, JSON, page, picture, exit codes."""

import csv
import json
import math
from collections import Counter

import pytest

from phalanx.cli import main
from phalanx.lab.baseline import fit_constant_rate, useful_flops
from phalanx.lab.csv_rows import seen_table
from phalanx.lab.markdown import percent
from phalanx.lab.page import page
from phalanx.lab.scored import Validation, plain
from phalanx.lab.serving_rows import read_serving
from phalanx.lab.targets import TARGETS
from phalanx.lab.training_predictions import predict_training
from phalanx.lab.training_rows import read_training
from phalanx.lab.validation import validate
from tests.lab.tables import row, text


def table(tmp_path, *rows, name="rows.csv"):
    path = tmp_path / name
    path.write_text(text(*rows))
    return path


def run(capsys, *argv):
    code = main(["lab", "validate", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_constant_rate_reproduces_the_row_it_was_fitted_on_and_scales_with_flops(tmp_path):
    rows = read_training(
        table(tmp_path, row(), row(tp="4"), row(global_batch_seqs="32", step_time_s="3.0"))
    )
    rate = fit_constant_rate(rows[:1])
    assert rate.step_s(rows[0]) == pytest.approx(2.0)
    assert rate.step_s(rows[1]) == pytest.approx(2.0)  # blind for plans
    assert rate.step_s(rows[2]) == pytest.approx(4.0)
    # 6 N D without the embedding, plus causal attention: 6 L s^2/2 H C 2 per row
    products = 6 * (8.03e9 - 128256 * 4096) * 16 * 8192
    attention = 3 * 32 * 16 * 8192 * 4096 * 4 * 32 * 128
    assert useful_flops(rows[0]) == pytest.approx(products + attention, rel=0.002)


def test_adapters_need_two_thirds_of_the_flops(tmp_path):
    full, lora = read_training(table(tmp_path, row(), row(workload="lora")))
    assert useful_flops(lora) == pytest.approx(useful_flops(full) * 2 / 3)


def test_a_row_without_a_prediction_says_why(tmp_path):
    rows = read_training(
        table(
            tmp_path,
            row(),
            row(hardware="Abacus 9000"),
            row(dtype=""),
            row(framework="something that nobody knows"),
        )
    )
    good, machine, dtype, software = predict_training(rows)
    assert good.step_s.low < good.step_s.value < good.step_s.high and not good.reason
    assert machine.reason == "unknown accelerator: Abacus 9000"
    assert dtype.reason == "insufficient input: dtype"
    assert software.step_s is not None or software.reason


def test_scores_count_what_is_complete_priced_and_trusted(tmp_path):
    rows = read_training(
        table(
            tmp_path,
            row(),
            row(tp="4", memory_gb="60"),
            row(hardware="Abacus 9000"),
            row(dtype=""),
            row(source_check="from memory of the paper"),
            row(status="crash_or_oom", step_time_s=""),
        )
    )
    found = validate(rows, [])
    (source,) = found.sources
    assert (source.rows, source.complete, source.predicted) == (6, 5, 4)
    assert source.from_memory == 1
    assert source.errors["step_s"].rows == 2 and source.errors["memory_bytes"].rows == 1
    assert set(source.reasons.values()) == {1}
    assert found.memory_calls["somebody"].true == 1


def test_grids_are_ranked_among_runs_that_ended(tmp_path):
    plans = [
        row(source_id="a sweep", tp=str(tp), n_devices="32", global_batch_seqs="64", step_time_s=s)
        for tp, s in ((1, "1.0"), (2, "1.1"), (4, "1.3"), (8, "1.9"), (16, "4.0"))
    ]
    failed = plans[0] | {"micro_batch_seqs": "2", "status": "crash_or_oom", "step_time_s": ""}
    (grid,) = validate(read_training(table(tmp_path, *plans, failed)), []).grids
    assert (grid.ran, grid.failed) == (5, 1)
    assert -1 <= grid.spearman <= 1 and grid.regret >= 1


def test_engines_at_one_load_are_ranked_by_latency():
    rows = read_serving(seen_table("serving"))
    ranked = [row for row in rows if not row.missing and "latency_s" in row.measured]
    (largest, _), *_ = Counter(row.rank_group for row in ranked).most_common(1)
    of_one = [row for row in ranked if row.rank_group == largest]
    found = validate([], of_one)
    (grid,) = found.grids
    assert grid.ran == len(of_one) and grid.regret >= 1 and abs(grid.spearman) <= 1
    assert found.by_source("tpot_s") and found.predicted == len(of_one)


def test_json_is_json_and_the_page_holds_the_targets(tmp_path, capsys):
    path = table(tmp_path, row(), row(source_id="nvidia_somewhere"), row(hardware="Abacus 9000"))
    out, text_file, drawn = tmp_path / "out.json", tmp_path / "page.md", tmp_path / "page.png"
    lines = tmp_path / "lines.csv"
    files = ("--json", out, "--markdown", text_file, "--picture", drawn, "--rows", lines)
    code, shown, _ = run(capsys, "--training", path, *files)
    assert code == 0 and "3 rows; 3 with the minimum inputs, of which 2 were priced" in shown
    document = json.loads(out.read_text())
    assert document["kind"] == "accuracy" and document["format_version"] == 1
    assert {each["source_id"] for each in document["sources"]} == {"somebody", "nvidia_somewhere"}
    judged = {each["name"]: each["met"] for each in document["targets"]}
    assert judged["dense vendor-tuned: step time, median error"] in (True, False)
    assert judged["serving: TPOT, median error"] is None
    compared = list(csv.DictReader(lines.open()))
    assert [each["line"] for each in compared] == ["2", "3", "4"]
    first, last = compared[0], compared[-1]
    assert float(first["predicted"]) / float(first["measured"]) - 1 == pytest.approx(
        float(first["error"]), rel=1e-3
    )
    assert last["reason"] == "unknown accelerator: Abacus 9000" and not last["measured"]
    content = text_file.read_text()
    assert "(page.png)" in content and "Abacus 9000" in content
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_a_missed_target_exits_1_only_when_asked(tmp_path, capsys):
    path = table(tmp_path, row(source_id="nvidia_somewhere", step_time_s="1000"))
    assert run(capsys, "--training", path)[0] == 0
    code, _, err = run(capsys, "--training", path, "--gate")
    assert code == 1 and "dense vendor-tuned" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", "lacks the columns"),
        (text(row(step_time_s="fast")), "line 2, step_time_s = 'fast'"),
        (text(row(n_devices="nan")), "none of its 1 rows could be priced: 1 without n_devices"),
        (text(row(hardware="Abacus 9000")), "none of its 1 rows could be priced: 1 unknown accel"),
    ],
)
def test_a_table_that_says_nothing_exits_2_in_one_line(tmp_path, capsys, content, told):
    path = tmp_path / "rows.csv"
    path.write_text(content)
    code, _, err = run(capsys, "--training", path)
    assert code == 2 and told in err and err.count("\n") == 1


def test_nothing_found_is_a_page_too():
    assert "0 published measurements" in page(Validation([], [], {}, []))
    assert all(target.is_met(target.of(Validation([], [], {}, []))) is None for target in TARGETS)


def test_figures_that_do_not_exist_are_blank_in_text_and_null_in_json():
    assert percent(math.nan) == "" and percent(None) == ""
    assert percent(0.034) == "3.4%" and percent(-0.5, sign=True) == "-50%"
    assert plain({"a": [math.nan, 1.0]}) == {"a": [None, 1.0]}


def test_this_machine_is_measured_into_a_file_that_plans_read(tmp_path, capsys, monkeypatch):
    from phalanx.engines import machine_file
    from phalanx.hardware import read_machine

    monkeypatch.setattr(
        machine_file, "calibrate_machine", lambda name, num_devices: read_machine("l40s")
    )
    path = tmp_path / "here.toml"
    assert main(["lab", "calibrate", "-o", str(path), "--json", str(tmp_path / "m.json")]) == 0
    shown = capsys.readouterr().out
    assert f"--on {read_machine('l40s').devices_per_domain}x{path}" in shown
    assert read_machine(str(path)).memory == read_machine("l40s").memory
    document = json.loads((tmp_path / "m.json").read_text())
    assert document["figures"]["matmul"]["source"]


def test_measured_runs_are_kept_once_and_a_folder_without_a_run_exits_2(
    tmp_path, capsys, monkeypatch
):
    from phalanx.planner import feedback

    run_of = feedback.MeasuredRun(
        name="tiny",
        key="1",
        device="a device",
        software={"phalanx": "0", "torch": "2"},
        method="full",
        dtype="bfloat16",
        lora_rank=0,
        config={},
        plan={},
        step_s=0.25,
        num_steps=7,
    )
    monkeypatch.setattr(feedback, "read_run", lambda folder: run_of)
    path = tmp_path / "measured.json"
    assert main(["lab", "remember", "a", "b", "-o", str(path)]) == 0
    assert "250 ms" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["runs"]) == 1
    monkeypatch.undo()
    assert main(["lab", "remember", str(tmp_path)]) == 2
    assert "holds no finished run" in capsys.readouterr().err
