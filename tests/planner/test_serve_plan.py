"""`plan --serve`: which engines a cluster is cut into, what they promise, and clear refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cli.app import run
from phalanx.errors import JobError
from phalanx.hardware import parse_cluster
from phalanx.models.known import known_shape
from phalanx.planner import serve_played
from phalanx.planner.clusters import asked_clusters
from phalanx.planner.serve_nearest import nearest_that_serve
from phalanx.planner.serve_plan import ServeQuestion, serve_answer
from phalanx.planner.serve_space import engine_space

LLAMA_8B, LLAMA_70B = known_shape("llama-3.1-8b"), known_shape("llama-3.1-70b")
QUESTION = ServeQuestion(prompt_tokens=512, output_tokens=32, precision="fp8")


def ask(shape, on: str, question=QUESTION, plays=False):
    (asked,) = asked_clusters(on)
    return serve_answer(shape, asked, question, plays=plays)


def test_a_dense_model_is_cut_by_tensors_and_stages_alone():
    space = engine_space(LLAMA_70B, parse_cluster("8xh100"))
    assert set(space.tensor) == {1, 2, 4, 8}
    assert set(space.attention_dp) == set(space.expert) == {1}
    used = space.tensor * space.pipeline * space.replicas
    assert (used + space.idle == 8).all()


def test_a_mixture_may_spread_experts_over_replicas_of_attention():
    space = engine_space(known_shape("deepseek-v3"), parse_cluster("16xh200"))
    assert space.attention_dp.max() == 16
    assert {1, 16} <= set(space.expert)
    assert (known_shape("deepseek-v3").layers[1].feed_forward.num_experts % space.expert == 0).all()


def test_ways_that_cannot_be_are_counted_by_their_reason():
    space = engine_space(known_shape("qwen2.5-7b"), parse_cluster("16xh100"))
    assert space.illegal["heads that the tensor degree does not divide"] > 0  # 28 heads
    assert space.illegal["tensor parallelism beyond a domain of 8 devices"] > 0
    assert set(space.tensor) == {1, 2, 4}


def test_weights_of_a_device_are_those_of_its_share():
    """70 B parameters in fp8 and tables in bf16 on two devices."""
    answer = ask(LLAMA_70B, "2xh100")
    tables = 2 * LLAMA_70B.vocab * LLAMA_70B.hidden
    expected = (LLAMA_70B.num_params - tables + 2 * tables) / answer.best.degrees["tensor"]
    expected /= answer.best.degrees["pipeline"]
    assert answer.best.weight_bytes == pytest.approx(expected, rel=0.01)


def test_more_memory_and_slower_promises_never_serve_less():
    small, large = (ask(LLAMA_8B, on).best.most_per_s for on in ("1xh100", "1xh200"))
    assert large >= small
    strict = replace(QUESTION, ttft_s=0.05, tpot_s=0.01)
    loose = replace(QUESTION, ttft_s=5.0, tpot_s=1.0)
    assert ask(LLAMA_8B, "8xh100", loose).best.most_per_s >= (
        ask(LLAMA_8B, "8xh100", strict).best.most_per_s
    )


def test_a_model_that_is_too_large_names_what_would_serve_it():
    question = replace(QUESTION, precision="bf16")
    answer = ask(LLAMA_70B, "1xh100", question)
    assert answer.best is None and answer.too_large == answer.counted
    (asked,) = asked_clusters("1xh100")
    near = nearest_that_serve(LLAMA_70B, asked, question)
    assert "--precision fp8 on 1xh100" in near
    assert any(text.endswith("xh100") and not text.startswith("--") for text in near)


def test_a_rate_beyond_the_knee_is_not_served():
    assert not ask(LLAMA_8B, "1xh100", replace(QUESTION, rate_per_s=1e4)).fits
    assert ask(LLAMA_8B, "1xh100", replace(QUESTION, rate_per_s=1.0)).fits


def test_the_rate_kept_is_one_whose_slowest_requests_are_in_time():
    question = replace(QUESTION, ttft_s=0.2, tpot_s=0.05)
    answer = ask(LLAMA_8B, "1xh100", question, plays=True)
    assert 0 < answer.kept_per_s <= answer.best.knee_per_s
    assert answer.in_time and answer.fits
    assert answer.played.percentiles("ttft_s")[1] <= 0.2
    assert answer.usd_per_million_output == pytest.approx(
        answer.usd_per_h / 3600 / (answer.kept_per_s * 32) * 1e6
    )


@settings(max_examples=10, deadline=None)
@given(st.integers(64, 200_000), st.floats(1.0, 8.0), st.sampled_from(["1xh100", "2xl40s"]))
def test_what_serves_long_prompts_serves_short_ones_and_with_more_memory(prompt, factor, on):
    """Feasibility is monotone in context and in memory."""
    longer = replace(QUESTION, prompt_tokens=prompt * factor)
    if ask(LLAMA_8B, on, longer).fits:
        assert ask(LLAMA_8B, on, replace(QUESTION, prompt_tokens=prompt)).fits
        assert ask(LLAMA_8B, "2xh200", longer).fits


def test_weights_in_numbers_without_units_are_said_to_be_unpacked():
    assert any("no fp8 units" in line for line in ask(LLAMA_8B, "8xa100-80g").source)
    assert not any("units" in line for line in ask(LLAMA_8B, "8xh100").source)


def test_a_division_of_engines_is_told_where_times_are_promised():
    question = replace(QUESTION, prompt_tokens=4096, ttft_s=2.0, tpot_s=0.02)
    answer = ask(LLAMA_8B, "8xh100", question)
    assert answer.split.for_prompts + answer.split.for_answers <= 8
    assert answer.split.ttft_s <= 2.0 and answer.split.tpot_s <= 0.02
    assert ask(LLAMA_8B, "1xh100", question).split is None  # one engine cannot be divided
    assert ask(LLAMA_8B, "8xh100").split is None  # nothing promised, nothing gained


def test_one_way_can_be_asked_for_and_an_impossible_one_is_refused():
    (asked,) = asked_clusters("8xh100")
    only = {"tensor": 4, "pipeline": 2}
    answer = serve_answer(LLAMA_70B, asked, QUESTION, plays=False, only=only)
    assert answer.counted == 1
    assert only.items() <= answer.best.degrees.items()
    with pytest.raises(JobError, match="tensor 3"):
        serve_answer(LLAMA_70B, asked, QUESTION, plays=False, only={"tensor": 3})


# ---- the verb ----------------------------------------------------------------------------------

SMALL = ["--prompt", "256", "--answer", "16", "--precision", "fp8"]


def test_the_verb_says_what_is_served_and_for_how_much(capsys):
    assert run(["plan", "llama-3.1-8b", "--serve", "--on", "1xh100", "--rate", "2", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "serves it" in shown and "KV tokens" in shown and "(simulated, P50 / P99)" in shown
    assert "coefficients: fitted on" in shown


def test_the_verb_plays_a_trace_and_writes_json(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,64,4\n0.5,64,4\n")
    arguments = ["--serve", "--on", "1xh100", "--trace", str(path), "--json", "-"]
    assert run(["plan", "qwen3-30b-a3b", *arguments]) == 0
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert answer["played"]["requests"] == 2
    assert answer["fits"] and answer["played"]["ttft_s"]["p99"] > 0


def test_what_does_not_fit_exits_one_with_the_nearest_that_does(capsys):
    assert run(["plan", "llama-3.1-405b", "--serve", "--on", "1xh100", *SMALL]) == 1
    shown = capsys.readouterr().out
    assert "does not fit" in shown and "nearest that serve it" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["--serve", "--rate", "-1"],
        ["--serve", "--rate", "nan"],
        ["--serve", "--ttft", "0 s"],
        ["--serve", "--ttft", "soon"],
        ["--serve", "--prompt", "0"],
        ["--serve", "--precision", "fp2"],
        ["--serve", "--trace", "none.jsonl"],
        ["--serve", "--trace", "none.jsonl", "--rate", "1"],
        ["--rate", "1"],
        ["--ttft", "1 s"],
    ],
)
def test_words_that_mean_nothing_are_one_line_and_exit_two(arguments, capsys):
    assert run(["plan", "llama-3.1-8b", "--on", "1xh100", *arguments]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) <= 3


def test_a_division_of_very_many_engines_is_as_good_as_one_of_few():
    question = ServeQuestion(prompt_tokens=1024, output_tokens=256, ttft_s=1.0)

    def each_per_s(devices):
        split = ask(LLAMA_8B, f"{devices}xh100", question, plays=False).split
        return split.most_per_s / devices

    assert each_per_s(50_000) == pytest.approx(each_per_s(64), rel=0.1)


def test_engines_that_were_played_on_one_cluster_are_not_played_again_on_a_larger(monkeypatch):
    calls = []
    real = serve_played.play_requests
    monkeypatch.setattr(
        serve_played, "play_requests", lambda *a, **k: calls.append(1) or real(*a, **k)
    )
    monkeypatch.setattr(serve_played, "_played", type(serve_played._played)())
    question = ServeQuestion(prompt_tokens=64, output_tokens=8, ttft_s=1.0)
    small = ask(LLAMA_8B, "2xh100", question, plays=True)
    played = len(calls)
    assert played > 1
    large = ask(LLAMA_8B, "8xh100", question, plays=True)
    assert large.best.replicas == 4 * small.best.replicas and len(calls) == played
    assert large.kept_per_s == 4 * small.kept_per_s
    assert large.played.percentiles("ttft_s") == small.played.percentiles("ttft_s")
