"""Every family equals transformers; what families have of their own follows its laws.

Tiny models of `families.tiny_config`: head sizes of their own, windows shorter than the rows,
several documents in a row.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from phalanx.errors import JobError, PlanError
from phalanx.models.cache import KvCache
from phalanx.models.config import parse_config, to_huggingface
from phalanx.models.decoder import Decoder, Part
from phalanx.models.hf import load_decoder, save_folder
from phalanx.models.lora import inject, merged_tensors
from phalanx.models.parameters import initial_values, load_parameters
from phalanx.models.spec import LoraSpec, canonical_tensors, kv_token_bytes, lora_tensors
from phalanx.ops import attention
from phalanx.ops.loss import counted_cross_entropy
from tests.models.cases import random_decoder, random_tokens, transformers_twin
from tests.models.families import FAMILIES, TABLES, tiny_config

every_family = pytest.mark.parametrize("family", FAMILIES)


@every_family
@pytest.mark.parametrize("count", [1, 23, 301])
@torch.no_grad()
def test_logits_equal_transformers(family, count):
    decoder = random_decoder(tiny_config(family))
    tokens = random_tokens(decoder.config, count)
    ours = decoder.logits(decoder(tokens))
    theirs = transformers_twin(decoder)(tokens[None]).logits[0]
    assert theirs.abs().max() > 1.0
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@every_family
@torch.no_grad()
def test_bfloat16_logits_are_within_the_error_of_transformers(family):
    """Mean distance from float32 of the same rounded weights; top tokens within a point."""
    rounded = random_decoder(tiny_config(family, "bfloat16"))
    wide = Decoder(tiny_config(family))
    load_parameters(wide, ((name, value.float()) for name, value in rounded.state_dict().items()))
    tokens = random_tokens(wide.config, 300)
    exact = wide.logits(wide(tokens))
    ours = rounded.logits(rounded(tokens)).float()
    theirs = transformers_twin(rounded)(tokens[None]).logits[0].float()
    errors = [(logits - exact).abs().mean() for logits in (ours, theirs)]
    assert errors[0] <= errors[1]
    agree = [(logits.argmax(-1) == exact.argmax(-1)).sum() for logits in (ours, theirs)]
    assert agree[0] >= agree[1] - 3 - 2 * (300 - agree[1]) ** 0.5  # a point, and chance


@every_family
@torch.no_grad()
def test_saved_folder_has_the_logits_of_the_decoder_in_transformers(family, tmp_path):
    """Through config.json and safetensors, as a user gets it; several documents in our row."""
    from transformers import AutoModelForCausalLM

    decoder = random_decoder(tiny_config(family))
    folder = save_folder(tmp_path / "model", decoder.config, decoder.state_dict().items())
    twin = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens, bounds = random_tokens(decoder.config, 70), [0, 1, 32, 70]
    ours = decoder.logits(decoder(tokens, document_starts=bounds[:-1]))
    theirs = torch.cat([twin(tokens[None, a:b]).logits[0] for a, b in pairwise(bounds)])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    again = load_decoder(folder)
    assert again.config == decoder.config
    assert torch.equal(again.logits(again(tokens, document_starts=bounds[:-1])), ours)


@every_family
def test_loss_gradients_equal_transformers_in_float64(family):
    """All parameters; transformers computes RoPE and norms in float32, which bounds it."""
    decoder = random_decoder(tiny_config(family, "float64"))
    twin, tokens = transformers_twin(decoder), random_tokens(decoder.config, 40)
    counted, targets = torch.arange(3, 39), tokens[4:40]
    counted_cross_entropy(
        decoder(tokens), decoder.head_weight, counted, targets,
        num_counted_global=77, soft_cap=decoder.config.logit_soft_cap,
    ).backward()  # fmt: skip
    logits = twin(tokens[None]).logits[0, counted]
    (F.cross_entropy(logits, targets, reduction="sum") / 77).backward()
    reference = dict(twin.named_parameters())
    for name, parameter in decoder.named_parameters():
        if not parameter.requires_grad:
            assert name.endswith("layer_scalar") and parameter.grad is None
            continue
        expected = reference[name].grad
        error = (parameter.grad - expected).norm() / expected.norm()
        assert error < 1e-5, (name, error)


@every_family
def test_packed_documents_equal_separate_ones_with_gradients(family):
    decoder = random_decoder(tiny_config(family, "float64"))
    tokens, bounds = random_tokens(decoder.config, 60), [0, 1, 11, 60]
    packed = decoder(tokens, document_starts=bounds[:-1])
    separate = torch.cat([decoder(tokens[a:b]) for a, b in pairwise(bounds)])
    torch.testing.assert_close(packed, separate, rtol=1e-11, atol=1e-11)
    trained = [p for p in decoder.parameters() if p.requires_grad]
    weight_SD = torch.randn_like(packed)
    grads = (torch.autograd.grad((x * weight_SD).sum(), trained, allow_unused=True)
             for x in (packed, separate))  # fmt: skip
    for mine, theirs in zip(*grads):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@every_family
@torch.no_grad()
def test_cached_steps_equal_one_pass(family):
    """Chunks of awkward sizes, across the window and across query blocks."""
    decoder = random_decoder(tiny_config(family, "float64"))
    tokens, cache = random_tokens(decoder.config, 310), KvCache(decoder.config, capacity=2)
    bounds = [0, 9, 10, 17, 150, 151, 309, 310]
    steps = [decoder(tokens[a:b], caches=[cache]) for a, b in pairwise(bounds)]
    torch.testing.assert_close(torch.cat(steps), decoder(tokens), rtol=1e-10, atol=1e-10)


@every_family
@torch.no_grad()
def test_sequences_decoded_together_equal_each_alone(family):
    decoder = random_decoder(tiny_config(family, "float64"))
    sequences = [random_tokens(decoder.config, n, seed=n) for n in (3, 12, 31)]
    caches = [KvCache(decoder.config) for _ in sequences]
    decoder(torch.cat([s[:-2] for s in sequences]), None, (0, 1, 11), caches)
    together = decoder(torch.cat([s[-2:] for s in sequences]), None, (0, 2, 4), caches)
    alone = torch.cat([decoder(s)[-2:] for s in sequences])
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)


@every_family
def test_recomputed_layers_give_the_same_gradients(family):
    """Layers that use keys, values and embeddings which others made included."""
    decoder = random_decoder(tiny_config(family, "float64"))
    tokens = random_tokens(decoder.config, 40)
    trained = [p for p in decoder.parameters() if p.requires_grad and p is not decoder.head_weight]

    def gradients():
        loss = decoder(tokens, None, (0, 7)).square().sum()
        return torch.autograd.grad(loss, trained)

    plain = gradients()
    for layer in decoder.model.layers.values():
        forward = layer.forward
        layer.forward = lambda *args, f=forward: checkpoint(f, *args, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients()))


@every_family
def test_state_dict_is_the_set_of_canonical_tensors_which_fill_it(family):
    config = tiny_config(family)
    specs, decoder = canonical_tensors(config), Decoder(config)
    state = decoder.state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        name: spec.shape for name, spec in specs.items()
    }
    load_parameters(decoder, initial_values(0, specs.values()))
    for name, parameter in decoder.named_parameters():
        assert parameter.requires_grad == specs[name].is_trained
        if parameter.dim() == 1:  # an identity, in whichever way norms are stored
            is_plain = config.norm_offset == 0.0
            assert torch.equal(parameter.detach(), torch.full_like(parameter, float(is_plain)))


@every_family
def test_tensors_equal_those_of_transformers(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = tiny_config(family)
    table = to_huggingface(config)
    table.pop("architectures")
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(AutoConfig.for_model(**table))
    theirs = {name: tuple(value.shape) for name, value in twin.named_parameters()}
    stored = {n: tuple(b.shape) for n, b in twin.named_buffers() if n in twin.state_dict()}
    specs = canonical_tensors(config)
    assert theirs == {n: spec.shape for n, spec in specs.items() if spec.is_trained}
    assert stored == {n: spec.shape for n, spec in specs.items() if not spec.is_trained}


@torch.no_grad()
def test_sharing_layers_add_nothing_to_the_cache():
    """In the E models' shape, half of the layers use keys and values of the other half."""
    config = tiny_config("gemma4_ple")
    decoder, cache = random_decoder(config), KvCache(config, capacity=8)
    decoder(random_tokens(config, 5), caches=[cache])
    assert sorted(cache._keys) == sorted(cache._values) == [0, 1, 2]
    held = sum(t.nbytes for store in (cache._keys, cache._values) for t in store.values())
    assert held == 8 * kv_token_bytes(config)


