"""Laws of the prefix cache of a simulated engine, alone and under the real schedulers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.action import Compute
from phalanx.errors import PlanError
from phalanx.policies.serve import BatchPlan
from phalanx.policy import Event
from phalanx.registry import build
from phalanx.worlds.sim_prefixes import PrefixCache
from phalanx.worlds.sim_serving import BLOCK_TOKENS, SimEngine, SimRequest, play_engine

NUM_KEYS = 12


def keys(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def test_the_block_released_longest_ago_goes_first_and_a_prefix_loses_its_end_first():
    cache = PrefixCache(NUM_KEYS)
    for chain in (keys(0, 1, 2), keys(3, 4)):
        cache.add(chain)
        cache.release(chain)
    cache.hold(keys(0))
    cache.release(keys(0))  # wanted again: now the last to go
    cache.drop(3)
    assert cache.num_leading(keys(0, 1, 2)) == 1
    assert cache.num_leading(keys(3, 4)) == 1
    cache.drop(1)
    assert (cache.num_leading(keys(3)), cache.num_leading(keys(0))) == (0, 1)
    assert (cache.num_held, cache.num_idle) == (0, 1)


def test_a_block_that_several_hold_counts_once_and_stays_until_the_last_lets_go():
    cache = PrefixCache(NUM_KEYS)
    cache.add(keys(5, 6))
    cache.hold(keys(5))
    assert (cache.num_held, cache.num_held_of(keys(5, 6))) == (2, 2)
    cache.release(keys(5, 6))
    assert (cache.num_held, cache.num_idle) == (1, 1)
    cache.drop(1)
    assert cache.num_leading(keys(5, 6)) == 1  # 5 is held, 6 went


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 4)), max_size=30))
def test_holders_are_never_negative_and_only_idle_blocks_go(turns):
    """Requests of three chains of four blocks come and go, beside a count by hand."""
    cache, running = PrefixCache(NUM_KEYS), []
    holders: Counter[int] = Counter()
    for chain, length, drops in turns:
        if chain == 3:
            if running:
                gone = running.pop(0)
                cache.release(gone)
                holders.subtract(gone.tolist())
        else:
            wanted = np.arange(4 * chain, 4 * chain + length)
            found = cache.num_leading(wanted)
            cache.hold(wanted[:found])
            mine = np.concatenate([wanted[:found], cache.add(wanted[found:])])
            running.append(mine)
            holders.update(mine.tolist())
        cache.drop(min(drops, cache.num_idle))
        assert min(holders.values(), default=0) >= 0
        held = [key for key, count in holders.items() if count]
        assert cache.num_held == len(held)
        assert all(cache.num_leading(keys(key)) == 1 for key in held)
        assert cache.num_idle == sum(cache.num_leading(keys(k)) for k in range(NUM_KEYS)) - len(
            held
        )


# ---- under a scheduler -------------------------------------------------------------------------


def step_s(batch: BatchPlan) -> float:
    return 1.0 + sum(batch.query_len) / 8


def asked(id_: int, arrive_s: float, prompt: int, new: int, chain: np.ndarray) -> SimRequest:
    whole = chain[: prompt // BLOCK_TOKENS]
    return SimRequest(
        id=id_, arrive_s=arrive_s, prompt_len=prompt, max_new=new, num_new=new, prefix_keys=whole
    )


class Watched:
    """A policy whose batches are looked at."""

    def __init__(self, policy, look):
        self._policy, self._look = policy, look

    def start(self, view):
        return self._policy.start(view)

    def on(self, state, events, view):
        actions = self._policy.on(state, events, view)
        for action in actions:
            self._look(action.batch, view)
        return actions


SHAPES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 2), st.integers(1, 70), st.integers(1, 9)),
    min_size=1,
    max_size=14,
)


@settings(max_examples=80, deadline=None)
@given(
    SHAPES, st.integers(5, 14), st.integers(1, 4), st.sampled_from(["continuous", "prefill_first"])
)
def test_every_request_ends_in_a_pool_that_is_never_exceeded(shapes, num_blocks, running, name):
    """`SimEngine` refuses plans without room, or that take what is not there."""
    shapes = sorted(shapes)
    requests = [
        asked(at, float(moment), prompt, new, np.arange(4 * chain, 4 * chain + 4))
        for at, (moment, chain, prompt, new) in enumerate(shapes)
    ]
    engine = SimEngine(
        requests, num_blocks=num_blocks, max_running=running, max_step_tokens=running + 20
    )
    computed: Counter[int] = Counter()

    def look(batch: BatchPlan, view) -> None:
        computed.update(dict(zip(batch.requests, batch.query_len)))
        assert 0 <= view.facts["free_blocks"] <= num_blocks
        assert engine._prefixes is None or (
            engine._prefixes.num_held + engine._prefixes.num_idle <= num_blocks
        )

    play_engine(engine, Watched(build("serve", name), look), step_s)
    assert set(engine.finish_s) == set(range(len(requests)))
    assert engine.facts["free_blocks"] == num_blocks
    for each in requests:
        reused = engine.reused_tokens.get(each.id, 0)
        assert reused <= each.prompt_len - 1 and reused % BLOCK_TOKENS == 0
        if not engine.num_preempted:
            assert computed[each.id] == each.prompt_len - reused + each.num_new - 1


@pytest.mark.parametrize("name", ["continuous", "prefill_first"])
def test_identical_prompts_are_computed_once(name):
    """All but the first find their whole blocks short of the last token: 3 of 64, 4 of 65."""
    for prompt, blocks in ((64, 3), (65, 4)):
        requests = [asked(at, 100.0 * at, prompt, 2, np.arange(4)) for at in range(5)]
        engine = SimEngine(requests, num_blocks=8, max_running=4, max_step_tokens=128)
        play_engine(engine, build("serve", name), step_s)
        assert list(engine.reused_tokens.values()) == [0, *[16 * blocks] * 4]


def test_shared_blocks_count_once_in_the_pool():
    """Three requests of 4 blocks run at once in a pool of 8 that shares 3 of them; two without."""
    most = {}
    for shares in (True, False):
        requests = [asked(0, 0.0, 60, 30, np.arange(3))]
        requests += [asked(at, 20.0, 60, 3, np.arange(3)) for at in (1, 2)]
        if not shares:
            requests = [asked(r.id, r.arrive_s, 60, r.num_new, keys()) for r in requests]
        engine = SimEngine(requests, num_blocks=9, max_running=4, max_step_tokens=200)
        rows: list[int] = []

        def look(batch: BatchPlan, view, rows=rows) -> None:
            rows.append(len(batch.requests))

        play_engine(engine, Watched(build("serve", "continuous"), look), step_s)
        most[shares] = max(rows)
    assert most == {True: 3, False: 2}


def test_what_nobody_shares_is_played_as_without_a_cache():
    shapes = [(0, 40, 5), (3, 70, 9), (3, 10, 4), (9, 64, 3)]
    played = []
    for keyed in (True, False):
        requests = [
            asked(at, float(moment), prompt, new, np.arange(8 * at, 8 * at + 8 * keyed))
            for at, (moment, prompt, new) in enumerate(shapes)
        ]
        engine = SimEngine(requests, num_blocks=9, max_running=3, max_step_tokens=32)
        play_engine(engine, build("serve", "continuous"), step_s)
        played.append((engine.token_s, engine.finish_s))
    assert played[0] == played[1]


def test_a_plan_that_takes_what_is_not_there_is_refused():
    engine = SimEngine(
        [asked(0, 0.0, 40, 2, np.arange(2))], num_blocks=8, max_running=2, max_step_tokens=64
    )
    zeros = [0]
    plan = BatchPlan([0], [8], [32], zeros, zeros, zeros)
    action = Compute(op="engine.step", label="step.1", num_tokens=8, batch=plan)
    with pytest.raises(PlanError, match="whole blocks of 0 cached tokens"):
        engine.outcomes["engine.step"](action, Event(kind="done", time_s=1.0))
