"""What the first steps of an engine say of it, and that they leave it as it was."""

from __future__ import annotations

import pytest

from phalanx.cost.serving import ServeRates, windows_of
from phalanx.drive import drive
from phalanx.engines.serve import warm
from phalanx.engines.serve.engine import ServeEngine
from phalanx.engines.serve.kv_room import KvLimits, kv_tokens
from phalanx.engines.serve.warm import measure_rates
from phalanx.engines.serve.world import EngineWorld
from phalanx.planner.serving import predict_load
from phalanx.policies.serve.continuous import Continuous
from tests.engines.serve_cases import CONFIG, ScriptedInbox, make_engine, prompt_of, request

COUNTERS = ("num_steps", "num_prompt_tokens", "num_output_tokens", "num_preempted")
KNOWN = ServeRates(
    layers_s=[(1, 0.0011), (5, 0.0013), (32, 0.0031), (128, 0.0109)],
    head_s=[(1, 0.0007), (5, 0.0009)],
    kv_token_s=3e-7,
    pair_s=2e-8,
    windows=windows_of(CONFIG),
)


def state_of(engine: ServeEngine) -> tuple:
    counters = [getattr(engine, name) for name in COUNTERS]
    return dict(engine.facts), dict(engine.requests), engine.kv.num_free, counters


def tokens_of(engine: ServeEngine) -> dict[int, list[int]]:
    inbox = ScriptedInbox({0: [request(0, prompt_of(17)), request(1, prompt_of(40))]})
    drive(EngineWorld(engine, inbox), reacts=[Continuous()])
    return inbox.tokens()


def test_an_engine_is_left_as_it_was_and_computes_what_it_would_have():
    engine, fresh = make_engine(), make_engine()
    before = state_of(engine)
    measure_rates(engine, allowed_s=0.05)
    assert state_of(engine) == before
    assert tokens_of(engine) == tokens_of(fresh)


@pytest.mark.parametrize(
    ("max_running", "max_tokens", "max_step_tokens", "kv_tokens"),
    [(1, 2, 1, 2), (5, 48, 7, 48), (3, 160, 160, 161), (17, 33, 17, 600)],
)
def test_engines_of_any_size_can_be_measured(max_running, max_tokens, max_step_tokens, kv_tokens):
    engine = make_engine(
        max_running=max_running,
        max_tokens=max_tokens,
        max_step_tokens=max_step_tokens,
        kv_tokens=kv_tokens,
    )
    before = state_of(engine)
    rates = measure_rates(engine, allowed_s=0.02)
    assert state_of(engine) == before
    assert rates.step_s(1, 0, 0) > 0
    assert rates.layers_s[0][0] == 1
    assert ServeRates.from_dict(rates.to_dict()) == rates


def test_an_engine_whose_steps_have_known_prices_is_found_to_have_them(monkeypatch):
    engine, clock = make_engine(max_tokens=160, max_step_tokens=140), [0.0]
    step = ServeEngine.step

    def priced(self: ServeEngine, plan):
        known = {each.id: len(each.tokens) for each in self.requests.values()}
        rows = plan.rows()
        whole = sum(kv + count == known[id_] for id_, count, kv in rows)
        read = sum(KNOWN.read_tokens(kv) for _, count, kv in rows if count == 1)
        pairs = sum(count * KNOWN.read_tokens(kv) for _, count, kv in rows if count > 1)
        singles = sum(count == 1 for _, count, _ in rows)
        prompt = sum(count for _, count, _ in rows) - singles
        price_s = KNOWN.step_s(singles, read, prompt, num_pairs=pairs, num_ended=0)
        price_s -= on_head(singles)
        clock[0] += price_s + on_head(whole)
        return step(self, plan)

    def on_head(rows: int) -> float:
        base = KNOWN.step_s(0, 0, 1, num_ended=0)
        return KNOWN.step_s(0, 0, 1, num_ended=rows) - base if rows else 0.0

    monkeypatch.setattr(ServeEngine, "step", priced)
    monkeypatch.setattr(warm, "perf_counter", lambda: clock[0])
    found = measure_rates(engine, allowed_s=0.1)
    assert [count for count, _ in found.layers_s] == [1, 5, 32, 128]
    for name in ("layers_s", "head_s"):
        for (_, seconds), (_, known_s) in zip(getattr(found, name), getattr(KNOWN, name)):
            assert seconds == pytest.approx(known_s, rel=1e-9)
    assert found.kv_token_s == pytest.approx(KNOWN.kv_token_s, rel=1e-6)
    assert found.pair_s == pytest.approx(KNOWN.pair_s, rel=1e-6)
    assert found.windows == KNOWN.windows
    assert clock[0] < 0.2


@pytest.mark.parametrize(
    ("max_running", "max_tokens", "asked", "free_bytes"),
    [(3, 41, 0, 1e9), (3, 41, 57, 1e9), (7, 100, 0, 7e5), (1, 16, 16, 1e9)],
)
def test_the_cache_that_is_foretold_is_the_cache_of_the_engine(
    max_running, max_tokens, asked, free_bytes
):
    limits = {"max_running": max_running, "max_tokens": max_tokens, "max_step_tokens": 33}
    tokens = kv_tokens(CONFIG, KvLimits(**limits), asked=asked, free_bytes=free_bytes)
    report = predict_load(
        KNOWN,
        CONFIG,
        scheduler="continuous",
        prompt_lens=[9],
        output_tokens=2,
        kv_tokens=tokens,
        **limits,
    )
    engine = make_engine(kv_tokens=tokens, **limits)
    said = engine.facts["num_blocks"] * engine.facts["block_tokens"]
    assert {r.quantity: r.value for r in report.rows}["serving/KV tokens"] == said
    assert tokens <= said < tokens + engine.facts["block_tokens"]