@pytest.mark.parametrize("layers", [range(3), range(1, 6), range(3, 6)])
def test_stages_that_need_what_others_hold_are_refused(layers):
    with pytest.raises(PlanError, match="stage"):
        config = tiny_config("gemma4_ple")
        Decoder(config, parts=[Part.of(config, layers)], device="meta")


def test_stages_of_a_family_with_an_untied_head_compose():
    whole = random_decoder(tiny_config("llama3"))
    rows = tokens = random_tokens(whole.config, 33)
    held: set[str] = set()
    with torch.no_grad():
        for part in (range(1), range(1, 3)):
            stage = Decoder(whole.config, parts=[Part.of(whole.config, part)])
            load_parameters(stage, whole.state_dict().items())
            rows = stage(rows, None, (0, 5))
            assert held.isdisjoint(stage.state_dict())
            held |= set(stage.state_dict())
        assert torch.equal(rows, whole(tokens, None, (0, 5)))
    assert held == set(whole.state_dict())


def test_experts_are_counted_but_not_computed():
    table = TABLES["gemma4"] | {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24,
    }  # fmt: skip
    config = parse_config(table)
    with pytest.raises(JobError, match="experts = 4") as caught:
        Decoder(config, device="meta")
    assert caught.value.code == "model/unknown"
    from transformers import AutoConfig, AutoModelForCausalLM

    written = to_huggingface(config)
    written.pop("architectures")
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(AutoConfig.for_model(**written))
    assert {name: tuple(value.shape) for name, value in twin.state_dict().items()} == {
        name: spec.shape for name, spec in canonical_tensors(config).items()
    } | {"lm_head.weight": (config.vocab_size, config.hidden_size)}


