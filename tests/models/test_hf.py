"""Model folders: saved ones load in transformers with equal logits, bad ones say what is wrong."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.errors import JobError
from phalanx.models.hf import load_decoder, read_tensors, save_folder
from phalanx.models.spec import canonical_tensors
from phalanx.models.stored import INDEX, stored_tensors
from tests.models.cases import CONFIGS, random_decoder, random_tokens

CONFIG = CONFIGS["grouped_queries"]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("max_shard_bytes", [4e9, 20_000])
def test_saved_folder_gives_equal_logits_in_transformers(tmp_path, name, max_shard_bytes):
    from transformers import AutoModelForCausalLM

    decoder = random_decoder(CONFIGS[name])
    save_folder(
        tmp_path / "model", decoder.config, decoder.state_dict().items(),
        max_shard_bytes=max_shard_bytes,
    )  # fmt: skip
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert type(theirs).__name__ == "Gemma3ForCausalLM"
    tokens = random_tokens(decoder.config, 30)
    with torch.no_grad():
        ours = decoder.logits(decoder(tokens))
        torch.testing.assert_close(theirs(tokens[None]).logits[0], ours, rtol=0, atol=1e-4)
        again = load_decoder(tmp_path / "model")
        assert torch.equal(again.logits(again(tokens)), ours)


def test_folder_that_transformers_saved_loads_here(tmp_path):
    from tests.models.cases import transformers_twin

    decoder = random_decoder(CONFIG)
    transformers_twin(decoder).save_pretrained(tmp_path, max_shard_size="20KB")
    again, tokens = load_decoder(tmp_path), random_tokens(CONFIG, 12)
    assert again.config == CONFIG
    with torch.no_grad():
        assert torch.equal(again(tokens), decoder(tokens))


def test_shards_hold_each_tensor_once_below_the_limit(tmp_path):
    decoder = random_decoder(CONFIG)
    folder = save_folder(
        tmp_path / "model", CONFIG, reversed(decoder.state_dict().items()), max_shard_bytes=20_000
    )
    index = json.loads((folder / INDEX).read_text())
    assert set(index["weight_map"]) == set(canonical_tensors(CONFIG))
    shards = sorted(set(index["weight_map"].values()))
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors" and len(shards) > 3
    held = [name for shard in shards for name in load_file(folder / shard)]
    assert sorted(held) == sorted(canonical_tensors(CONFIG))
    for shard in shards:
        tensors = load_file(folder / shard)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 20_000
    assert index["metadata"]["total_size"] == sum(
        spec.num_bytes for spec in canonical_tensors(CONFIG).values()
    )


def test_tensors_are_read_by_name_and_stage(tmp_path):
    decoder = random_decoder(CONFIG)
    folder = save_folder(
        tmp_path / "model", CONFIG, decoder.state_dict().items(), max_shard_bytes=20_000
    )
    wanted = ["model.norm.weight", "model.layers.2.mlp.up_proj.weight"]
    assert sorted(name for name, _ in read_tensors(folder, wanted)) == sorted(wanted)
    stage = load_decoder(folder, layers=range(2, 4))
    assert all(torch.equal(v, decoder.state_dict()[k]) for k, v in stage.state_dict().items())
    with pytest.raises(JobError, match=r"layers\.2\.mlp\.up_proj") as caught:
        list(read_tensors(folder, ["model.layers.2.mlp.up_prj.weight"]))
    assert caught.value.code == "model/tensor"


def test_dtype_of_the_decoder_may_differ_from_the_folder(tmp_path):
    decoder = random_decoder(CONFIG)
    folder = save_folder(tmp_path / "model", CONFIG, decoder.state_dict().items())
    half = load_decoder(folder, dtype="bfloat16")
    for name, value in half.state_dict().items():
        assert torch.equal(value, decoder.state_dict()[name].bfloat16())


def test_companion_files_are_copied(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "generation_config.json").write_text('{"top_k": 3}')
    (source / "secrets.txt").write_text("no")
    folder = save_folder(
        tmp_path / "model", CONFIG, random_decoder(CONFIG).state_dict().items(), extras_from=source
    )
    assert json.loads((folder / "generation_config.json").read_text()) == {"top_k": 3}
    assert (folder / "tokenizer.json").exists() and not (folder / "secrets.txt").exists()


def dropped(tensors):
    tensors.pop("model.norm.weight")
    return list(tensors.items())


def renamed(tensors):
    tensors["model.layers.0.mlp.gate.weight"] = tensors.pop("model.layers.0.mlp.gate_proj.weight")
    return list(tensors.items())


def doubled(tensors):
    return [*tensors.items(), ("model.norm.weight", tensors["model.norm.weight"])]


def cut(tensors):
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    return list(tensors.items())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dropped, r"missing.*model\.norm"),
        (renamed, "gate_proj"),
        (doubled, "twice"),
        (cut, r"\(48,\)"),
    ],
)
def test_wrong_tensors_are_refused_and_leave_nothing(tmp_path, change, says):
    tensors = dict(random_decoder(CONFIG).state_dict())
    with pytest.raises(JobError, match=says) as caught:
        save_folder(tmp_path / "model", CONFIG, change(tensors))
    assert caught.value.code == "model/tensor"
    assert os.listdir(tmp_path) == []


def test_folder_without_weights_names_folders_with_them(tmp_path):
    (tmp_path / "a").mkdir()
    save_file({"x": torch.ones(1)}, tmp_path / "a" / "model.safetensors")
    with pytest.raises(JobError, match="no safetensors") as caught:
        stored_tensors(tmp_path)
    assert caught.value.code == "job/not-found"
    assert caught.value.legal == (str(tmp_path / "a"),)


def test_index_that_names_an_absent_shard_is_refused(tmp_path):
    folder = save_folder(
        tmp_path / "model", CONFIG, random_decoder(CONFIG).state_dict().items(),
        max_shard_bytes=20_000,
    )  # fmt: skip
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(JobError, match=shard.name) as caught:
        load_decoder(folder)
    assert caught.value.code == "job/not-found"


def test_damaged_shard_is_named(tmp_path):
    folder = save_folder(tmp_path / "model", CONFIG, random_decoder(CONFIG).state_dict().items())
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(JobError, match=r"model\.safetensors") as caught:
        load_decoder(folder)
    assert caught.value.code == "model/tensor"
