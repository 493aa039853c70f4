"""`phalanx train` refuses what cannot work in one line, before it starts a process."""

from __future__ import annotations

import json
import shutil
import struct

import pytest

from phalanx.cli import main
from phalanx.models import folders
from tests.cli.train_inputs import words
from tests.tiny_run import write_base, write_pairs

pytestmark = pytest.mark.usefixtures("no_process")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("model"))


@pytest.fixture
def refused(capsys, base, tmp_path):
    """The error line of a refused command."""

    def run(*argv, model=None, data=None, flags=None, target=None):
        data = data or write_pairs(tmp_path / "pairs.jsonl")
        given = ["--model", str(model or base), "--data", str(data), *words(flags)]
        given += ["--folder", str(target or tmp_path / "run"), "--procs", "2", *argv]
        assert main(["train", *given]) == 2
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if line.startswith("error")]
        assert out == "" and len(lines) == 1 and "Traceback" not in err, err
        assert not (tmp_path / "run" / "plan.json").exists()
        return lines[0]

    return run


def copied(base, tmp_path):
    return shutil.copytree(base, tmp_path / "broken")


def changed_config(base, tmp_path, **values):
    folder = copied(base, tmp_path)
    table = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(table))
    return folder


def test_an_architecture_that_is_not_known_is_named(refused, base, tmp_path):
    folder = changed_config(base, tmp_path, model_type="mamba", architectures=["MambaForCausalLM"])
    line = refused(model=folder)
    assert line.startswith("error[model/unknown]") and "mamba" in line and "llama" in line


def test_a_truncated_shard_is_named_with_its_tensor(refused, base, tmp_path):
    shard = copied(base, tmp_path) / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    line = refused(model=shard.parent)
    assert line.startswith("error[model/tensor]") and str(shard) in line and "truncated" in line


def test_a_damaged_header_is_no_traceback(refused, base, tmp_path):
    shard = copied(base, tmp_path) / "model.safetensors"
    content = shard.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    shard.write_bytes(content[:8] + b"{" * length + content[8 + length :])
    line = refused(model=shard.parent)
    assert line.startswith("error[model/tensor]") and str(shard) in line


