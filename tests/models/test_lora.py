"""Adapters: merged equals adapted, folders load in PEFT and back, the base stays frozen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.errors import JobError
from phalanx.models.lora import (
    LoraLinear,
    adapter_tensors,
    inject,
    lora_values,
    merged_tensors,
)
from phalanx.models.parameters import load_parameters
from phalanx.models.spec import LoraSpec, lora_targets, lora_tensors
from phalanx.ops.dropout import DropoutKey, keyed_dropout
from tests.models.cases import CONFIGS, random_decoder, random_tokens
from tests.models.families import FAMILIES, tiny_config
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


def kinds_of(family: str) -> list[str]:
    """Last names of the matrices that an adapter may extend."""
    targets = lora_targets(tiny_config(family), replace(LORA, targets=("*",)))
    return list(dict.fromkeys(spec.name.split(".")[-2] for spec in targets))


KINDS = [(family, kind) for family in FAMILIES for kind in kinds_of(family)]


@pytest.mark.parametrize(("family", "kind"), KINDS, ids="-".join)
def test_an_adapter_on_any_kind_of_matrix_equals_its_merge(family, kind):
    config, lora = tiny_config(family, "float64"), replace(LORA, targets=(kind,))
    adapted, plain = adapted_decoder(lora, config, "float64"), random_decoder(config)
    tokens, adapters = random_tokens(config, 12), adapter_tensors(adapted)
    weights = dict(plain.state_dict())
    for module in {name.rsplit(".lora_", 1)[0] for name in adapters}:
        update = adapters[f"{module}.lora_B.weight"] @ adapters[f"{module}.lora_A.weight"]
        weights[f"{module}.weight"] = weights[f"{module}.weight"] + lora.alpha / lora.rank * update
    with torch.no_grad():
        expected = torch.func.functional_call(plain, weights, (tokens,))
        found = adapted(tokens)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert (found - plain(tokens)).abs().max() > 1e-4


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


def test_gradients_with_dropout_are_those_of_the_dropped_input():
    """The mask is drawn again in the backward pass, also for a part of the inputs."""
    draw = torch.Generator().manual_seed(2)
    x_SI, weight_OI, down_RI, up_OR = (
        torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()
        for shape in ((7, 6), (5, 6), (3, 6), (5, 3))
    )
    base = torch.nn.Linear(6, 5, bias=False, dtype=torch.float64).requires_grad_(False)
    layer = LoraLinear(base, "m", replace(LORA, dropout=0.4), torch.float64).train()
    key = DropoutKey(1, 2, torch.arange(50, 57))
    out = layer.product(x_SI, weight_OI.detach(), down_RI, up_OR, key, first_channel=6)
    kept = keyed_dropout(x_SI, 0.4, key, "m", first_channel=6)
    plain = x_SI @ weight_OI.detach().t() + LORA.scale * (kept @ down_RI.t()) @ up_OR.t()
    torch.testing.assert_close(out, plain, rtol=1e-12, atol=1e-12)
    weights = torch.randn(7, 5, generator=draw, dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad((out * weights).sum(), (x_SI, down_RI, up_OR)),
        torch.autograd.grad((plain * weights).sum(), (x_SI, down_RI, up_OR)),
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_a_part_of_the_channels_drops_as_the_whole_does():
    x_SD = torch.ones(9, 10, dtype=torch.float64)
    key = DropoutKey(3, 4, torch.arange(9))
    whole = keyed_dropout(x_SD, 0.5, key, "m")
    parts = [
        keyed_dropout(x_SD[:, a:b], 0.5, key, "m", first_channel=a) for a, b in ((0, 4), (4, 10))
    ]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_dropout_without_its_key_is_refused():
    decoder = adapted_decoder(replace(LORA, dropout=0.4)).train()
    with pytest.raises(JobError, match="dropout"):
        decoder(random_tokens(CONFIG, 5))


def test_stage_gets_only_the_adapters_of_its_layers():
    from phalanx.models.decoder import Decoder, Part

    stage = Decoder(CONFIG, device="meta", parts=[Part.of(CONFIG, range(1, 3))])
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
