"""Folders of every family: transformers loads ours with equal logits, and we load its own."""

from __future__ import annotations

import json

import pytest
import torch

from phalanx.models.config import to_huggingface
from phalanx.models.decoder import Decoder
from phalanx.models.hf import load_decoder, read_tensors, save_folder, save_tuned
from phalanx.models.lora import inject
from phalanx.models.parameters import initial_values, load_parameters
from phalanx.models.peft_folder import save_adapter
from phalanx.models.spec import LoraSpec, canonical_tensors, lora_tensors
from phalanx.models.weight_names import model_weights
from tests.models.families import FAMILIES, tiny_config

MATRICES = ("gate_proj", "down_proj", "q_proj", "o_proj")


def values(family: str) -> dict[str, torch.Tensor]:
    """Random weights whose norms are not the identity."""
    drawn = initial_values(5, canonical_tensors(tiny_config(family)).values())
    return {
        name: value * 4 if value.dim() > 1 else value + torch.linspace(0.0, 0.3, len(value))
        for name, value in drawn
    }


def tokens(family: str, count: int = 23) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, tiny_config(family).vocab_size, (count,), generator=generator)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_folder_gives_equal_logits_in_transformers(tmp_path, family):
    from transformers import AutoModelForCausalLM

    config = tiny_config(family)
    folder = save_folder(tmp_path / "m", config, values(family).items(), max_shard_bytes=40_000)
    theirs, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    ours, ids = load_decoder(folder), tokens(family)
    with torch.no_grad():
        expected = theirs.eval()(ids[None]).logits[0]
        torch.testing.assert_close(ours.logits(ours(ids)), expected, rtol=0, atol=1e-4)
    theirs.save_pretrained(tmp_path / "again", max_shard_size="40KB")
    for name, value in read_tensors(tmp_path / "again"):
        assert torch.equal(value, ours.state_dict()[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_gives_equal_logits_in_peft_and_merged(tmp_path, family):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from phalanx.models.lora import merged_tensors

    config, lora = tiny_config(family), LoraSpec(rank=3, alpha=7, targets=MATRICES)
    base = save_folder(tmp_path / "base", config, values(family).items())
    drawn = dict(initial_values(1, lora_tensors(config, lora).values()))
    adapters = {name: v if "lora_A" in name else v + 0.02 for name, v in drawn.items()}
    folder = save_adapter(tmp_path / "adapter", config, lora, adapters.items())
    merged = save_tuned(
        tmp_path / "merged", base, merged_tensors(read_tensors(base), adapters, lora)
    )
    plain = AutoModelForCausalLM.from_pretrained(base)
    ids = tokens(family)
    with torch.no_grad():
        before = plain.eval()(ids[None]).logits[0]
        expected = PeftModel.from_pretrained(plain, folder).eval()(ids[None]).logits[0]
        assert (expected - before).abs().max() > 1e-3
        ours = load_decoder(base)
        inject(ours, lora)
        load_parameters(ours, adapters.items(), strict=False)
        ours.eval()
        torch.testing.assert_close(ours.logits(ours(ids)), expected, rtol=0, atol=1e-4)
        whole = load_decoder(merged)
        torch.testing.assert_close(whole.logits(whole(ids)), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_tuned_folder_keeps_names_shapes_dtypes_and_config(tmp_path, family):
    from phalanx.models.stored import stored_tensors

    config = tiny_config(family)
    base = save_folder(tmp_path / "base", config.with_dtype("bfloat16"), values(family).items())
    config_table = to_huggingface(config) | {"dtype": "bfloat16"}
    (base / "config.json").write_text(json.dumps(config_table, indent=3))
    trained = ((name, value * 2) for name, value in reversed(values(family).items()))
    tuned = save_tuned(tmp_path / "tuned", base, trained, max_shard_bytes=30_000)
    before, after = stored_tensors(base), stored_tensors(tuned)
    assert {n: (t.dtype, t.shape) for n, t in after.items()} == {
        n: (t.dtype, t.shape) for n, t in before.items()
    }
    assert (tuned / "config.json").read_bytes() == (base / "config.json").read_bytes()
    decoder = Decoder(config.with_dtype("bfloat16"))
    load_parameters(decoder, read_tensors(tuned))
    for name, value in decoder.state_dict().items():
        assert torch.equal(value, (values(family)[name] * 2).bfloat16()), name


def test_keys_that_no_layer_reads_may_be_stored_and_stay(tmp_path):
    from safetensors.torch import load_file, save_file

    family, config = "gemma4_ple", tiny_config("gemma4_ple")
    folder = save_folder(tmp_path / "m", config, values(family).items())
    expected = load_decoder(folder)(tokens(family))
    sharing = next(at for at in range(config.num_layers) if config.kv_source(at) != at)
    unused = f"model.layers.{sharing}.self_attn.k_proj.weight"
    stored = load_file(folder / "model.safetensors")
    save_file(stored | {unused: torch.ones(3, 5)}, folder / "model.safetensors", {"format": "pt"})
    assert torch.equal(load_decoder(folder)(tokens(family)), expected)
    model_weights(folder, config)
    tuned = save_tuned(tmp_path / "tuned", folder, {}.items())
    assert torch.equal(dict(read_tensors(tuned))[unused], torch.ones(3, 5))
