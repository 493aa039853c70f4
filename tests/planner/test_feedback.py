"""Measured runs: what a folder tells, what a store keeps, and when later prices are corrected."""

import copy
import json
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import JobError, PhalanxError
from phalanx.hardware import read_machine
from phalanx.models.config import to_huggingface
from phalanx.models.named import named_model
from phalanx.planner.feedback import (
    MeasuredRun,
    correction,
    is_device,
    read_run,
    recall,
    recall_all,
    remember,
)
from tests.fuzz.inputs import json_values, outcome

VERSIONS = {"phalanx-parallel": "1.0", "torch": "2.13.0"}
PLAN = {
    "job": "mine",
    "job_key": "k",
    "hardware": {"machine": "NVIDIA H100 80GB HBM3, 81559 MiB"},
    "versions": VERSIONS | {"python": "3.11.7"},
    "programs": {
        "train": {
            "mesh": {"shard": 2},
            "specs": [{"family": "data", "name": "fsdp", "reshard_after_forward": False}],
            "dtypes": {"compute": "bfloat16"},
            "recompute": "selective",
        }
    },
}
JOB = {"sections": {"train": {"method": "lora", "lora_rank": 8}}}
_numbers = count()


@pytest.fixture(scope="module")
def config():
    return to_huggingface(named_model("llama-3.1-8b").config)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def steps(step_s=2.0, num=4, tokens=4000):
    first = {"kind": "step", "step": 1, "step_s": 99.0, "tokens": tokens}
    rest = [first | {"step": at + 2, "step_s": step_s} for at in range(num)]
    lines = [each | {"counted_tokens": 1000, "micro_batches": 2} for each in [first, *rest]]
    return [{"kind": "evaluate", "step": 0, "loss": 1.0}, *lines]


def write(runs, config, *, plan=PLAN, job=JOB, lines=None):
    folder = runs / f"run{next(_numbers)}"
    (folder / "export").mkdir(parents=True)
    for name, table in (("plan", plan), ("job", job), ("export/config", config)):
        (folder / f"{name}.json").write_text(json.dumps(table))
    text = "\n".join(json.dumps(line) for line in (steps() if lines is None else lines))
    (folder / "metrics.jsonl").write_text(text + "\n")
    return folder


def scaled(run, machine, factor):
    return replace(run, key=f"{run.key}{factor}", step_s=factor * run.priced_s(machine))


def test_a_run_folder_tells_its_plan_and_its_typical_step(runs, config):
    run = read_run(write(runs, config))
    assert (run.step_s, run.num_steps, run.method, run.dtype) == (2.0, 4, "lora", "bfloat16")
    assert run.software == VERSIONS and run.lora_rank == 8
    assert run.plan == {
        "tensor": 1, "data": 2, "shard": 2, "zero": 3, "keeps_gathered": 1, "num_micro": 2,
        "row_tokens": 1000, "counted_frac": 0.25, "recompute": 1,
    }  # fmt: skip
    assert float(run.plans().step_tokens) == 4000
    # 8.03e9 weights, 4 operations for each of a token's: 2 forward, 2 for the input's gradient
    least_s = 4 * 7.5e9 * 2000 / 794.5e12
    assert least_s < run.priced_s(read_machine("h100")) < 20 * least_s


def test_a_step_with_more_tokens_counts_by_the_token(runs, config):
    lines = steps(2.0) + [steps(4.0, tokens=8000)[2] | {"step": at} for at in (6, 7, 8)]
    run = read_run(write(runs, config, lines=lines))
    assert run.step_s == pytest.approx(0.0005 * (4 * 4000 + 3 * 8000) / 7)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.07, 3.0])
def test_the_factor_is_measured_over_priced(runs, config, factor):
    h100 = read_machine("h100")
    run = scaled(read_run(write(runs, config)), h100, factor)
    found = correction([run], h100, VERSIONS, method="lora", dtype="bfloat16")
    assert found.factor.value == pytest.approx(factor)
    assert found.factor.low < factor < found.factor.high
    assert found.step_s(10.0).value == pytest.approx(10 * factor)
    assert found.describe().startswith(f"measured 1 run: x{factor:.2f}")


