"""`--rl`: its words, the split of pools, and what is printed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cli._plan_rl import plan_rl
from phalanx.errors import JobError, PhalanxError
from phalanx.models.known import known_shape
from phalanx.planner.clusters import asked_clusters
from phalanx.planner.rl_plan import rl_answer
from phalanx.planner.rl_words import RlAsked, rl_asked
from tests.fuzz.inputs import outcome

WORDS = "prompts=64,samples=4,prompt=200,answer=1000"


def answer(model="llama-3.1-8b", on="16xh100", words=WORDS):
    return rl_answer(known_shape(model), rl_asked(words), asked_clusters(on)[0])


def test_words_have_defaults_that_are_told():
    asked = rl_asked(WORDS)
    assert (asked.num_answers, asked.updates, asked.score_passes, asked.staleness) == (256, 1, 2, 1)
    assert (asked.lengths.mean_tokens, asked.lengths.limit_tokens) == (1000.0, 4000.0)
    asked = rl_asked(f"{WORDS}, limit=1500 ,updates=2,behind=0,passes=1,spread=0.5")
    assert asked.lengths.limit_tokens == 1500.0 and asked.lengths.spread == 0.5
    assert asked.work(known_shape("llama-3.1-8b")).answers_per_update == 128


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "key=value"),
        ("prompts=64", "--rl prompt"),
        (f"{WORDS},prompts=8", "twice"),
        (f"{WORDS},sample=8", "samples"),
        (f"{WORDS},limit=10", "limit of an answer"),
        (f"{WORDS},updates=3", "divide the 256"),
        (f"{WORDS},spread=nan", "spread"),
        (f"{WORDS},spread=x", "number"),
        (f"{WORDS},behind=-1", "whole number"),
        ("prompts=0,prompt=1,answer=1", "from 1"),
        ("prompts=10000000,samples=2,prompt=1,answer=1", "at most"),
        ("prompts=1.5,prompt=1,answer=1", "whole number"),
        ("prompts=" + "9" * 5000 + ",prompt=1,answer=1", "whole number"),
    ],
)
def test_bad_words_are_refused_in_one_line(words, says):
    with pytest.raises(JobError) as caught:
        rl_asked(words)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@given(
    text=st.text() | st.lists(st.sampled_from([*WORDS.split(","), "x=1", "limit=9"])).map(",".join)
)
def test_any_words_are_a_question_or_one_clear_line(text):
    assert isinstance(outcome(rl_asked, text), RlAsked | PhalanxError)


def test_one_pool_does_all_in_turn_and_two_share_the_devices():
    found = answer()
    one, two = found.one_pool, found.two_pools
    assert (one.train_devices, one.serving_devices) == (16, 16)
    assert two.train_devices + two.serving_devices == 16 and two.train_devices % 8 == 0
    assert one.num_engines * one.serving_tensor <= 16
    assert two.num_engines * two.serving_tensor <= two.serving_devices
    assert found.plans[0].step.total_s <= found.plans[1].step.total_s
    assert found.dollars(one).value == pytest.approx(one.step.total_s / 3600 * 16 * 6.88)
    assert found.tokens_per_s(one) == pytest.approx(256 * 1200 / one.step.total_s / 16)
    assert json.dumps(found.to_dict(), allow_nan=False)


def test_longer_answers_take_longer_and_a_model_that_is_too_large_has_no_plan():
    short, long = answer(), answer(words=WORDS.replace("1000", "4000"))
    assert long.one_pool.step.generation_s > short.one_pool.step.generation_s
    found = answer("llama-3.1-405b", "8xl40s")
    assert not found.fits and found.plans == []
    assert answer(on="1xh200").two_pools is None  # one device cannot be shared


def test_the_command_prints_both_ways_and_says_what_does_not_fit(capsys, tmp_path):
    path = tmp_path / "out.json"
    plan_rl("llama-3.1-8b", "8xh100,1xl40s", WORDS, {}, [], True, "")
    text = capsys.readouterr().out
    for words in ("1, on policy", "2, 1 behind", "does not fit", "log-probabilities"):
        assert words in text
    assert "median error of rows left out" in text and "SkyPilot" in text
    words = {"prompt": "200", "answer": "1000", "precision": "fp8"}
    plan_rl("llama-3.1-8b", "8xh100", "prompts=64,samples=4", words, [], False, str(path))
    table = json.loads(path.read_text())
    assert table["kind"] == "plan-rl" and table["clusters"][0]["plans"][0]["step_s"][0] > 0


def test_without_a_cluster_this_machine_is_meant_which_has_to_be_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError, match="lab calibrate"):
        plan_rl("llama-3.1-8b", "", WORDS, {}, [], False, "")
