"""What is written is read by the target: by its own parser where it is installed."""

import json
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from phalanx.errors import PlanError
from phalanx.job import load_job
from phalanx.models.named import named_model
from phalanx.planner.emitters import TARGETS, Site, emit, targets
from phalanx.planner.importers import KINDS
from phalanx.planner.importers.reading import known_keys
from phalanx.planner.training_shape import training_shape
from tests.planner.emitters.plans import served, trained
from tests.planner.emitters.target_parsers import PARSERS, installed

ROOT = Path(__file__).resolve().parents[3]
SITE = Site(accelerator="H100")
DDP = {"zero": 0, "shard": 1, "replicate": None}
PLANS = {
    "sharded": trained(),
    "one device": trained(devices=1, **DDP),
    "replicas": trained(devices=4, recompute="none", **DDP),
    "staged": trained(
        tensor=2, pipeline=4, zero=1, shard=2, replicate=1, num_micro=8, virtual=2,
        schedule="interleaved", sequence_parallel=True,
    ),
    "staged in eight bits": trained(
        tensor=2, pipeline=4, zero=1, shard=2, replicate=1, num_micro=8, virtual=2,
        schedule="interleaved", sequence_parallel=True, precision="fp8",
    ),
    "staged and sharded": trained(
        pipeline=2, shard=8, replicate=1, schedule="1f1b", num_micro=4, recompute="selective",
    ),
    "ring": trained(context=2, context_kind="ring", shard=16, replicate=1),
    "adapters": trained(
        method="lora", lora_rank=8, lora_alpha=16.0, lora_dropout=0.1,
        lora_targets=("q_proj", "v_proj"), steps=None, epochs=2.0,
    ),
    "adapters on four bits": trained(
        method="lora", lora_rank=8, lora_alpha=16.0, base_bits=4, offload=1.0, data="org/chat",
    ),
    "eight-bit products": trained(precision="fp8", keeps_gathered=True),
    "server": served(),
    "server with experts spread": served(expert=8, weight_bits=None, precision="bf16"),
}  # fmt: skip


def written(target, plan, folder):
    """Files of a plan in a folder; None where the target has no words for it."""
    try:
        files = emit(target, plan, SITE)
    except PlanError as refusal:
        assert refusal.code == "emit/impossible" and "\n" not in refusal.sentence()
        return None
    for name, text in files.items():
        (folder / name).write_text(text)
    return files


@pytest.mark.parametrize(
    "target, parser", installed(), ids=lambda each: getattr(each, "__name__", each)
)
def test_the_targets_own_parser_accepts_every_plan_that_is_written(target, parser, tmp_path):
    count = 0
    for name, plan in PLANS.items():
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        if written(target, plan, folder):
            parser(folder)
            count += 1
    assert count >= 2


def test_accelerate_and_trl_are_among_the_parsers_of_every_run():
    assert {parser.__name__ for _, parser in installed()} >= {"accelerate", "trl"}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("target", TARGETS)
def test_files_are_of_their_kind_and_say_who_wrote_them_for_what(target, name, tmp_path):
    for file, text in (written(target, PLANS[name], tmp_path) or {}).items():
        assert "Written by Phalanx" in text and "\t" not in text
        if file.endswith(".toml"):
            assert tomllib.loads(text)
        elif file.endswith(".yaml"):
            assert json.dumps(yaml.safe_load(text))
        else:
            done = subprocess.run(["bash", "-n", str(tmp_path / file)], capture_output=True)
            assert not done.returncode, done.stderr


@pytest.mark.parametrize("target", PARSERS)
def test_the_header_names_the_version_that_was_written_for(target):
    plan = PLANS["server"] if target == "vllm" else PLANS["sharded"]
    first = next(iter(emit(target, plan, SITE).values()))
    assert targets()[target] in " ".join(first.split())


def test_the_job_that_a_launcher_runs_is_a_job_of_phalanx(tmp_path):
    for target in ("skypilot", "slurm"):
        written(target, PLANS["adapters"], tmp_path)
        job = load_job(tmp_path / "job.toml")
        assert job.model.name == "meta-llama/Llama-3.1-8B" and job.train.lora_rank == 8
        assert job.train.global_batch_tokens == 16 * 2 * 4096
        assert dict(job.plan.mesh) == {"replicate": 2, "shard": 8}


@pytest.mark.parametrize("name", ["staged", "ring"])
def test_a_launcher_runs_stages_and_shared_rows_with_phalanx(name, tmp_path):
    written("slurm", PLANS[name], tmp_path)
    job = load_job(tmp_path / "job.toml", {"model.dtype": "bfloat16"})
    config = named_model("llama-3.1-8b").config
    shape = training_shape(job, config, 16)
    assert shape.mesh.size == 16
    assert shape.mesh.degree("pp") * shape.mesh.degree("cp") > 1


def test_a_launcher_runs_another_program_where_phalanx_does_not():
    files = emit("slurm", PLANS["staged in eight bits"], SITE)
    assert "megatron.sh" in files and "bash megatron.sh" in files["job.sbatch"]
    assert "no such precision" in " ".join(files["job.sbatch"].split())
    files = emit("skypilot", PLANS["staged and sharded"], SITE)
    assert "torchtitan.toml" in files and "torchtitan.train" in files["sky.yaml"]


def test_a_batch_script_asks_for_the_nodes_of_the_plan():
    text = emit("slurm", PLANS["sharded"], SITE)["job.sbatch"]
    assert "--nodes=2" in text and "--gpus-per-node=8" in text
    text = emit("slurm", PLANS["one device"], SITE)["job.sbatch"]
    assert "--nodes=1" in text and "--gpus-per-node=1" in text


def test_the_page_of_targets_names_every_version_that_is_written_or_read():
    page = (ROOT / "docs" / "interchange.md").read_text()
    for target in TARGETS:
        version = targets()[target].split(" on ")[0]
        assert f"| `{target}` |" in page and version in page, target
    for kind in KINDS:
        assert known_keys(kind)["version"] in page, kind


@pytest.mark.parametrize(
    ("machine", "name"), [("A100-80G", "A100-80GB"), ("h100-pcie", "H100"), ("B200", "B200")]
)
def test_a_task_asks_for_an_accelerator_by_its_name_in_the_catalog(machine, name):
    text = emit("skypilot", trained(), Site(accelerator=machine))["sky.yaml"]
    assert f"accelerators: {name}:8" in text


def test_a_task_for_a_machine_that_no_catalog_has_is_refused():
    with pytest.raises(PlanError, match="HERE"):
        emit("skypilot", trained(), Site(accelerator="HERE"))


def test_launchers_find_the_script_of_megatron_where_their_setup_puts_it():
    plan = PLANS["staged in eight bits"]
    files = emit("skypilot", plan, SITE)
    assert "git clone" in files["sky.yaml"] and "env MEGATRON=Megatron-LM bash" in files["sky.yaml"]
    assert '"${MEGATRON:-.}/pretrain_gpt.py"' in files["megatron.sh"]
    assert "git clone" in emit("slurm", plan, SITE)["job.sbatch"]
