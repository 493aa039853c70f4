"""Adapters that cannot be served are refused, and the error names what is wrong."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.engines.serve.adapters import AdapterSlots
from phalanx.errors import JobError
from phalanx.models.peft_folder import save_adapter
from phalanx.models.spec import LoraSpec
from tests.engines.test_serve_adapters import adapter
from tests.models.families import tiny_config

WRONG = {
    "rank": (LoraSpec(rank=9, alpha=1.0), "", None, r"rank = 9: must be at most 8"),
    "shape": (
        LoraSpec(rank=4, alpha=1.0),
        "model.layers.0.mlp.up_proj.lora_B.weight",
        torch.zeros(81, 4),
        r"layers\.0\.mlp\.up_proj\.lora_B\.weight = \(81, 4\): must have the shape \(80, 4\)",
    ),
    "layer": (
        LoraSpec(rank=4, alpha=1.0),
        "model.layers.7.mlp.up_proj.lora_A.weight",
        torch.zeros(4, 48),
        r"layers\.7\.mlp\.up_proj\.lora_A\.weight: adapts no matrix of the model",
    ),
    "head": (
        LoraSpec(rank=4, alpha=1.0),
        "lm_head.lora_A.weight",
        torch.zeros(4, 48),
        r"lm_head\.lora_A\.weight: adapts no matrix",
    ),
    "infinite": (
        LoraSpec(rank=4, alpha=1.0),
        "model.layers.2.mlp.down_proj.lora_A.weight",
        torch.full((4, 80), torch.inf),
        r"layers\.2\.mlp\.down_proj: holds values that are not finite",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_adapter_that_does_not_fit_is_refused_by_the_name_of_its_tensor(case):
    config = tiny_config("gemma3")
    lora, name, value, words = WRONG[case]
    tensors = adapter(config, lora, 1) | ({name: value} if name else {})
    slots = AdapterSlots(config, 2, 8, torch.float32)
    with pytest.raises(JobError, match=words) as caught:
        slots.put("wrong", lora, tensors)
    assert caught.value.code == "serve/adapter"
    assert not slots.versions


def test_an_adapter_of_another_base_or_without_files_is_refused(tmp_path):
    other, config = tiny_config("llama3"), tiny_config("gemma3")
    lora = LoraSpec(rank=4, alpha=1.0)
    save_adapter(tmp_path / "other", other, lora, adapter(other, lora, 1).items())
    save_adapter(tmp_path / "cut", config, lora, adapter(config, lora, 1).items())
    weights = tmp_path / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    (tmp_path / "empty").mkdir()
    slots = AdapterSlots(config, 2, 8, torch.float32)
    for folder, words in (
        ("other", r"q_proj\.lora_[AB]\.weight = .* must have the shape"),
        ("cut", "truncated"),
        ("empty", "has no adapter_config.json"),
        ("nowhere", "has no adapter_config.json"),
    ):
        with pytest.raises(JobError, match=words) as caught:
            slots.load("wrong", tmp_path / folder)
        assert caught.value.code == "serve/adapter"


def test_quantised_factors_are_refused(tmp_path):
    config, lora = tiny_config("gemma3"), LoraSpec(rank=4, alpha=1.0, targets=("q_proj",))
    folder = save_adapter(tmp_path / "int8", config, lora, adapter(config, lora, 1).items())
    factors = {
        name: each.to(torch.int8)
        for name, each in load_file(folder / "adapter_model.safetensors").items()
    }
    save_file(factors, folder / "adapter_model.safetensors")
    with pytest.raises(JobError, match=r"lora_[AB]\.weight = I8: is a dtype"):
        AdapterSlots(config, 2, 8, torch.float32).load("int8", folder)


def test_names_are_checked():
    config, lora = tiny_config("gemma3"), LoraSpec(rank=4, alpha=1.0)
    slots = AdapterSlots(config, 2, 8, torch.float32)
    slots.put("tone", lora, adapter(config, lora, 1))
    for act, words in (
        (lambda: slots.acquire("tones"), "'tones': is not loaded; nearest legal values: tone"),
        (lambda: slots.unload("style"), "'style': is not loaded"),
        (lambda: slots.load("tone", "nowhere"), "is loaded already"),
        (lambda: slots.put("", lora, {}), "must have a name"),
    ):
        with pytest.raises(JobError, match=words):
            act()
