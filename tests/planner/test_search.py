"""The search: what fits, what is best, and that more of anything never makes less possible."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cost import cluster_step, step_memory
from phalanx.cost.local_shapes import local_config
from phalanx.cost.step_memory import memory_terms
from phalanx.planner.candidates import Choice
from phalanx.planner.search import MEMORY_ERROR_FRAC, answer, limit_of, smallest_plan, units_for
from tests.planner.plan_cases import CONFIG, LENGTHS, asked, profile, training

LORA_JOB, FULL_JOB = training(), training("full")
GIB = 2.0**30


def test_an_answer_adds_up():
    found = answer(LORA_JOB, asked(4))
    assert found.fits and found.verdict == "fits" and found.num_fit == found.num_plans
    assert found.limit_bytes == 0.92 * 79.65 * 2**30
    expected, least, most = found.hours
    assert least < expected < most
    steps = LORA_JOB.num_steps
    formula_s = found.best.seconds.total_s
    assert expected == pytest.approx(formula_s / found.efficiency.median * steps / 3600)
    assert found.dollars[0] == pytest.approx(expected * 4 * 6.88)
    which, share = found.bound
    assert found.best.seconds.shares()[which] == share == max(found.best.seconds.shares().values())
    table = found.to_dict()
    assert table["peak_bytes"] == sum(table["memory"].values())
    assert table["plan"]["mesh"] == found.best.candidate.layout.mesh.to_dict()


def test_steps_of_an_epoch_and_of_a_number():
    tokens = sum(LENGTHS) * 8
    assert -(-tokens // 1024) <= LORA_JOB.num_steps <= -(-tokens // 1024) + 1
    assert training(epochs=0.0, steps=7).num_steps == 7
    half = training(epochs=0.5).num_steps
    assert half <= LORA_JOB.num_steps / 2 + 1


def test_the_fastest_plan_is_chosen_or_the_smallest():
    fastest, smallest = (answer(FULL_JOB, asked(4), minimise=name) for name in ("time", "memory"))
    assert fastest.best.seconds.total_s <= smallest.best.seconds.total_s
    assert smallest.best.sized.peak_bytes <= fastest.best.sized.peak_bytes
    assert smallest.best.sized.peak_bytes == smallest.smallest.peak_bytes


def test_a_plan_with_room_is_preferred_to_a_faster_one_without():
    fastest = answer(FULL_JOB, asked(2))
    smallest = fastest.smallest.peak_bytes
    limit = smallest * (1 + MEMORY_ERROR_FRAC) * 1.01
    assert fastest.best.sized.peak_bytes > smallest
    assert answer(FULL_JOB, asked(2), limit_bytes=limit).verdict == "fits"
    tight = answer(FULL_JOB, asked(2), limit_bytes=smallest * 1.01)
    assert tight.fits and tight.verdict == "tight"


def test_what_does_not_fit_says_what_it_needs_most():
    found = answer(FULL_JOB, asked(2), limit_bytes=1e6)
    assert not found.fits and found.verdict == "does not fit" and found.best is None
    assert found.smallest.largest_term in found.smallest.terms
    assert found.to_dict()["memory"] == dict(found.smallest.terms)


def test_a_deadline_makes_a_plan_too_slow():
    hours = answer(LORA_JOB, asked()).hours[0]
    assert answer(LORA_JOB, asked(), limit_s=3600 * hours * 1.01).fits
    slow = answer(LORA_JOB, asked(), limit_s=3600 * hours * 0.99)
    assert not slow.fits and slow.verdict == "too slow"


def test_more_ranks_than_documents_leave_no_legal_plan():
    alone = training(profile=profile((300,), times=2), batch_tokens=300)
    found = answer(alone, asked(7))
    assert found.verdict == "no legal plan" and sum(found.illegal.values()) > 0


def test_what_a_job_fixes_is_kept():
    fixed = Choice(recompute=("full",), row_tokens=700, mesh={"shard": 2})
    found = answer(training(choice=fixed), asked())
    candidate = found.best.candidate
    assert (candidate.recompute, candidate.row_tokens, candidate.layout.shard) == ("full", 700, 2)
    assert found.num_plans == 2  # gathered weights are kept, or given back


@settings(max_examples=40, deadline=None)
@given(
    limits=st.lists(st.floats(1e6, 1e9), min_size=2, max_size=2),
    number=st.sampled_from([1, 2, 4]),
    method=st.sampled_from(["lora", "full"]),
)
def test_more_memory_never_turns_fits_into_does_not(limits, number, method):
    job = {"lora": LORA_JOB, "full": FULL_JOB}[method]
    less, more = (answer(job, asked(number), limit_bytes=each) for each in sorted(limits))
    assert less.fits <= more.fits and less.num_fit <= more.num_fit
    if less.verdict == "fits":
        assert more.verdict == "fits"
        assert more.best.seconds.total_s <= less.best.seconds.total_s


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(1, 1 << 17), min_size=2, max_size=2),
    recompute=st.sampled_from(["none", "selective", "full"]),
    method=st.sampled_from(["lora", "full"]),
    plan=st.integers(0, 3),
)
def test_longer_rows_never_need_less_memory(rows, recompute, method, plan):
    job = {"lora": LORA_JOB, "full": FULL_JOB}[method]
    layouts = {each.candidate.layout: each for each in _sized(job)}
    layout, sized = list(layouts.items())[plan]
    local = local_config(CONFIG, layout.tensor)
    units = units_for(job, layout, sized.work)
    short, long = (
        sum(
            memory_terms(
                local,
                replace(sized.work, longest_row=n, row_tokens=n, row_counted=n),
                units,
                recompute=recompute,
            ).values()
        )
        for n in sorted(rows)
    )
    assert short <= long


def _sized(job):
    from phalanx.planner.search import _sized_plans

    return _sized_plans(job, asked(4).cluster, Counter())


def test_more_recomputation_never_needs_more_memory():
    by_plan = {}
    for each in _sized(FULL_JOB):
        candidate = each.candidate
        by_plan.setdefault((candidate.layout, candidate.row_tokens), []).append(each.peak_bytes)
    for none, selective, full in by_plan.values():
        assert selective <= none and full <= none


def test_the_smallest_plan_of_a_cluster():
    found = smallest_plan(FULL_JOB, asked(4).cluster)
    assert found.peak_bytes == min(each.peak_bytes for each in _sized(FULL_JOB))


@pytest.mark.parametrize("job", [LORA_JOB, FULL_JOB], ids=["lora", "full"])
def test_twice_the_devices_never_need_more_memory_each(job):
    peaks = [smallest_plan(job, asked(number).cluster).peak_bytes for number in (1, 2, 4, 8, 16)]
    assert peaks == sorted(peaks, reverse=True)


def test_the_limit_is_what_the_device_leaves_or_less():
    cluster = asked(1, "v5p").cluster
    assert limit_of(cluster, 0.0) == 0.95 * 102.8e9
    assert limit_of(cluster, GIB) == GIB and limit_of(cluster, 1e15) == 0.95 * 102.8e9


def test_operators_are_listed_once_for_all_plans_of_all_clusters(monkeypatch):
    """What decides the time of a search: lists of operators, not plans."""
    calls = Counter()
    for module in (cluster_step, step_memory):
        listed = module.operators

        def counted(*args, of=listed, **kwargs):
            calls["operators"] += 1
            return of(*args, **kwargs)

        monkeypatch.setattr(module, "operators", counted)
    job = training()
    for number, name in ((2, "h100"), (8, "h100"), (4, "v5p"), (8, "h200")):
        answer(job, asked(number, name))
    # tensor degrees 1, 2, 4, 8, the last three with split tokens too: one list of prices and three
    # of recomputation each
    assert calls["operators"] <= 7 * 4