def test_more_runs_that_agree_narrow_the_bar_and_runs_that_differ_widen_it(runs, config):
    h100 = read_machine("h100")
    run = read_run(write(runs, config))

    def width(*factors):
        found = correction(
            [scaled(run, h100, each) for each in factors], h100, VERSIONS,
            method="lora", dtype="bfloat16",
        )  # fmt: skip
        assert found.num_runs == len(factors)
        return found.factor.high / found.factor.low

    assert width(1.05, 1.06, 1.07) < width(1.06) < width(0.8, 1.06, 1.4)


def test_runs_of_another_device_software_method_or_dtype_correct_nothing(runs, config):
    h100, run = read_machine("h100"), read_run(write(runs, config))

    def found(run=run, machine=h100, software=VERSIONS, method="lora", dtype="bfloat16"):
        return correction([run], machine, software, method=method, dtype=dtype)

    assert found() is not None
    assert found(machine=read_machine("h200")) is None
    assert found(machine=read_machine("h100-pcie")) is None
    assert found(software=VERSIONS | {"torch": "2.14.0"}) is None
    assert found(method="full") is None and found(dtype="float32") is None
    assert correction([], h100, VERSIONS, method="lora", dtype="bfloat16") is None


def test_a_processor_is_known_by_the_title_of_its_calibrated_file(runs, config):
    run = read_run(write(runs, config))
    cpu = replace(run, device="Intel(R) Xeon(R) Processor")
    title = "Intel(R) Xeon(R) Processor, 1 of 2 processes with 1 of its cores"
    here = replace(read_machine("h100"), name="here", title=title)
    assert is_device(cpu.device, here) and not is_device(run.device, here)
    assert not is_device(cpu.device, read_machine("h100"))


def test_a_store_keeps_each_run_once_and_gives_it_back(runs, config, tmp_path, monkeypatch):
    one, two = (read_run(write(runs, config, lines=steps(each))) for each in (2.0, 3.0))
    store = tmp_path / "deep" / "runs.json"
    for run in (one, two, one):
        assert remember(run, store) == store
    assert list(recall(store)) == [one, two]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert list(recall_all()) == []
    path = remember(one)
    assert path.is_relative_to(tmp_path / "cache") and list(recall_all()) == [one]
    assert remember(two) == path  # one file for a device and its software
    other = replace(one, software=VERSIONS | {"torch": "2.14.0"})
    assert remember(other) != path and len(recall_all()) == 3


def test_a_folder_is_recalled_as_its_run(runs, config):
    folder = write(runs, config)
    assert list(recall(folder)) == [read_run(folder)]


def test_what_is_no_finished_run_is_refused_in_one_line(runs, config, tmp_path):
    pipeline = copy.deepcopy(PLAN)
    pipeline["programs"]["train"]["mesh"] = {"pipeline": 2}
    cases = [
        (tmp_path, "holds no finished run"),
        (write(runs, config, lines=steps(num=2)), "at least 3 steps"),
        (write(runs, config, lines=steps(float("nan"))), "no time of a step"),
        (write(runs, config, lines=steps(-1.0)), "no time of a step"),
        (write(runs, config, lines=[{"step": 1}]), "not what Phalanx wrote"),
        (write(runs, config, plan={}), "not what Phalanx wrote"),
        (write(runs, config, plan=[]), "must be a table"),
        (write(runs, config, plan=pipeline), "'pipeline'"),
    ]
    (tmp_path / "store.json").write_text('{"format_version": 9, "runs": []}')
    cases.append((tmp_path / "store.json", "format 1"))
    for path, says in cases:
        with pytest.raises(JobError) as caught:
            recall(path)
        assert says in str(caught.value) and "\n" not in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(plan=json_values, job=json_values, line=json_values)
def test_any_json_is_a_run_or_one_clear_line(runs, plan, job, line):
    folder = write(runs, {}, plan=plan, job=job, lines=[line])
    assert isinstance(outcome(read_run, folder), MeasuredRun | PhalanxError)


@settings(max_examples=60, deadline=None)
@given(
    table=json_values | st.fixed_dictionaries({"format_version": st.just(1), "runs": json_values})
)
def test_any_store_is_runs_or_one_clear_line(runs, table):
    path = runs / f"store{next(_numbers)}.json"
    path.write_text(json.dumps(table))
    assert not isinstance(outcome(recall, path), MeasuredRun)
