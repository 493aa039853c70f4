"""Searches of very many plans find what whole searches find."""

import numpy as np
import pytest

from phalanx.models.known import known_shape
from phalanx.models.named import named_model
from phalanx.planner import sized
from phalanx.planner.search import answer
from phalanx.planner.training import Training
from tests.planner.plan_cases import asked

QWEN = named_model("qwen3-32b").config
JOBS = {
    "dense": (Training(config=QWEN, seq_tokens=4096, method="pretrain", batch_tokens=1 << 20,
                       epochs=0.0, steps=1), 32),
    "mixture": (Training(known_shape=known_shape("mixtral-8x7b"), seq_tokens=4096,
                         method="pretrain", batch_tokens=1 << 20, epochs=0.0, steps=1), 32),
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_leaving_out_layouts_that_cannot_fit_changes_nothing(name, monkeypatch):
    job, number = JOBS[name]
    monkeypatch.setattr(sized, "MANY_PLANS", 10**9)
    whole = answer(job, asked(number))
    monkeypatch.setattr(sized, "MANY_PLANS", 0)
    monkeypatch.setattr(sized, "MOST_PLANS", 10**9)
    pruned = answer(job, asked(number))
    assert (pruned.num_fit, pruned.num_alike) == (whole.num_fit, whole.num_alike)
    assert pruned.fastest == whole.fastest and pruned.runnable == whole.runnable
    assert pruned.num_plans < whole.num_plans <= pruned.num_listed + whole.num_plans


@pytest.mark.parametrize("name", JOBS)
def test_the_most_promising_half_holds_a_plan_as_good(name, monkeypatch):
    job, number = JOBS[name]
    whole = answer(job, asked(number))
    monkeypatch.setattr(sized, "MANY_PLANS", 0)
    monkeypatch.setattr(sized, "MOST_PLANS", whole.num_plans // 4)
    part = answer(job, asked(number))
    assert part.num_plans < whole.num_plans
    assert part.fastest.total_s <= 1.05 * whole.fastest.total_s


def test_nothing_fits_and_the_smallest_plan_is_still_found(monkeypatch):
    job, number = JOBS["dense"]
    monkeypatch.setattr(sized, "MANY_PLANS", 10**9)
    least = sized.sized_plans(job, asked(number).cluster, 1.0).memory.peak_bytes.min()
    monkeypatch.setattr(sized, "MANY_PLANS", 0)
    found = sized.sized_plans(job, asked(number).cluster, 1.0)
    assert len(found) and np.isclose(found.memory.peak_bytes.min(), least)
