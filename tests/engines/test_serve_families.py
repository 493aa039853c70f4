"""The serving engine of every family gives the tokens of the training decoder, without a cache."""

from __future__ import annotations

import json

import pytest
import torch

from phalanx.engines.serve.engine import ServeEngine
from phalanx.engines.serve.kv import PagedKv
from phalanx.engines.serve.kv_room import KvLimits, sliding_bytes, token_bytes
from phalanx.engines.serve.model import LayerAdapters, PackedDecoder
from phalanx.engines.serve.settings import ServeSettings, require_servable
from phalanx.errors import JobError
from phalanx.models.config import parse_config
from phalanx.models.decoder import Decoder
from phalanx.models.spec import DecoderConfig, kv_token_bytes
from phalanx.ops import native
from phalanx.policies.serve.continuous import Continuous
from tests.engines.serve_cases import GREEDY, request
from tests.engines.test_serve_engine import run
from tests.models.cases import random_decoder, random_tokens
from tests.models.families import FAMILIES, TABLES, tiny_config

LENGTHS = (1, 7, 40, 65)
LIMITS = KvLimits(max_tokens=96, max_running=4, max_step_tokens=33)


def greedy(decoder: Decoder, prompt: list[int]) -> list[int]:
    """Continuation by whole forward passes; ties closer than rounding would make it ambiguous."""
    tokens = list(prompt)
    for _ in range(GREEDY.max_new):
        logits = decoder.logits(decoder(torch.tensor(tokens))[-1:])[0]
        best = logits.topk(2).values
        assert best[0] - best[1] > 1e-4
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def engine_of(decoder: Decoder, dtype: torch.dtype = torch.float32) -> ServeEngine:
    config: DecoderConfig = decoder.config
    model = PackedDecoder(config)
    model.update(decoder.state_dict().items())
    kv = PagedKv(config, LIMITS.max_running * LIMITS.max_tokens, LIMITS, dtype=dtype)
    return ServeEngine(model, kv, LIMITS, "tiny@0")


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_served_tokens_are_those_of_whole_forward_passes(family):
    """Prompts shorter and longer than a window and a block, in chunks, decoded together."""
    decoder = random_decoder(tiny_config(family), seed=4)
    prompts = [random_tokens(decoder.config, n, seed=n).tolist() for n in LENGTHS]
    engine = engine_of(decoder)
    inbox = run(engine, {0: [request(i, p) for i, p in enumerate(prompts)]}, Continuous(chunk=16))
    wanted = {i: greedy(decoder, prompt) for i, prompt in enumerate(prompts)}
    assert inbox.tokens() == wanted
    assert len({token for tokens in wanted.values() for token in tokens}) > 8


@pytest.mark.parametrize("family", FAMILIES)
def test_pools_hold_the_layers_that_make_keys(family):
    config = tiny_config(family)
    kv = PagedKv(config, 288, LIMITS, dtype=torch.float32)
    for kind in config.kinds:
        pool = kv.pools[kind.name]
        assert len(pool.keys) == len(config.kv_layers(kind.name))
        rows = pool.tables.num_blocks * 16
        per_token = kv_token_bytes(config, kind.name)
        assert pool.keys.nbytes + pool.values.nbytes == rows * per_token
    windows = [kind.name for kind in config.kinds if kind.window is not None]
    held = sum(kv.pools[n].keys.nbytes + kv.pools[n].values.nbytes for n in windows)
    assert held == sliding_bytes(config, 288, LIMITS, "float32")
    assert token_bytes(config, "float32") == kv_token_bytes(config, "full")


def wide_config(family: str, dtype: str) -> DecoderConfig:
    """The family's tiny model with heads as compiled attention takes them."""
    return parse_config(TABLES[family] | {"head_dim": 16}).with_dtype(dtype)


@torch.no_grad()
def forced_logits(
    model: PackedDecoder, dtype: torch.dtype, adapters: LayerAdapters | None = None
) -> torch.Tensor:
    """Logits of given tokens: two prompts, in chunks, then decoded together."""
    kv = PagedKv(model.config, LIMITS.max_running * LIMITS.max_tokens, LIMITS, dtype=dtype)
    texts = [random_tokens(model.config, 60, seed=seed) for seed in (1, 2)]
    hidden = []
    for counts in ([21, 0], [9, 17], *[[1, 1]] * 25):
        which = [i for i, count in enumerate(counts) if count]
        new = [counts[i] for i in which]
        starts = [kv.length(i) for i in which]
        kv.extend(which, new)
        places = [torch.arange(start, start + count) for start, count in zip(starts, new)]
        tokens_S = torch.cat([texts[i][place] for i, place in zip(which, places)])
        steps = kv.step(which, new)
        hidden.append(model.forward(tokens_S, torch.cat(places), steps, kv.pools, adapters))
    return model.logits(torch.cat(hidden)).double()


@pytest.mark.skipif(not native.levels(), reason="no C++ compiler here")
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_layers_are_no_further_off_than_plain_ones(family):
    """bfloat16 with compiled kernels and as plain torch, each against float32 of equal weights."""
    decoder = random_decoder(wide_config(family, "float32"), seed=3)
    weights = {name: value.bfloat16() for name, value in decoder.state_dict().items()}
    models = [PackedDecoder(wide_config(family, dtype)) for dtype in ("bfloat16", "float32")]
    for model in models:
        model.update(weights.items())
    exact = forced_logits(models[1], torch.float32)
    compiled = forced_logits(models[0], torch.bfloat16)
    assert models[0].is_compiled
    with native.plain():
        plain = forced_logits(models[0], torch.bfloat16)
    assert not models[0].is_compiled
    errors = [(found - exact).square().mean().sqrt() for found in (compiled, plain)]
    assert 0 < errors[0] <= 1.1 * errors[1]
    assert errors[0] < 0.1 * exact.square().mean().sqrt()


class NothingAdded:
    """Adapters that change nothing; a layer then is computed product by product."""

    def add_(self, out_SF: torch.Tensor, x_SD: torch.Tensor, layer: int, matrix: str) -> None:
        pass


@pytest.mark.skipif(not native.levels(), reason="no C++ compiler here")
@pytest.mark.parametrize("family", ["llama3", "gemma3"])
def test_a_layer_in_one_call_gives_the_bits_of_its_parts(family):
    model = PackedDecoder(wide_config(family, "bfloat16"))
    model.update(random_decoder(wide_config(family, "float32"), seed=3).state_dict().items())
    whole = forced_logits(model, torch.bfloat16)
    parts = forced_logits(model, torch.bfloat16, NothingAdded())
    assert model.is_compiled and torch.equal(whole, parts)


def test_experts_are_refused_before_anything_starts(tmp_path):
    table = TABLES["gemma4"] | {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(table))
    with pytest.raises(JobError, match=r"experts = 4: .* counted, not computed"):
        require_servable(ServeSettings(folder=str(tmp_path), scheduler="continuous"))
