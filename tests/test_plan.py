"""Plans are lockfiles: they survive a round trip and refuse to run elsewhere."""

import json
from dataclasses import replace

import pytest

from phalanx.errors import PlanError
from phalanx.job import load_job
from phalanx.plan import Plan, Pool, RoleProgram, Transition

JOB = load_job(None, {"model.name": "toy"})


@pytest.fixture
def plan():
    program = RoleProgram(
        pool="all",
        mesh={"pp": 2, "shard": 2},
        order={"family": "pipeline", "name": "1f1b"},
        specs=({"family": "tensor", "name": "megatron", "axis": "tp"},),
        batch={"item_tokens": [5, 7]},
    )
    return Plan(
        job="small",
        job_key=JOB.result_key,
        asked=JOB.result_table,
        hardware={"machine": "h100", "num_devices": 4},
        pools={"all": Pool(machine="h100", devices=(0, 1, 2, 3))},
        programs={"train": program},
        transitions=(
            Transition(source="train", target="serve", tensors="merged weights", trigger="end"),
        ),
    )


def test_saving_and_loading_gives_the_same_plan(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = Plan.load(path)
    again = tmp_path / "again.json"
    loaded.save(again)
    assert path.read_text() == again.read_text()
    assert loaded.program("train").grid() == plan.program("train").grid()
    assert loaded.program("train").built_order().policy_name == "1f1b"
    assert loaded.program("train").built_specs()[0].policy_name == "megatron"


def test_other_hardware_is_refused_naming_both(plan):
    with pytest.raises(PlanError) as caught:
        plan.require_here({"machine": "h100", "num_devices": 8})
    assert caught.value.code == "plan/hardware"
    assert "hardware.num_devices = 8" in str(caught.value) and "made for 4" in str(caught.value)


def test_other_minor_versions_are_refused_and_patches_are_not(plan):
    hardware = plan.hardware
    plan.require_here(hardware, JOB)
    python = plan.versions["python"].rsplit(".", 1)[0]
    patched = Plan(**{**vars(plan), "versions": {"python": f"{python}.99"}})
    patched.require_here(hardware)
    older = Plan(**{**vars(plan), "versions": {"torch": "1.13.0"}})
    with pytest.raises(PlanError) as caught:
        older.require_here(hardware)
    assert caught.value.code == "plan/version" and caught.value.legal == ("1.13.0",)


def test_another_job_is_refused_with_the_key_that_differs(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    other = load_job(None, {"model.name": "toy", "train.lr": 0.5})
    with pytest.raises(PlanError) as caught:
        Plan.load(tmp_path / "plan.json").require_here(plan.hardware, other)
    assert caught.value.code == "plan/job" and caught.value.legal == ("0.001",)
    assert str(caught.value).startswith("train.lr = 0.5: is not what the plan was made for")


def test_a_plan_of_a_release_with_fewer_keys_is_for_the_same_job(plan):
    earlier = {**JOB.result_table, "train": dict(JOB.result_table["train"])}
    del earlier["train"]["label_smoothing"]
    old = replace(plan, job_key="of fewer keys", asked=earlier)
    old.require_here(plan.hardware, JOB)
    smoothed = load_job(None, {"model.name": "toy", "train.label_smoothing": 0.1})
    with pytest.raises(PlanError, match=r"train\.label_smoothing = 0\.1: .* values: 0\.0"):
        old.require_here(plan.hardware, smoothed)


def test_a_plan_that_notes_no_job_is_known_by_its_key_alone(plan, tmp_path):
    table = json.loads(plan.to_text())
    del table["asked"]
    (tmp_path / "plan.json").write_text(json.dumps(table))
    old = Plan.load(tmp_path / "plan.json")
    old.require_here(plan.hardware, JOB)
    with pytest.raises(PlanError, match=f"made for the job with key {JOB.result_key}"):
        old.require_here(plan.hardware, load_job(None, {"model.name": "tiny"}))


def test_an_unknown_role_names_the_roles(plan):
    with pytest.raises(PlanError) as caught:
        plan.program("trian")
    assert caught.value.legal == ("train",)


@pytest.mark.parametrize("text", ["", "[]", '{"format_version": 99}', "{"])
def test_files_that_are_no_plans_are_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert caught.value.code == "plan/format"


def test_keys_that_no_plan_has_are_refused(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra": 1}))
    with pytest.raises(PlanError, match="extra"):
        Plan.load(path)


def test_axes_keep_their_order(plan, tmp_path):
    """The order of a mesh's axes decides which rank stands where."""
    program = RoleProgram(pool="all", mesh={"tp": 2, "pp": 2})
    path = tmp_path / "plan.json"
    Plan(**{**vars(plan), "programs": {"train": program}}).save(path)
    grid = Plan.load(path).program("train").grid()
    assert grid.names == ("tp", "pp") and grid.coordinates(1) == {"tp": 0, "pp": 1}


WRONG = [
    (("programs",), None),
    (("pools", "all"), {"machine": "h100"}),
    (("pools", "all", "devices"), [0, "1"]),
    (("programs", "train", "mesh"), {"pp": "2"}),
    (("programs", "train", "specs"), [3]),
    (("programs", "train", "extra"), 1),
    (("transitions",), [{"source": "train"}]),
    (("transitions",), [None]),
    (("hardware",), None),
    (("versions",), {"torch": 2}),
    (("predictions",), "none"),
    (("job",), 3),
    (("format_version",), True),
]


@pytest.mark.parametrize(("place", "wrong"), WRONG, ids=[".".join(place) for place, _ in WRONG])
def test_wrong_entries_are_refused_naming_their_place(plan, tmp_path, place, wrong):
    path = tmp_path / "plan.json"
    plan.save(path)
    table = inner = json.loads(path.read_text())
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = wrong
    path.write_text(json.dumps(table))
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert caught.value.code == "plan/format" and ".".join(place) in caught.value.where


@pytest.mark.parametrize("name", ["pools", "programs", "job", "versions"])
def test_a_lockfile_is_whole(plan, tmp_path, name):
    """Versions that are missing would otherwise be those of whoever reads it."""
    path = tmp_path / "plan.json"
    plan.save(path)
    table = json.loads(path.read_text())
    del table[name]
    path.write_text(json.dumps(table))
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert caught.value.code == "plan/format" and caught.value.where.endswith(name)


@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000], ids=["not UTF-8", "deep"])
def test_files_that_break_readers_are_refused(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert caught.value.code == "plan/format"


def test_policies_without_a_family_are_refused():
    with pytest.raises(PlanError) as caught:
        RoleProgram(pool="all", mesh={}, order={"name": "1f1b"}).built_order()
    assert caught.value.code == "plan/format"
