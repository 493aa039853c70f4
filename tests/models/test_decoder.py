"""The decoder equals transformers, packed rows equal separate ones, cached steps equal one pass."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from phalanx.errors import JobError
from phalanx.models.cache import KvCache
from phalanx.models.decoder import Decoder, Part
from phalanx.models.parameters import load_parameters
from phalanx.models.spec import canonical_tensors
from phalanx.ops.loss import counted_cross_entropy
from tests.models.cases import CONFIGS, random_decoder, random_tokens, transformers_twin

every_config = pytest.mark.parametrize("name", CONFIGS)


@every_config
@pytest.mark.parametrize("count", [1, 23, 301])
def test_logits_equal_transformers(name, count):
    decoder = random_decoder(CONFIGS[name])
    tokens = random_tokens(decoder.config, count)
    with torch.no_grad():
        ours = decoder.logits(decoder(tokens))
        theirs = transformers_twin(decoder)(tokens[None]).logits[0]
    assert theirs.abs().max() > 1.0
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@every_config
def test_loss_gradients_equal_transformers_in_float64(name):
    """All parameters, head and embedding tied; transformers computes RoPE and norms in float32,
    which bounds the agreement."""
    decoder = random_decoder(CONFIGS[name].with_dtype("float64"))
    twin = transformers_twin(decoder)
    tokens = random_tokens(decoder.config, 40)
    counted, targets = torch.arange(3, 39), tokens[4:40]
    ours = counted_cross_entropy(
        decoder(tokens), decoder.head_weight, counted, targets,
        num_counted_global=77, soft_cap=decoder.config.logit_soft_cap,
    )  # fmt: skip
    logits = twin(tokens[None]).logits[0, counted]
    theirs = F.cross_entropy(logits, targets, reduction="sum") / 77
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    reference = dict(twin.named_parameters())
    for parameter_name, parameter in decoder.named_parameters():
        expected = reference[parameter_name].grad
        error = (parameter.grad - expected).norm() / expected.norm()
        assert error < 1e-5, (parameter_name, error)


@every_config
def test_packed_documents_equal_separate_sequences(name):
    decoder = random_decoder(CONFIGS[name].with_dtype("float64"))
    tokens = random_tokens(decoder.config, 200)
    bounds = [0, 1, 7, 8, 150, 200]
    with torch.no_grad():
        packed = decoder(tokens, document_starts=bounds[:-1])
        separate = torch.cat([decoder(tokens[a:b]) for a, b in pairwise(bounds)])
    torch.testing.assert_close(packed, separate, rtol=1e-12, atol=1e-12)


def test_packed_gradients_equal_separate_sequences():
    decoder = random_decoder(CONFIGS["grouped_queries"].with_dtype("float64"))
    tokens = random_tokens(decoder.config, 60)
    bounds = [0, 11, 60]
    packed = decoder(tokens, document_starts=bounds[:-1]).square().sum()
    separate = sum(decoder(tokens[a:b]).square().sum() for a, b in pairwise(bounds))
    parameters = list(decoder.parameters())
    for mine, theirs in zip(
        torch.autograd.grad(packed, parameters), torch.autograd.grad(separate, parameters)
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@every_config
def test_cached_steps_equal_one_pass(name):
    """Chunks of awkward sizes, across the window and across query blocks."""
    decoder = random_decoder(CONFIGS[name].with_dtype("float64"))
    tokens = random_tokens(decoder.config, 310)
    cache = KvCache(decoder.config, capacity=2)
    with torch.no_grad():
        whole = decoder(tokens)
        bounds = [0, 9, 10, 17, 150, 151, 309, 310]
        steps = [decoder(tokens[a:b], caches=[cache]) for a, b in pairwise(bounds)]
    assert cache.length == 310
    torch.testing.assert_close(torch.cat(steps), whole, rtol=1e-11, atol=1e-11)


def test_sequences_decoded_together_equal_each_alone():
    """One call, three caches of different length, one query row or several each."""
    decoder = random_decoder(CONFIGS["grouped_queries"].with_dtype("float64"))
    sequences = [random_tokens(decoder.config, n, seed=n) for n in (3, 12, 31)]
    caches = [KvCache(decoder.config) for _ in sequences]
    with torch.no_grad():
        decoder(torch.cat([s[:-2] for s in sequences]), None, (0, 1, 11), caches)
        together = decoder(torch.cat([s[-2:] for s in sequences]), None, (0, 2, 4), caches)
        alone = torch.cat([decoder(s)[-2:] for s in sequences])
    torch.testing.assert_close(together, alone, rtol=1e-11, atol=1e-11)


def test_truncated_cache_equals_one_that_never_saw_the_rest():
    decoder = random_decoder(CONFIGS["grouped_queries"].with_dtype("float64"))
    tokens, wrong = random_tokens(decoder.config, 20), random_tokens(decoder.config, 9, seed=9)
    cache = KvCache(decoder.config)
    with torch.no_grad():
        decoder(tokens[:12], caches=[cache])
        decoder(wrong, caches=[cache])
        cache.truncate(12)
        rest = decoder(tokens[12:], caches=[cache])
        whole = decoder(tokens)
    torch.testing.assert_close(rest, whole[12:], rtol=1e-11, atol=1e-11)
    with pytest.raises(JobError, match="truncate"):
        cache.truncate(21)


def test_cache_dtype_is_independent_of_the_weights():
    """Keys and values rounded to bfloat16 once: hidden states move by a few of its steps."""
    decoder = random_decoder(CONFIGS["grouped_queries"])
    tokens = random_tokens(decoder.config, 20)
    cache = KvCache(decoder.config, dtype=torch.bfloat16)
    with torch.no_grad():
        stepwise = torch.cat([decoder(t, caches=[cache]) for t in tokens.split(1)])
        whole = decoder(tokens)
    error = (stepwise - whole).norm() / whole.norm()
    assert 1e-5 < error < 2**-5


def test_parts_of_one_decoder_run_in_turn_equal_the_whole():
    whole = random_decoder(CONFIGS["grouped_queries"])
    config, tokens = whole.config, random_tokens(whole.config, 33)
    last = config.num_layers
    parts = [
        Part(range(1), True, False),
        Part(range(1, 3), False, False),
        Part(range(3, last), False, True),
    ]
    held = Decoder(config, parts=[parts[0], parts[2]])  # as a rank that a wave passes twice
    between = Decoder(config, parts=[parts[1]])
    assert set(held.model.layers) | set(between.model.layers) == set(map(str, range(last)))
    with torch.no_grad():
        for each in (held, between):
            load_parameters(each, whole.state_dict().items(), strict=False)
        rows = held(tokens, None, (0, 5), part=parts[0])
        rows = held(between(rows, None, (0, 5)), None, (0, 5), part=parts[2])
        torch.testing.assert_close(rows, whole(tokens, None, (0, 5)), rtol=0, atol=0)


def test_stages_composed_equal_the_whole_decoder():
    whole = random_decoder(CONFIGS["grouped_queries"])
    tokens = random_tokens(whole.config, 33)
    parts = [Part.of(whole.config, layers) for layers in (range(1), range(1, 3), range(3, 4))]
    stages = [Decoder(whole.config, parts=[part]) for part in parts]
    rows = tokens
    held = set()
    with torch.no_grad():
        for stage in stages:
            load_parameters(stage, whole.state_dict().items())
            rows = stage(rows, None, (0, 5))
            held |= set(stage.state_dict())
        assert torch.equal(rows, whole(tokens, None, (0, 5)))
    assert held == set(whole.state_dict())


@every_config
def test_state_dict_is_the_set_of_canonical_tensors(name):
    config = CONFIGS[name]
    specs = canonical_tensors(config)
    state = Decoder(config, device="meta").state_dict()
    assert list(sorted(state)) == sorted(specs)
    assert all(tuple(state[key].shape) == spec.shape for key, spec in specs.items())


def test_recomputed_layers_give_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    decoder = random_decoder(CONFIGS["grouped_queries"].with_dtype("float64"))
    tokens = random_tokens(decoder.config, 40)
    parameters = list(decoder.parameters())
    plain = torch.autograd.grad(decoder(tokens, None, (0, 7)).square().sum(), parameters)
    for layer in decoder.model.layers.values():
        forward = layer.forward
        layer.forward = lambda *args, f=forward: checkpoint(f, *args, use_reentrant=False)
    again = torch.autograd.grad(decoder(tokens, None, (0, 7)).square().sum(), parameters)
    assert all(torch.equal(a, b) for a, b in zip(plain, again))