@every_family
def test_a_step_reads_nothing_back_from_its_device(family):
    """Meta tensors have no values: whatever asked for one or made a tensor elsewhere would fail."""
    decoder = Decoder(tiny_config(family, "bfloat16"), device="meta")
    tokens = torch.zeros(33, dtype=torch.int64, device="meta")
    hidden = decoder(tokens, document_starts=(0, 4, 20))
    hidden.sum().backward()
    for name, parameter in decoder.named_parameters():
        reached = parameter.requires_grad and name != "lm_head.weight"
        assert (parameter.grad is not None) == reached
    with torch.no_grad():
        caches = [KvCache(decoder.config, device="meta") for _ in range(2)]
        decoder(tokens[:9], document_starts=(0, 4), caches=caches)
        assert decoder(tokens[:2], document_starts=(0, 1), caches=caches).shape == hidden[:2].shape


@pytest.mark.parametrize(
    ("channels", "dtype", "has_kernel"),
    [
        (256, torch.bfloat16, True),
        (128, torch.float16, True),
        (512, torch.bfloat16, False),  # Gemma 4's full layers
        (12, torch.bfloat16, False),
        (128, torch.float32, False),
    ],
)
def test_heads_that_flash_attention_is_not_compiled_for_take_the_blocked_form(
    channels, dtype, has_kernel
):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q_SHC = torch.empty(3, 2, channels, dtype=dtype, device="cuda")
        assert attention._has_varlen_kernel(q_SHC) == has_kernel


def multimodal_model(family: str):
    """A tiny multimodal model around the family's text model, as transformers makes it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    towers = {"vision_config": TOWERS[family]}
    if family == "gemma4":
        towers["audio_config"] = None
    config = AutoConfig.for_model(family, text_config=TABLES[family], **towers)
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config).eval()


TOWERS = {
    "gemma3": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    },
    "gemma4": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", TOWERS)
@torch.no_grad()
def test_text_model_of_a_multimodal_folder_equals_transformers(family, tmp_path):
    twin = multimodal_model(family)
    twin.save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path)
    assert decoder.config == tiny_config(family)
    tokens = random_tokens(decoder.config, 40)
    theirs = twin(input_ids=tokens[None]).logits[0]
    torch.testing.assert_close(decoder.logits(decoder(tokens)), theirs, rtol=0, atol=1e-4)


@every_family
@torch.no_grad()
def test_merged_weights_equal_adapters(family):
    """Every matrix that a layer has, per-layer embeddings' included; the scale is not 1. Where
    values are keys, an adapter of the keys changes both."""
    config = tiny_config(family, "float64")
    lora = LoraSpec(rank=3, alpha=5, targets=("*",))
    decoder = random_decoder(config)
    base = {name: value.clone() for name, value in decoder.state_dict().items()}
    inject(decoder, lora, dtype="float64")
    adapters = {n: p for n, p in decoder.named_parameters() if ".lora_" in n}
    assert set(adapters) == set(lora_tensors(config, lora))
    generator = torch.Generator().manual_seed(3)
    for parameter in adapters.values():
        parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    merged = Decoder(config)
    load_parameters(merged, merged_tensors(base.items(), adapters, lora))
    tokens = random_tokens(config, 30)
    torch.testing.assert_close(decoder.eval()(tokens), merged(tokens), rtol=0, atol=2e-5)
    plain = Decoder(config)
    load_parameters(plain, base.items())
    assert (plain(tokens) - merged(tokens)).abs().max() > 1e-2