def test_a_missing_shard_is_named(refused, base, tmp_path):
    folder = copied(base, tmp_path)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (folder / "model.safetensors").rename(folder / names[0])
    index = {"metadata": {}, "weight_map": {"model.norm.weight": names[0], "x": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert names[1] in refused(model=folder)


def test_pickled_weights_are_not_opened(refused, base, tmp_path):
    folder = copied(base, tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    line = refused(model=folder)
    assert line.startswith("error[environment/trust]") and "pytorch_model.bin" in line


def test_a_tensor_of_another_shape_is_named(refused, base, tmp_path):
    line = refused(model=changed_config(base, tmp_path, intermediate_size=48))
    assert line.startswith("error[model/tensor]") and "model.layers.0.mlp" in line


@pytest.mark.parametrize(
    ("content", "code", "told"),
    [
        ("", "data/empty", "bad.jsonl"),
        ('{"prompt": "a", "completion": "b"}\n{"prompt": \n', "data/row", "bad.jsonl:2"),
        ('{"prompt": "a", "completion": "b"}\n[1]\n', "data/row", "bad.jsonl:2"),
        ('{"messages": [{"role": "nobody", "content": "x"}]}\n', "data/row", "bad.jsonl:1"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(refused, tmp_path, content, code, told):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    line = refused(data=path)
    assert line.startswith(f"error[{code}]") and told in line


def test_a_template_that_cannot_be_rendered_is_named(refused, tmp_path):
    path = tmp_path / "bad.jinja"
    path.write_text("{% for message in messages %}{{ message.content }")
    line = refused(flags={"data.chat_template": path})
    assert str(path) in line


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"plan.mesh": "{tp=2}", "plan.tensor": "megatron"}, "plan.mesh.tp = 2"),
        ({"plan.mesh": "{shard=3}"}, "plan.mesh"),
        ({"plan.on": "8xh100"}, "plan.on = 8xh100"),
        ({"data.max_tokens": 12}, "data.too_long"),
        ({"train.adapter": "/nowhere"}, "/nowhere"),
        ({"train.loss": "no_such_module:loss"}, "train.loss"),
        (
            {"train.loss": "no_such_module:loss", "train.label_smoothing": 0.1},
            "train.label_smoothing = 0.1",
        ),
        ({"train.label_smoothing": 1.5}, "train.label_smoothing"),
        ({"train.lora_targets": "['no_such_proj']"}, "no_such_proj"),
        ({"train.callbacks": "['no_such_module:Callback']"}, "train.callbacks"),
        ({"plan.log_to": "['neptune']"}, "plan.log_to"),
        ({"train.lr": "fast"}, "train.lr"),
    ],
)
def test_a_job_that_cannot_run_says_which_key_and_what_is_legal(refused, flags, told):
    assert told in refused(flags=flags)


FULL = {"train.method": "full", "plan.mesh": "{pp=2}"}
ONE_ITEM = "{name='listed', rows=['0F0,0B0', '1F0,1B0']}"
RING = {"plan.mesh": "{cp=2}", "plan.context": "ring"}


@pytest.mark.parametrize(
    ("flags", "told", "nearest"),
    [
        # three layers, of which embedding and head may stand alone
        (FULL | {"plan.pipeline": "{name='hanayo', waves=2}"}, "plan.pipeline = 8", "2 on each"),
        (FULL | {"plan.stages": "[2, 2]"}, "plan.stages = [2, 2]", "[2, 1]"),
        (FULL | {"plan.stages": "[1, 1, 1]"}, "plan.stages", "[2, 1]"),
        # a step of 300 tokens is two rows of 256
        (
            FULL | {"plan.pipeline": "dualpipe_v", "plan.row_tokens": 256},
            "train.global_batch_tokens = 300: a step has 2 micro-batches",
            "1024",
        ),
        (
            FULL | {"plan.pipeline": ONE_ITEM, "plan.row_tokens": 256},
            "train.global_batch_tokens = 300: a step has up to 2 micro-batches",
            "256",
        ),
        (
            FULL | {"plan.pipeline": "{name='listed', rows=['0F0,0B0']}"},
            "ranks of the pipeline = 2: the schedule is written for 1",
            "1",
        ),
        (
            FULL | {"plan.pipeline": "{name='listed', rows=['0F0,0B0', '1F0']}"},
            "1B0: is missing",
            "",
        ),
        (FULL | {"plan.pipeline": "listed"}, "plan.pipeline.file: a listed schedule needs", ""),
        (
            FULL | {"plan.row_tokens": 512},
            "train.global_batch_tokens = 300: a step has 1 micro-batch of up to 512 tokens",
            "1024",
        ),
        (
            RING | {"plan.row_tokens": 98},
            "plan.row_tokens = 98: must be a multiple of 4",
            "96, 100",
        ),
        (RING | {"plan.context": "ulysses"}, "plan.mesh.cp = 2: cannot share 3 query", "1, 3"),
        (RING | {"plan.context": "rings"}, "rings", "ring"),
        ({"plan.mesh": "{cp=2}"}, "plan.mesh.cp = 2", "1"),
        ({"plan.mesh": "{replicate=2}", "plan.context": "ring"}, "plan.context", "replicate"),
        ({"plan.mesh": "{shard=2}", "plan.data": "zero"}, "plan.data = zero", "replicate"),
    ],
)
def test_axes_that_a_job_cannot_take_name_the_nearest_that_it_can(refused, flags, told, nearest):
    line = refused(flags=flags)
    assert told in line, line
    assert nearest in line.partition("nearest legal values: ")[2], line


def test_a_disk_without_room_is_seen_first(refused, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: usage)
    line = refused()
    assert line.startswith("error[environment/disk]") and "1000 B are free" in line


def test_a_folder_that_holds_a_run_is_not_written_over(refused, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "train.json").write_text("{}")
    assert f"--resume {tmp_path / 'run'}" in refused()


def test_going_on_takes_everything_from_the_run(capsys, tmp_path):
    assert main(["train", "--resume", str(tmp_path / "run"), "--model", "tiny"]) == 2
    assert "cannot stand beside --resume" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "none")]) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["pairs.jsonl", "pairs.jsonl/run", "/proc/self/run"])
def test_a_run_folder_that_cannot_be_made_is_refused_first(refused, tmp_path, place):
    line = refused(target=tmp_path / place)
    assert line.startswith("error[cli/file]: --folder = ") and "cannot be made" in line


@pytest.mark.parametrize(
    "argv",
    [
        ["one.toml", "two.toml"],
        ["--procs", "-1"],
        ["--procs", "many"],
        ["--folder"],
        ["--resume"],
        ["--train.steps"],
        ["--steps", "3"],
        ["--plan", "/nowhere/plan.json", "--model", "tiny", "--train.method", "pretrain"],
        ["/nowhere/job.toml"],
    ],
)
def test_words_that_make_no_run_are_one_line(capsys, argv):
    assert main(["train", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error[") and err.count("\n") == 1
