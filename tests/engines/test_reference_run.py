"""From `train` to its reference: a recorded run of many ranks is one process, bit by bit."""

from __future__ import annotations

import json
from math import prod

import pytest

from phalanx.analyze.first_divergence import compare, read_recorded
from phalanx.cli import main
from phalanx.engines.reference_run import against_reference
from phalanx.engines.run_folder import PLAN_FILE, write_job
from phalanx.errors import PlanError
from phalanx.job import load_job
from phalanx.plan import Plan, Pool, RoleProgram
from phalanx.trace import Trace
from tests.engines.train_cases import REPLICATE, SMALL, run_train
from tests.tiny_run import write_pairs

FLAGS = {"plan.record_steps": 2, "plan.profile_steps": 2, "train.eval_rows": 2, "model.layers": 3}
ROLE = {
    "order": {"family": "pipeline", "name": "1f1b"},
    "batch": {"row_tokens": 96, "stages": [[0, 2], [2, 3]]},
    "dtypes": dict.fromkeys(("master", "compute", "reduce"), "float32"),
}
PIPELINE = {"replicate": 1, "pp": 2}


def trained(folder, source, mesh, specs=(), **role):
    """A run folder as `phalanx train` leaves it."""
    flags = FLAGS | {"data.source": source}
    run_train(folder, flags, mesh, specs, **role)
    job = load_job(None, SMALL | flags)
    write_job(job, folder)
    program = RoleProgram(pool="all", mesh=mesh, specs=list(specs), device="cpu", **role)
    pools = {"all": Pool(machine="here", devices=tuple(range(prod(mesh.values()))))}
    plan = Plan(
        job="job", job_key=job.result_key, hardware={}, pools=pools, programs={"train": program}
    )
    plan.save(folder / PLAN_FILE)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder


@pytest.fixture(scope="module")
def staged(place):
    source = str(write_pairs(place / "pairs.jsonl"))
    return trained(place / "staged", source, PIPELINE, **ROLE)


@pytest.mark.dist
def test_a_pipeline_is_its_reference_bit_by_bit(staged, capsys):
    found = against_reference(staged)
    assert not found.differences and not found.only and found.num_places > 60
    assert main(["trace", "reference", str(staged)]) == 0
    assert "equal bit for bit" in capsys.readouterr().out


@pytest.mark.dist
def test_one_other_bit_is_found(staged, place, capsys):
    """In the recording, which is what a rank that computes something else would leave."""
    copy = place / "spoilt"
    (copy / "fingerprints").mkdir(parents=True)
    for name in ("job.json", PLAN_FILE):
        (copy / name).write_text((staged / name).read_text())
    for file in (staged / "fingerprints").iterdir():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for line in lines[1:]:
            spoilt = (1, "B", "model.layers.1")
            line["bits"] += (line["step"], line["phase"], line["name"]) == spoilt
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (copy / "fingerprints" / file.name).write_text(text)
    assert main(["trace", "reference", str(copy)]) == 1
    assert "first difference: step 1, backward of model.layers.1" in capsys.readouterr().out


@pytest.mark.dist
def test_a_run_says_where_it_waited(staged, capsys):
    assert main(["trace", "slow", str(staged), "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [level["axis"] for level in document["levels"]] == ["pp"]
    assert document["num_steps"] == 2 and document["step_s"] > 0.0


@pytest.mark.dist
def test_waits_and_passes_of_a_profiled_step_lie_within_it(staged):
    trace = Trace.load(staged / "trace.npz")
    rows = trace.where(operator="wait", axis="pp")
    assert len(rows) > 8
    for inner in (rows, trace.where(operator="stage.F")):
        for row in inner.rows():
            (span,) = trace.where(rank=row["rank"], step=row["step"], operator="step").rows()
            from_start_s = row["start_s"] - span["start_s"]
            assert -1e-3 <= from_start_s <= from_start_s + row["dur_s"] <= span["dur_s"] + 1e-3


@pytest.mark.dist
def test_layouts_part_by_rounding_only_and_what_is_not_emulated_is_refused(staged, place):
    replicas = trained(
        place / "replicas", str(place / "pairs.jsonl"), {"replicate": 2}, [REPLICATE],
        batch={"row_tokens": 96}, dtypes=ROLE["dtypes"],
    )  # fmt: skip
    assert not against_reference(replicas).differences
    found = compare(read_recorded(staged), read_recorded(replicas))
    assert found.first is not None and found.first_large is None
    plan = Plan.load(replicas / PLAN_FILE)
    role = RoleProgram(pool="all", mesh={"tp": 2}, device="cpu", dtypes=ROLE["dtypes"])
    Plan(
        job=plan.job, job_key=plan.job_key, hardware={}, pools=plan.pools, programs={"train": role}
    ).save(replicas / PLAN_FILE)
    with pytest.raises(PlanError, match="replicate, pp"):
        against_reference(replicas)
