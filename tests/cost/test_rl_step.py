"""A step of reinforcement learning: the rollout against its sums, and how phases combine."""

import numpy as np
import pytest

from phalanx.cost.answer_lengths import AnswerLengths
from phalanx.cost.rl_efficiency import rl_efficiency
from phalanx.cost.rl_step import RlStep, RlWork, forward_s, rl_steps, rollout
from phalanx.cost.serving_efficiency import serving_efficiency
from phalanx.cost.serving_plans import serving_plans
from phalanx.cost.serving_step import decode_s
from phalanx.cost.training_plans import TrainingPlans
from phalanx.cost.training_step import training_step
from phalanx.hardware import read_machine
from phalanx.models.known import known_shape

SHAPE, H100 = known_shape("llama-3.1-8b"), read_machine("h100")
PLANS = serving_plans(SHAPE, H100, tensor=[1, 2, 4])
RATES = serving_efficiency().rates(PLANS)
LENGTHS = AnswerLengths(500.0, 4000.0)


def answers(**changes):
    given = {"num_engines": [8, 4, 2], "num_answers": 256, "prompt_tokens": 100.0}
    return rollout(PLANS, RATES, **given | {"lengths": LENGTHS} | changes)


def test_answers_that_are_alike_take_their_tokens_times_a_step():
    fixed = AnswerLengths(400.0, 400.0)
    found = answers(lengths=fixed, num_engines=[256, 256, 256], prompt_tokens=1.0)
    steps = decode_s(PLANS, np.ones(3), np.full(3, 201.0), RATES) * RATES["decode_level"]
    assert found.running.tolist() == [1.0, 1.0, 1.0]
    assert found.total_s == pytest.approx(400 * steps, rel=0.03)  # and a prompt of one token
    assert found.total_s == pytest.approx(found.work_s, rel=0.01)


def test_the_longest_answer_binds_however_many_engines_there_are():
    some, many = answers(), answers(num_engines=[256, 256, 256])
    longest = LENGTHS.longest_of(256)
    alone = decode_s(PLANS, np.ones(3), np.full(3, 100.0), RATES) * RATES["decode_level"]
    assert (many.total_s >= 0.99 * longest * alone).all()
    assert (many.total_s <= some.total_s).all()
    assert (some.total_s > 2 * some.work_s).all()  # the tail runs on nearly empty engines


def test_more_answers_than_caches_hold_wait():
    crowd = answers(num_engines=[1, 1, 1], num_answers=100_000)
    assert (crowd.running < 100_000).all()
    assert (crowd.total_s > answers(num_engines=[1, 1, 1], num_answers=10_000).total_s).all()


def test_answers_that_may_be_behind_hide_the_tail_but_not_the_work():
    found = answers()
    assert (found.behind_s(0) == found.total_s).all()
    for staleness in (1, 2, 8):
        later = found.behind_s(staleness)
        assert (later <= found.behind_s(staleness - 1)).all() and (later >= found.work_s).all()


def test_a_pool_adds_its_phases_and_two_pools_run_side_by_side():
    parts = {
        "generation_s": 40.0, "scoring_s": 6.0, "training_s": 20.0, "weights_s": 5.0,
        "states_s": 2.0, "bar": (0.8, 1.5),
    }  # fmt: skip
    one, two = (RlStep(**parts, is_colocated=each) for each in (True, False))
    assert (one.total_s, two.total_s) == (73.0, 45.0)
    assert tuple(one.total) == (73.0, pytest.approx(58.4), 109.5)
    assert one.binds == two.binds == "generation"


def test_a_step_has_an_update_for_each_part_of_its_answers():
    plans = TrainingPlans(data=8, shard=8, zero=1, row_tokens=600, num_micro=16)
    update = training_step(SHAPE, plans, H100)
    given = {
        "num_answers": 256, "prompt_tokens": 100.0, "lengths": LENGTHS,
        "weights_bytes": 16e9, "num_trained": 8e9,
    }  # fmt: skip

    def steps(**changes):
        work = RlWork(**given | {"answers_per_update": 128} | changes)
        return rl_steps(
            work, H100, PLANS, answers(), update,
            devices=8, is_colocated=True, efficiency=rl_efficiency(),
        )[0]  # fmt: skip

    once, twice = steps(answers_per_update=256), steps()
    assert twice.training_s == pytest.approx(2 * once.training_s)
    assert once.training_s == pytest.approx(
        rl_efficiency().learning_factor * float(update.total_s[0])
    )
    assert steps(score_passes=0).scoring_s == 0.0
    # 8e9 elements of 12 bytes on 8 devices, to the host and back at 25 GB/s
    assert once.states_s == pytest.approx(2 * 8e9 * 12 / 8 / 25e9)


def test_a_forward_pass_is_a_third_of_a_step_without_recomputation():
    plans = TrainingPlans(row_tokens=4096, num_micro=8)
    with_all = TrainingPlans(row_tokens=4096, num_micro=8, recompute=2)
    plain, again = (training_step(SHAPE, each, H100) for each in (plans, with_all))
    rest = plain.total_s - plain.parts["optimizer"] - plain.parts["data"]
    assert forward_s(plain) == pytest.approx(rest / 3)
    assert forward_s(again) == pytest.approx(forward_s(plain), rel=0.1)
