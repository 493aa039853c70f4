"""Weights on disk: broken files are told by name before memory is taken, written ones are whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.errors import JobError
from phalanx.models import folders
from phalanx.models.decoder import Decoder
from phalanx.models.hf import load_decoder, read_tensors, save_folder, save_tuned
from phalanx.models.stored import INDEX, read_header, stored_tensors
from phalanx.models.stored_read import TensorReader
from phalanx.models.stored_write import ShardWriter
from phalanx.models.weight_names import model_weights
from tests.models.cases import CONFIGS, random_decoder

CONFIG = CONFIGS["grouped_queries"]
UP = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path) -> Path:
    values = random_decoder(CONFIG).state_dict().items()
    return save_folder(tmp_path / "model", CONFIG, values, max_shard_bytes=30_000)


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def edit_index(folder: Path, change) -> None:
    table = json.loads((folder / INDEX).read_text())
    change(table["weight_map"])
    (folder / INDEX).write_text(json.dumps(table))


def edit_shard(folder: Path, change) -> None:
    path = shard_of(folder, UP)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def cut_off(folder: Path) -> None:
    path = shard_of(folder, UP)
    os.truncate(path, path.stat().st_size - 1)


def corrupt_header(folder: Path) -> None:
    with shard_of(folder, UP).open("r+b") as file:
        file.seek(9)
        file.write(b"\xff\xff")


@pytest.mark.parametrize(
    ("spoil", "code", "says"),
    [
        (lambda f: shard_of(f, UP).unlink(), "job/not-found", r"index\.json = model-\d+.*absent"),
        (cut_off, "model/tensor", r"model-\d.*truncated"),
        (corrupt_header, "model/tensor", r"model-\d+-of-\d+\.safetensors: is not valid JSON"),
        (lambda f: shard_of(f, UP).write_bytes(b""), "model/tensor", r"model-\d.*header"),
        (lambda f: edit_index(f, lambda m: m.update({"a.b": m[UP]})), "model/tensor", r"a\.b.*not"),
        (
            lambda f: edit_index(f, lambda m: m.update({UP: "../x.safetensors"})),
            "job/not",
            "absent",
        ),
        (lambda f: edit_index(f, lambda m: m.update({UP: 7})), "model/tensor", r"up_proj.*in 7"),
        (lambda f: edit_index(f, lambda m: m.pop(UP)), "model/tensor", r"up_proj.*missing"),
        (lambda f: (f / INDEX).write_text("[]"), "model/tensor", "JSON object"),
        (lambda f: (f / INDEX).write_text("{}"), "model/tensor", "weight_map"),
        (
            lambda f: edit_shard(f, lambda t: t.update({UP: torch.ones(3, 4)})),
            "model/tensor",
            r"safetensors: model\.layers\.2\.mlp\.up_proj\.weight = \(3, 4\).*\(80, 48\)",
        ),
        (
            lambda f: edit_shard(f, lambda t: t.update({UP: t[UP].to(torch.int8)})),
            "model/tensor",
            r"up_proj\.weight = I8: .*quantised",
        ),
    ],
)
def test_what_is_broken_is_told_before_anything_is_allocated(
    folder, monkeypatch, spoil, code, says
):
    spoil(folder)
    monkeypatch.setattr(Decoder, "__init__", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(JobError, match=says) as caught:
        load_decoder(folder)
    assert caught.value.code.startswith(code)


def test_unknown_tensor_is_refused_and_rotary_buffers_are_not(tmp_path):
    values = random_decoder(CONFIG).state_dict()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    head = {"lm_head.weight": values["model.embed_tokens.weight"].clone()}
    folder = save_folder(tmp_path / "model", CONFIG, values.items())
    save_file(dict(values) | extra | head, folder / "model.safetensors")
    assert len(model_weights(folder, CONFIG)) == len(values)
    save_file(
        dict(values) | {"model.layer.0.mlp.bias": torch.ones(8)}, folder / "model.safetensors"
    )
    with pytest.raises(JobError, match=r"model\.layer\.0\.mlp\.bias.*belongs to no part"):
        model_weights(folder, CONFIG)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused_with_the_way_out(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80")
    with pytest.raises(JobError, match=rf"{name}.*save_pretrained") as caught:
        stored_tensors(tmp_path)
    assert caught.value.code == "environment/trust"


def test_folder_of_links_as_the_hub_cache_has_it_is_read(folder, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"{number:x}")
        (snapshot / path.name).symlink_to(Path("../blobs") / f"{number:x}")
    loaded, expected = load_decoder(snapshot), random_decoder(CONFIG)
    assert all(torch.equal(v, expected.state_dict()[k]) for k, v in loaded.state_dict().items())


def test_link_to_nowhere_is_named(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("gone")
    with pytest.raises(JobError, match=r"model\.safetensors: cannot be read: No such file"):
        stored_tensors(tmp_path)


PREFIXES = ["model.language_model.", "language_model.model.", ""]


def multimodal(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Rewrite the folder as one with a vision tower and this prefix; the stored tensors."""
    values = random_decoder(CONFIG).state_dict()
    stored = {prefix + name.removeprefix("model."): value for name, value in values.items()}
    if prefix:
        stored["vision_tower.patch.weight"] = torch.randn(5, 3)
        stored["model.projector.scale"] = torch.tensor(2.0, dtype=torch.float64)
    for path in folder.glob("model*"):
        path.unlink()
    save_file(stored, folder / "model.safetensors")
    (folder / "processor_config.json").write_text("{}")
    return stored


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_are_undone_and_written_again(folder, tmp_path, prefix):
    stored = multimodal(folder, prefix)
    assert set(model_weights(folder, CONFIG)) == set(random_decoder(CONFIG).state_dict())
    read = dict(read_tensors(folder))
    assert torch.equal(read[UP], random_decoder(CONFIG).state_dict()[UP])
    changed = {UP: torch.full((80, 48), 3.0, dtype=torch.float64)}
    target = save_tuned(tmp_path / "tuned", folder, changed.items())
    written = load_file(target / "model.safetensors")
    assert set(written) == set(stored)
    for name, value in written.items():
        expected = torch.full((80, 48), 3.0) if name.endswith(UP[6:]) else stored[name]
        assert value.dtype == stored[name].dtype and torch.equal(value, expected), name
    assert (target / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert (target / "processor_config.json").exists()


def test_tied_head_that_is_stored_follows_the_embedding(folder, tmp_path):
    values = dict(random_decoder(CONFIG).state_dict())
    for path in folder.glob("model*"):
        path.unlink()
    head = {"lm_head.weight": values["model.embed_tokens.weight"].clone()}
    save_file(values | head, folder / "model.safetensors")
    embedding = values["model.embed_tokens.weight"] * 2
    tuned = save_tuned(tmp_path / "tuned", folder, [("model.embed_tokens.weight", embedding)])
    written = load_file(tuned / "model.safetensors")
    assert torch.equal(written["lm_head.weight"], embedding)


def test_files_are_what_the_safetensors_library_reads_and_aligned(tmp_path):
    tensors = {
        "half": torch.randn(3, 5).half(),
        "wide": torch.randn(7, dtype=torch.float64),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
    }
    names = {"half": "F16", "wide": "F64", "scalar": "F32", "empty": "F32"}
    writer = ShardWriter(tmp_path, [(n, names[n], tuple(t.shape)) for n, t in tensors.items()])
    for name in reversed(tensors):
        writer.put(name, tensors[name])
    writer.close()
    read = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    for each in read_header(tmp_path / "model.safetensors").values():
        assert each.start % each.item_bytes == 0
        with TensorReader() as reader:
            assert torch.equal(reader.whole(each), tensors[each.name])


def test_full_disk_is_told_before_a_byte_is_written(tmp_path, monkeypatch):
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: usage(10, 10, 10**6))
    with pytest.raises(JobError, match=r"needs .*MiB.*free") as caught:
        save_folder(tmp_path / "model", CONFIG, random_decoder(CONFIG).state_dict().items())
    assert caught.value.code == "environment/disk" and str(tmp_path) in str(caught.value)
    assert os.listdir(tmp_path) == []


SAVE = """
import sys, torch
from pathlib import Path
from phalanx.engines.process import PeakMemory, resident_bytes
from phalanx.models.stored_write import ShardWriter
rows, count = 2048, 40
planned = [(f"t{at}", "BF16", (rows, 2048)) for at in range(count)]
memory = PeakMemory(torch.device("cpu"), resident_bytes())
writer = ShardWriter(Path(sys.argv[1]), planned, max_shard_bytes=50e6)
for name, _, shape in planned:
    writer.put(name, torch.ones(shape))
writer.close()
print(memory.peak_bytes())
"""


def test_writing_takes_the_memory_of_one_tensor(tmp_path):
    """40 matrices of 8 MiB, from 16 MiB each in float32, in 8 files."""
    command = [sys.executable, "-c", SAVE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert int(done.stdout) < 2.5 * 16 * 2**20 + 16 * 2**20, done.stdout
    assert len(list(tmp_path.glob("*.safetensors"))) == 8
