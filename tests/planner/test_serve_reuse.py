"""Reuse of prefixes in a serving plan: closed forms, formulas, words, and where there is none."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cli.app import run
from phalanx.cost.serving_efficiency import serving_efficiency
from phalanx.cost.serving_plans import serving_plans
from phalanx.cost.serving_steady import Loads, prompt_times
from phalanx.hardware import parse_cluster
from phalanx.models.known import known_shape
from phalanx.planner.clusters import asked_clusters
from phalanx.planner.importers import read_foreign
from phalanx.planner.request_prefixes import prefixes_of
from phalanx.planner.request_trace import RequestTrace, poisson
from phalanx.planner.serve_events import StepPrices, play_requests
from phalanx.planner.serve_given import given_server, server_of
from phalanx.planner.serve_nearest import nearest_that_serve
from phalanx.planner.serve_plan import ServeQuestion, serve_answer
from phalanx.planner.serve_reuse import found_again
from phalanx.policies.serve import BatchPlan

SHAPE = known_shape("llama-3.1-8b")
PLAN = serving_plans(SHAPE, parse_cluster("8xh100").machine, precision="fp8")
RATES = serving_efficiency().rates(PLAN)
ROOM = {"kv_tokens": 400_000.0, "max_running": 256}
QUESTION = ServeQuestion(prompt_tokens=2048, output_tokens=32, precision="fp8")


def ask(question, on="1xh100", plays=False):
    (asked,) = asked_clusters(on)
    return serve_answer(SHAPE, asked, question, plays=plays)


def play(requests, **options):
    return play_requests(PLAN, RATES, requests, **(ROOM | options))


# ---- played ------------------------------------------------------------------------------------


def test_all_but_the_first_of_identical_prompts_are_cached():
    """(n - 1) / n of the whole blocks that leave a token to compute: 63 of 64, on each engine."""
    same = poisson(0.5, 10, 1024, 2, shared_tokens=1024)
    assert play(same).reused_frac == pytest.approx(9 / 10 * 1008 / 1024)
    assert play(same, engines=2).reused_frac == pytest.approx(8 / 10 * 1008 / 1024)
    played = play(same)
    assert played.ttft_s[1:].max() < played.ttft_s[0]


def test_prompts_that_nobody_shares_are_played_as_without_a_cache():
    """Bit for bit: without ids, with the cache off, and with ids of their own."""
    plain = poisson(20.0, 60, 1000, 20)
    alone = replace(plain, prefixes=prefixes_of([(at,) for at in range(60)], 1000))
    shared = poisson(20.0, 60, 1000, 20, shared_tokens=900)
    expected = play(plain)
    for other in (play(alone), play(shared, reuses_prefixes=False)):
        assert (other.ttft_s == expected.ttft_s).all()
        assert (other.latency_s == expected.latency_s).all()
        assert other.reused_frac == 0.0


def test_a_pool_that_is_too_small_forgets():
    """Chats of 2,000 tokens in turns: a pool for all finds them again, one for three does not."""
    ids = [(at % 8,) for at in range(40)]
    lengths = np.full(40, 2000)
    turns = RequestTrace(np.arange(40.0), lengths, np.full(40, 2), "", prefixes_of(ids, 2000))
    assert play(turns).reused_frac == pytest.approx(32 / 40 * 1984 / 2000)
    assert play(turns, kv_tokens=3 * 2016.0).reused_frac == 0.0
    assert found_again(turns, engines=1, room_tokens=4e5) == pytest.approx(32 / 40 * 1984)
    assert found_again(turns, engines=1, room_tokens=3 * 2016.0) == 0.0
    assert found_again(turns, engines=8, room_tokens=2016.0) == pytest.approx(32 / 40 * 1984)


def test_played_prompts_with_a_cached_prefix_cost_what_the_formula_says():
    """Within interpolation and the reading of weights, which is played beside the products."""
    prices, one = StepPrices(PLAN, RATES, most_rows=256, longest=16384), np.ones(1)
    for tokens, cached in ((8192, 0), (8192, 2048), (8192, 7680), (8192, 8176), (1024, 960)):
        lengths = {"prompt_tokens": tokens * one, "reused_tokens": cached * one}
        loads = Loads(answer_tokens=9 * one, concurrency=one, **lengths)
        formula_s = float(prompt_times(PLAN, loads, RATES, one)[0][0])
        assert prices.rest_s(tokens, cached) == pytest.approx(formula_s, rel=0.15)
        chunk = BatchPlan([0], [tokens - cached], [cached], [0], [-1], [-1])
        assert prices.batch_s(chunk) == pytest.approx(prices.rest_s(tokens, cached))


# ---- formulas ----------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 2046), st.integers(1, 2046))
def test_more_in_common_never_serves_less(first, second):
    less, more = (
        ask(replace(QUESTION, shared_tokens=each)).best for each in sorted((first, second))
    )
    assert more.knee_per_s >= less.knee_per_s * (1 - 1e-9)


def test_formulas_count_whole_blocks_and_leave_a_token_to_compute():
    for shared, cached in ((15, 0), (16, 16), (1000, 992), (2047, 2032)):
        answer = ask(replace(QUESTION, shared_tokens=shared))
        assert answer.reused_tokens == cached
        assert answer.without_reuse.best.knee_per_s <= answer.best.knee_per_s
    plain = ask(QUESTION)
    assert plain.without_reuse is None
    assert ask(replace(QUESTION, shared_tokens=15)).best == plain.best


def test_without_a_prefix_cache_nothing_changes():
    off = replace(QUESTION, shared_tokens=1024, reuses_prefixes=False)
    assert ask(off).best == ask(QUESTION).best


def test_a_load_that_shares_takes_fewer_engines():
    question = replace(QUESTION, shared_tokens=1800, rate_per_s=100.0)
    answer = ask(question, "8xh100")
    before = answer.without_reuse
    assert answer.best.degrees == before.best.degrees
    assert answer.best.knee_per_s > before.best.knee_per_s
    assert answer.engines_for(1000.0) < before.engines_for(1000.0)


def test_the_nearest_change_is_a_cache_that_was_switched_off():
    (asked,) = asked_clusters("1xh100")
    with_cache = ask(replace(QUESTION, shared_tokens=1800))
    rate = (with_cache.best.knee_per_s + with_cache.without_reuse.best.knee_per_s) / 2
    off = replace(QUESTION, shared_tokens=1800, rate_per_s=rate, reuses_prefixes=False)
    assert not ask(off).fits
    assert nearest_that_serve(SHAPE, asked, off)[0] == "a prefix cache on 1xh100"


# ---- the verb ----------------------------------------------------------------------------------

WORDS = ["plan", "llama-3.1-8b", "--serve", "--on", "1xh100", "--precision", "fp8"]
LENGTHS = ["--prompt", "1000", "--answer", "8", "--rate", "5"]


def test_the_verb_says_how_much_is_reused_and_what_that_changes(capsys):
    assert run([*WORDS, *LENGTHS, "--shared-prefix", "512", "--json", "-"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    reuse = answer["prefix_reuse"]
    assert reuse["formula_frac"] == 0.512
    assert 0.5 < reuse["played_frac"] < 0.512
    assert reuse["without"]["knee_per_s"] < answer["knee_per_s"]
    assert reuse["engines"] == reuse["without"]["engines"] == 1
    assert run([*WORDS, *LENGTHS, "--shared-prefix", "512"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the first 512 of each prompt the same in all" in shown
    assert "prefix reuse: 51 % of prompt tokens cached in the formulas, 51 % as played" in shown
    assert "; 1 of them carry the load" in shown


def test_the_verb_can_do_without(capsys):
    assert run([*WORDS, *LENGTHS, "--shared-prefix", "512", "--no-prefix-cache"]) == 0
    assert "prefix reuse is off" in capsys.readouterr().out
    assert run([*WORDS, *LENGTHS]) == 0
    assert "prefix reuse" not in capsys.readouterr().out


def test_the_verb_plays_a_trace_of_mooncake(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    rows = [
        {
            "timestamp": 400 * at,
            "input_length": 1100,
            "output_length": 4,
            "hash_ids": [0, 1, 9 + at],
        }
        for at in range(10)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert run([*WORDS, "--trace", str(path), "--json", "-"]) == 0
    reuse = json.loads(capsys.readouterr().out)["answers"][0]["prefix_reuse"]
    assert reuse["played_frac"] == pytest.approx(9 / 10 * 1024 / 1100)
    assert reuse["formula_frac"] == pytest.approx(9 / 10 * 1024 / 1100)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt", "512", "--shared-prefix", "512"], "nearest legal values: 511"),
        (["--shared-prefix", "none"], "whole number of tokens"),
        (["--trace", "t.jsonl", "--shared-prefix", "5"], "--trace, --shared-prefix"),
    ],
)
def test_a_prefix_that_cannot_be_shared_is_one_clear_line(arguments, says, tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 2}')
    words = [str(path) if word == "t.jsonl" else word for word in arguments]
    assert run([*WORDS, *words]) == 2
    shown = capsys.readouterr().err
    assert says in shown and len(shown.strip().splitlines()) == 1


# ---- other programs ----------------------------------------------------------------------------


def test_a_server_without_a_prefix_cache_is_priced_and_written_without(tmp_path):
    path = tmp_path / "serve.sh"
    (asked,) = asked_clusters("1xh100")
    question = replace(QUESTION, shared_tokens=1024)
    best = ask(question)
    for flag, reuses in (("", True), (" --no-enable-prefix-caching", False)):
        path.write_text(f"vllm serve meta-llama/Llama-3.1-8B{flag}\n")
        server = given_server(read_foreign(str(path)), SHAPE, asked, question, best)
        assert (server.answer.without_reuse is not None) == reuses
        assert ("prefix cache off -> on" in server.changes) != reuses
    assert server_of("m", best, question).caches_prefixes is None
    assert server_of("m", best, replace(question, reuses_prefixes=False)).caches_prefixes is False
