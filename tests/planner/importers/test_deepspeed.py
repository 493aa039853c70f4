"""DeepSpeed's file is read where the configuration names it, else its name says the stage."""

import json

import pytest

from phalanx.errors import JobError
from phalanx.planner.importers import ALL_LEFT, read_foreign

SOURCES = {
    "axolotl": "base_model: Qwen/Qwen3-8B\nsequence_len: 2048\ndeepspeed: {}\n",
    "trl": "model_name_or_path: Qwen/Qwen3-8B\nmax_length: 2048\ndeepspeed: {}\n",
    "accelerate": "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n"
    "  deepspeed_config_file: {}\n",
}


def plan(folder, kind, named):
    (folder / "run.yaml").write_text(SOURCES[kind].format(named))
    found = read_foreign(folder / "run.yaml")
    assert found.kind == kind
    return found


@pytest.mark.parametrize("kind", SOURCES)
def test_stage_and_offload_are_those_of_the_file_beside_the_configuration(kind, tmp_path):
    (tmp_path / "ds").mkdir()
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    table = {"zero_optimization": zero, "train_batch_size": "auto"}
    (tmp_path / "ds" / "own.json").write_text(json.dumps(table))
    found = plan(tmp_path, kind, "ds/own.json")
    assert (found.zero, found.shard, found.offload, found.offloads_weights) == (
        3, ALL_LEFT, 1.0, True,
    )  # fmt: skip
    assert found.origin["zero"].endswith("ds/own.json")
    (tmp_path / "ds" / "own.json").write_text(json.dumps({"zero_optimization": {"stage": 0}}))
    found = plan(tmp_path, kind, "ds/own.json")
    assert (found.zero, found.shard, found.offload) == (0, 1, None)


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(("named", "stage"), [("z/zero3_bf16.json", 3), ("ds_config.json", 2)])
def test_a_file_that_is_elsewhere_is_assumed_by_its_name(kind, named, stage, tmp_path):
    found = plan(tmp_path, kind, named)
    assert (found.zero, found.shard) == (stage, ALL_LEFT)
    (note,) = [each for each in found.notes if each.kind == "assumed" and "ZeRO" in each.text]
    assert "is not here" in note.text and note.where.startswith("line")


@pytest.mark.parametrize(
    ("text", "says"),
    [('{"zero_optimization": {"stage": 4}}', "must be 0 to 3"), ("[1, 2]", "keys and values")],
)
def test_a_file_that_cannot_be_meant_is_refused(text, says, tmp_path):
    (tmp_path / "own.json").write_text(text)
    with pytest.raises(JobError, match=says):
        plan(tmp_path, "axolotl", "own.json")
