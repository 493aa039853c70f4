"""Adapters: merged equals adapted, folders load in PEFT and back, the base stays frozen."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from phalanx.errors import JobError
from phalanx.models.hf import load_decoder, read_tensors, save_folder
from phalanx.models.lora import (
    adapter_tensors,
    inject,
    load_adapter,
    lora_values,
    merged_tensors,
    save_adapter,
)
from phalanx.models.parameters import load_parameters
from phalanx.models.spec import LoraSpec, lora_tensors
from phalanx.ops.dropout import DropoutKey
from tests.models.cases import CONFIGS, random_decoder, random_tokens
from tests.ranks import run_ranks

CONFIG = CONFIGS["grouped_queries"]
LORA = LoraSpec(rank=3, alpha=7)  # alpha != rank


def adapted_decoder(lora: LoraSpec = LORA, config=CONFIG, dtype: str = "float32"):
    """A decoder with adapters whose B is not zero."""
    decoder = random_decoder(config)
    inject(decoder, lora, seed=4, dtype=dtype)
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return decoder.eval()


def test_fresh_adapters_change_nothing():
    decoder, tokens = random_decoder(CONFIG), random_tokens(CONFIG, 17)
    with torch.no_grad():
        before = decoder(tokens)
        names = inject(decoder, LORA)
        assert torch.equal(decoder(tokens), before)
    assert names == list(lora_tensors(CONFIG, LORA))


def test_merged_weights_equal_the_adapted_decoder():
    adapted = adapted_decoder(config=CONFIG.with_dtype("float64"), dtype="float64")
    plain = random_decoder(CONFIG.with_dtype("float64"))
    tokens = random_tokens(CONFIG, 40)
    merged = merged_tensors(plain.state_dict().items(), adapter_tensors(adapted), LORA)
    with torch.no_grad():
        before = plain(tokens)
        load_parameters(plain, merged)
        difference = (plain(tokens) - before).abs().max()
        torch.testing.assert_close(plain(tokens), adapted(tokens), rtol=0, atol=2e-4)
    assert difference > 0.5  # the merge itself is float32, so not to 1e-12


def test_merge_is_computed_in_float32_and_rounded_once():
    """With a bfloat16 base, W + scale B A must not be summed in bfloat16."""
    name = "model.layers.0.mlp.up_proj"
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(80, 48, generator=generator).bfloat16()
    a, b = torch.randn(3, 48, generator=generator), torch.randn(80, 3, generator=generator) * 0.01
    adapters = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    ((_, merged),) = merged_tensors([(f"{name}.weight", base)], adapters, LORA)
    exact = base.double() + (7 / 3) * (b.double() @ a.double())
    assert merged.dtype == torch.bfloat16
    assert torch.equal(merged, exact.float().bfloat16())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.lora_B.weight"), "partner"),
        (lambda t: t.update({"model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(1)}), "no mat"),
    ],
)
def test_adapters_that_do_not_fit_the_base_are_refused(change, says):
    tensors = adapter_tensors(adapted_decoder())
    change(tensors)
    with pytest.raises(JobError, match=says) as caught:
        list(merged_tensors(random_decoder(CONFIG).state_dict().items(), tensors, LORA))
    assert caught.value.code == "model/tensor"


def test_saved_adapter_gives_equal_logits_in_peft(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    save_folder(tmp_path / "base", CONFIG, random_decoder(CONFIG).state_dict().items())
    adapted, tokens = adapted_decoder(), random_tokens(CONFIG, 30)
    save_adapter(tmp_path / "adapter", adapter_tensors(adapted), LORA, base_model="somewhere/base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(
            adapted.logits(adapted(tokens)), theirs(tokens[None]).logits[0], rtol=0, atol=1e-4
        )


def test_adapter_saved_by_peft_gives_equal_logits_here(tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    save_folder(tmp_path / "base", CONFIG, random_decoder(CONFIG).state_dict().items())
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    options = LoraConfig(
        r=2, lora_alpha=5, target_modules=["o_proj", "gate_proj"], init_lora_weights=False
    )
    theirs = get_peft_model(base, options).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    lora, tensors = load_adapter(tmp_path / "adapter")
    assert (lora.rank, lora.alpha, len(tensors)) == (2, 5, 16)
    merged = merged_tensors(read_tensors(tmp_path / "base"), tensors, lora)
    save_folder(tmp_path / "merged", CONFIG, merged)
    decoder, tokens = load_decoder(tmp_path / "merged"), random_tokens(CONFIG, 30)
    with torch.no_grad():
        torch.testing.assert_close(
            decoder.logits(decoder(tokens)), theirs(tokens[None]).logits[0], rtol=0, atol=1e-4
        )


@pytest.mark.parametrize(
    "option", [{"peft_type": "IA3"}, {"use_dora": True}, {"use_rslora": True}, {"bias": "all"}]
)
def test_adapter_options_that_the_merge_would_ignore_are_refused(tmp_path, option):
    folder = save_adapter(tmp_path / "adapter", adapter_tensors(adapted_decoder()), LORA)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | option))
    with pytest.raises(JobError, match=next(iter(option))) as caught:
        load_adapter(folder)
    assert caught.value.code == "model/unknown"


def test_folder_without_adapter_is_not_found(tmp_path):
    with pytest.raises(JobError, match=r"adapter_config\.json") as caught:
        load_adapter(tmp_path)
    assert caught.value.code == "job/not-found"


@pytest.mark.parametrize("dtypes", [("float64", "float64"), ("bfloat16", "float32")])
def test_only_adapters_get_gradients_in_their_own_dtype(dtypes):
    config = CONFIG.with_dtype(dtypes[0])
    decoder = adapted_decoder(config=config, dtype=dtypes[1]).train()
    decoder(random_tokens(config, 9)).float().square().sum().backward()
    trained = {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}
    assert list(trained) == list(lora_tensors(config, LORA))
    assert all(grad.dtype == getattr(torch, dtypes[1]) and grad.any() for grad in trained.values())


def test_adapter_gradients_equal_those_of_the_plain_formula():
    """Fused sums against autograd through W + scale B A, in float64."""
    config = CONFIG.with_dtype("float64")
    adapted, plain = adapted_decoder(config=config, dtype="float64"), random_decoder(config)
    adapters = {n: t.clone().requires_grad_() for n, t in adapter_tensors(adapted).items()}
    weights = dict(plain.state_dict())
    for module in {name.rsplit(".lora_", 1)[0] for name in adapters}:
        a, b = adapters[f"{module}.lora_A.weight"], adapters[f"{module}.lora_B.weight"]
        weights[f"{module}.weight"] = weights[f"{module}.weight"] + LORA.scale * (b @ a)
    tokens = random_tokens(config, 21)
    expected = torch.func.functional_call(plain, weights, (tokens,)).square().sum()
    adapted(tokens).square().sum().backward()
    gradients = torch.autograd.grad(expected, list(adapters.values()))
    ours = dict(adapted.named_parameters())
    for name, gradient in zip(adapters, gradients):
        torch.testing.assert_close(ours[name].grad, gradient, rtol=1e-9, atol=1e-9)


def test_dropout_of_an_adapter_follows_tokens_not_their_order():
    """Documents swapped within the row, with their global token numbers: swapped outputs."""
    lora = replace(LORA, dropout=0.4)
    config = CONFIG.with_dtype("float64")
    decoder = adapted_decoder(lora, config, "float64").train()
    tokens, numbers = random_tokens(config, 20), torch.arange(100, 120)
    swap = torch.cat([torch.arange(8, 20), torch.arange(8)])
    with torch.no_grad():
        one = decoder(tokens, None, (0, 8), dropout=DropoutKey(1, 2, numbers))
        two = decoder(tokens[swap], None, (0, 12), dropout=DropoutKey(1, 2, numbers[swap]))
        three = decoder(tokens, None, (0, 8), dropout=DropoutKey(1, 3, numbers))
        torch.testing.assert_close(one[swap], two, rtol=1e-11, atol=1e-11)
        assert (one - three).abs().max() > 1e-3
        kept = decoder.eval()(tokens, None, (0, 8))
        assert torch.equal(kept, decoder(tokens, None, (0, 8), dropout=DropoutKey(1, 2, numbers)))


def test_dropout_without_its_key_is_refused():
    decoder = adapted_decoder(replace(LORA, dropout=0.4)).train()
    with pytest.raises(JobError, match="dropout"):
        decoder(random_tokens(CONFIG, 5))


def test_stage_gets_only_the_adapters_of_its_layers():
    from phalanx.models.decoder import Decoder

    stage = Decoder(CONFIG, device="meta", layers=range(1, 3))
    names = inject(stage, LORA)
    assert len(names) == 2 * 14 and all(".1." in n or ".2." in n for n in names)
    stage.to_empty(device="cpu")
    load_parameters(stage, lora_values(CONFIG, LORA, 0), strict=False)
    assert stage.model.layers["1"].mlp.up_proj.lora_A.weight.any()


def sharded_step(rank: int, world_size: int) -> list[torch.Tensor]:
    """Adapter gradients of a frozen bfloat16 base with float32 adapters under FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    decoder = adapted_decoder(config=CONFIG.with_dtype("bfloat16"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in decoder.model.layers.values():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(decoder, mesh=mesh, mp_policy=policy)
    decoder.train()
    decoder(random_tokens(CONFIG, 19)).float().square().sum().backward()
    return [p.grad.full_tensor() for p in decoder.parameters() if p.requires_grad]


@pytest.mark.dist
def test_sharded_adapters_get_the_gradients_of_one_process():
    decoder = adapted_decoder(config=CONFIG.with_dtype("bfloat16")).train()
    decoder(random_tokens(CONFIG, 19)).float().square().sum().backward()
    alone = [p.grad for p in decoder.parameters() if p.requires_grad]
    for gradients in run_ranks(sharded_step, 2):
        assert len(gradients) == len(alone)
        for mine, expected in zip(gradients, alone):
            # both ranks hold the same row, so the mean over ranks is the gradient itself
            torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)
