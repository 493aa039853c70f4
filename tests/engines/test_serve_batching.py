"""What a request gets depends on nothing but itself: companions, chunks, preemption, truncation."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.engines.serve.settings import Sampling
from phalanx.engines.serve.world import Cancel
from phalanx.errors import JobError, PlanError
from phalanx.models.spec import LoraSpec, lora_tensors
from phalanx.policies.serve import BatchPlan
from phalanx.policies.serve.continuous import Continuous
from tests.engines.serve_cases import CONFIG, GREEDY, make_engine, prompt_of, request, tensors
from tests.engines.test_serve_engine import run

SAMPLINGS = (
    replace(GREEDY, max_new=9),
    Sampling(max_new=14, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True),
    Sampling(max_new=6, temperature=1.0, top_k=20, seed=6, ignore_eos=True),
)
LORA = LoraSpec(rank=3, alpha=9.0, targets=("v_proj", "down_proj"))
ASKED = st.tuples(
    st.sampled_from((1, 2, 16, 17, 40, 63)),
    st.sampled_from(SAMPLINGS),
    st.sampled_from(("", "tone")),
)


def engine_with_adapter(**options):
    engine = make_engine(**options)
    generator = torch.Generator().manual_seed(2)
    factors = {
        name: torch.randn(spec.shape, generator=generator) * 0.5
        for name, spec in lora_tensors(CONFIG, LORA).items()
    }
    engine.update_adapter("tone", LORA, factors)
    return engine


@cache
def alone(length: int, sampling: Sampling, adapter: str) -> list[int]:
    """Tokens of a request that has an engine for itself."""
    asked = request(0, prompt_of(length), sampling, adapter)
    return run(engine_with_adapter(), {0: [asked]}).tokens()[0]


@given(
    asked=st.lists(ASKED, min_size=2, max_size=7),
    gaps=st.lists(st.integers(0, 3), min_size=7, max_size=7),
    chunk=st.sampled_from((1, 16, 0)),
    kv_tokens=st.sampled_from((96, 144, 0)),
    gone=st.sets(st.integers(0, 6), max_size=3),
)
@settings(max_examples=15, deadline=None)
def test_no_companion_chunk_or_preemption_changes_a_token(asked, gaps, chunk, kv_tokens, gone):
    """`run` sees to it that no request and no block is left."""
    engine = engine_with_adapter(max_tokens=80, kv_tokens=kv_tokens)
    script: dict[int, list] = {}
    at = 0
    for id_, (length, sampling, adapter) in enumerate(asked):
        script.setdefault(at, []).append(request(id_, prompt_of(length), sampling, adapter))
        at += gaps[id_]
    for id_ in gone:
        script.setdefault(at + id_, []).append(Cancel(id_))
    tokens = run(engine, script, Continuous(chunk=chunk)).tokens()
    for id_, each in enumerate(asked):
        want = alone(*each)
        got = tokens.get(id_, [])
        assert got == (want[: len(got)] if id_ in gone else want)
    assert all(not pool.tables.table.any() for pool in engine.kv.pools.values())


def test_a_crowd_in_a_small_cache_is_preempted_and_ends_all_the_same():
    engine = make_engine(kv_tokens=96, max_tokens=80)
    sampling = SAMPLINGS[0]
    run_ = run(engine, {0: [request(i, prompt_of(10 + i), sampling) for i in range(5)]})
    assert engine.num_preempted > 0
    assert run_.tokens() == {i: alone(10 + i, sampling, "") for i in range(5)}


def plan_of(engine, request_: int, count: int) -> BatchPlan:
    columns = (request_,), (count,), (engine.kv.length(request_),)
    return BatchPlan(*columns, num_draft=(0,), adapter=(-1,), grammar=(-1,))


def advance(engine, num_tokens: int) -> list[int]:
    """Greedy tokens of request 0 by plans of one row."""
    got: list[int] = []
    while len(got) < num_tokens:
        left = len(engine.requests[0].tokens) - engine.kv.length(0)
        result = engine.step(plan_of(engine, 0, min(left, 33)))
        got += [each.token for each in result.outputs]
    return got


@pytest.mark.parametrize("length", [1, 15, 40])
def test_what_is_truncated_comes_again(length):
    engine = make_engine()
    engine.add(request(0, prompt_of(length), replace(GREEDY, max_new=30)))
    first = advance(engine, 12)
    for kept in (9, 9, 4, 0):
        engine.truncate(0, length + kept)
        assert engine.requests[0].tokens == [*prompt_of(length), *first[:kept]]
        assert engine.facts["free_blocks"] == engine.kv.num_free
        assert advance(engine, 12 - kept) == first[kept:]
    engine.cancel(0)
    assert engine.kv.num_free == engine.kv.num_blocks


def test_truncation_knows_what_is_gone():
    engine = make_engine()
    engine.add(request(0, prompt_of(5), replace(GREEDY, max_new=120)))
    advance(engine, 100)  # windows of 21 tokens, in blocks of 16
    engine.truncate(0, 102)
    for length, words in (
        (60, "given back already"),
        (4, r"truncate = 4: must lie in 5\.\.102"),
        (103, r"truncate = 103: must lie in 5\.\.102"),
    ):
        with pytest.raises(JobError, match=words):
            engine.truncate(0, length)
    assert len(engine.requests[0].tokens) == 102  # a refusal changes nothing
    with pytest.raises(JobError, match="is no live request"):
        engine.truncate(7, 5)


@pytest.mark.parametrize(("column", "value"), [("num_draft", 2), ("grammar", 0), ("adapter", 1)])
def test_rows_that_are_not_computed_here_are_illegal(column, value):
    engine = make_engine()
    engine.add(request(0, prompt_of(7)))
    with pytest.raises(PlanError, match=f"{column} = {value}") as caught:
        engine.step(plan_of(engine, 0, 7)._replace(**{column: (value,)}))
    assert caught.value.code == "plan/illegal" and engine.kv.length(0) == 0


def test_live_requests_go_on_under_new_weights_and_say_so():
    """Their cache stays; what is chosen after the update is told as the new version's."""
    engine = make_engine()
    engine.add(request(0, prompt_of(20), replace(GREEDY, max_new=10)))
    before = engine.step(plan_of(engine, 0, 20)).outputs
    engine.update_weights(((n, t) for n, t in tensors(5)), "tiny@1")
    after = engine.step(plan_of(engine, 0, 1)).outputs
    assert [each.weight_version for each in before + after] == ["tiny@0", "tiny@1"]
    assert engine.kv.length(0) == 21


def test_an_update_that_breaks_off_is_told_with_every_token():
    engine = make_engine()
    wrong = [*list(tensors(5))[:4], ("model.norm.weight", torch.zeros(3))]
    for _ in range(2):
        with pytest.raises(JobError, match=r"model\.norm\.weight"):
            engine.update_weights(wrong, "tiny@1")
        assert engine.weight_version == "tiny@0+incomplete"
    engine.update_weights(tensors(5), "tiny@2")
    assert engine.weight_version == "tiny@2"
