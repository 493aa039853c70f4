"""The serving engine of every family gives the tokens of the training decoder, without a cache."""

from __future__ import annotations

import json

import pytest
import torch

from phalanx.engines.serve.engine import ServeEngine
from phalanx.engines.serve.kv import KvLimits, PagedKv, sliding_bytes, token_bytes
from phalanx.engines.serve.model import PackedDecoder
from phalanx.engines.serve.settings import ServeSettings, require_servable
from phalanx.errors import JobError
from phalanx.models.decoder import Decoder
from phalanx.models.spec import DecoderConfig, kv_token_bytes
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


def test_experts_are_refused_before_anything_starts(tmp_path):
    table = TABLES["gemma4"] | {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(table))
    with pytest.raises(JobError, match=r"experts = 4: .* counted, not computed"):
        require_servable(ServeSettings(folder=str(tmp_path), scheduler="continuous"))
