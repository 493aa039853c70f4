"""Counts and shapes without tensors equal transformers' own, on the meta device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from phalanx.errors import JobError
from phalanx.models.config import to_huggingface
from phalanx.models.spec import (
    LoraSpec,
    canonical_tensors,
    lora_targets,
    lora_tensors,
    num_params,
    small_config,
    weight_bytes,
)
from tests.models.cases import CONFIGS

# Published sizes: Gemma 3 report, arXiv 2503.19786, table 1 (embedding and the rest, in millions)
# for the 1B; google/gemma-3-270m's card says 170 M embedding and 100 M transformer parameters.
GEMMA3_1B = small_config(
    vocab_size=262144,
    hidden_size=1152,
    intermediate_size=6912,
    num_layers=26,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
)
GEMMA3_270M = small_config(
    vocab_size=262144,
    hidden_size=640,
    intermediate_size=2048,
    num_layers=18,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
)
ALL = CONFIGS | {"gemma3_1b": GEMMA3_1B, "gemma3_270m": GEMMA3_270M}


@pytest.mark.parametrize("name", ALL)
def test_tensors_equal_those_of_transformers(name):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = ALL[name]
    table = to_huggingface(config)
    table.pop("architectures")
    with torch.device("meta"):
        twin = Gemma3ForCausalLM(Gemma3TextConfig(**table))
    theirs = {n: tuple(p.shape) for n, p in twin.named_parameters()}  # tied: listed once
    assert theirs == {spec.name: spec.shape for spec in canonical_tensors(config).values()}
    assert num_params(config) == sum(p.numel() for p in twin.parameters())
    itemsize = {"float32": 4, "bfloat16": 2}[config.dtype]
    assert weight_bytes(config) == itemsize * num_params(config)


def test_published_sizes():
    embedding = GEMMA3_1B.vocab_size * GEMMA3_1B.hidden_size
    assert round(embedding / 1e6) == 302
    assert round((num_params(GEMMA3_1B) - embedding) / 1e6) == 698
    assert round((num_params(GEMMA3_270M) - 262144 * 640) / 1e6) == 100


def test_adapters_equal_those_of_peft():
    from peft import LoraConfig, get_peft_model
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = CONFIGS["grouped_queries"]
    table = to_huggingface(config)
    table.pop("architectures")
    lora = LoraSpec(rank=3, alpha=5, targets=("q_proj", "v_proj", "down_proj"))
    twin = get_peft_model(
        Gemma3ForCausalLM(Gemma3TextConfig(**table)),
        LoraConfig(r=3, lora_alpha=5, target_modules=list(lora.targets)),
    )
    theirs = {
        name.removeprefix("base_model.model.").replace(".default", ""): tuple(parameter.shape)
        for name, parameter in twin.named_parameters()
        if parameter.requires_grad
    }
    assert theirs == {spec.name: spec.shape for spec in lora_tensors(config, lora).values()}


def test_fresh_adapters_vary_as_those_of_peft():
    """PEFT draws A uniformly in +-1/sqrt(in), of variance 1 / (3 in)."""
    spec = lora_tensors(GEMMA3_270M, LoraSpec(rank=2, alpha=2))
    first = spec["model.layers.0.self_attn.o_proj.lora_A.weight"]
    assert first.init_std**2 == pytest.approx(1 / (3 * 1024))
    assert spec["model.layers.0.self_attn.o_proj.lora_B.weight"].init_std == 0.0


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (("q_proj",), 4),
        (("self_attn.q_proj",), 4),
        (("n.q_proj",), None),
        (("model.layers.[01].*",), 14),
        (("mlp.*", "q_proj"), None),
        (("*.mlp.*", "q_proj"), 16),
    ],
)
def test_targets_match_ends_of_names_and_whole_patterns(targets, count):
    config, lora = CONFIGS["grouped_queries"], LoraSpec(rank=1, alpha=1, targets=targets)
    if count is None:
        with pytest.raises(JobError, match="matches no matrix"):
            lora_targets(config, lora)
    else:
        assert len(lora_targets(config, lora)) == count


def test_misspelt_target_names_the_nearest():
    with pytest.raises(JobError, match="q_proj") as caught:
        lora_targets(CONFIGS["grouped_queries"], LoraSpec(rank=1, alpha=1, targets=("q_prj",)))
    assert caught.value.code == "job/bad-value"


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"dropout": 1.0}])
def test_illegal_adapter_settings_are_refused(wrong):
    with pytest.raises(JobError, match="lora"):
        LoraSpec(**({"rank": 4, "alpha": 8} | wrong))


def test_specs_need_no_torch():
    code = (
        "import sys; import phalanx.models.spec, phalanx.models.operators, phalanx.models.folders;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
