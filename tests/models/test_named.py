"""Models by name, without weights: presets, folders, config files."""

import json

import pytest

from phalanx.errors import JobError
from phalanx.models.named import named_model, preset_names
from phalanx.models.spec import num_params

# billions of parameters as their makers publish them
PUBLISHED = {
    "gemma-3-270m": 0.268, "gemma-4-12b": 11.91, "gemma-4-31b": 30.70, "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55, "llama-3.1-405b": 405.85, "qwen3-8b": 8.19, "qwen3-32b": 32.76,
}  # fmt: skip


def test_every_preset_has_a_published_size():
    assert preset_names() == sorted(PUBLISHED)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_preset_has_the_parameters_that_are_published(name):
    found = named_model(name)
    assert num_params(found.config) / 1e9 == pytest.approx(PUBLISHED[name], abs=0.006)
    assert found.name == name and found.source.startswith("preset: ")


@pytest.mark.parametrize(
    "name", ["google/gemma-4-31b", "Google/Gemma-4-31B-it", "GEMMA-4-31B", "gemma-4-31b"]
)
def test_names_of_a_preset_whatever_their_capitals(name):
    assert named_model(name).name == "gemma-4-31b"


def test_a_folder_and_a_file_come_before_presets(tmp_path, monkeypatch):
    from phalanx.models.config import small_config, to_huggingface

    monkeypatch.chdir(tmp_path)
    config = small_config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2,
        num_kv_heads=1, head_dim=8,
    )  # fmt: skip
    folder = tmp_path / "gemma-4-31b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_huggingface(config)))
    (tmp_path / "sizes.json").write_text(json.dumps(to_huggingface(config)))
    for name in ("gemma-4-31b", "gemma-4-31b/config.json", "sizes.json"):
        found = named_model(name)
        assert found.config == config and found.tokenizer_folder is None
    (folder / "tokenizer.json").write_text("{}")
    assert str(named_model("gemma-4-31b").tokenizer_folder) == "gemma-4-31b"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gemma-4-32b", "gemma-4-31b"),
        ("lama-3.1-8b", "llama-3.1-8b"),
        ("", "qwen3-8b"),
        ("./nowhere", "num_hidden_layers"),
        ("a" * 5000, "hidden_size"),
        ("x\0y", "hidden_size"),
    ],
)
def test_unknown_names_show_the_nearest_and_what_a_config_needs(name, says):
    with pytest.raises(JobError) as raised:
        named_model(name)
    assert raised.value.code == "job/not-found" and says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_name_of_the_hub_that_is_not_here_shows_presets(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(JobError) as raised:
        named_model("google/gemma-4-32b")
    assert "offline" in str(raised.value) and "google/gemma-4-31b" in raised.value.legal


@pytest.mark.parametrize("content", ["{", "[1]", "\xff", '{"model_type": "nobody"}', "{}"])
def test_damaged_configs_are_refused(tmp_path, content):
    path = tmp_path / "sizes.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(JobError):
        named_model(str(path))
