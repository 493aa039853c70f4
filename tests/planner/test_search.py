"""The search: what fits, what is best, and that more of anything never makes less possible."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cost.training_memory import training_memory
from phalanx.cost.training_plans import RECOMPUTE, SCHEDULES, TrainingPlans
from phalanx.cost.training_step import training_step
from phalanx.models.named import named_model
from phalanx.planner import search
from phalanx.planner import sized as sized_module
from phalanx.planner.legality import NO_HOST
from phalanx.planner.refined import PLAYED, refine
from phalanx.planner.runnable import Layout
from phalanx.planner.search import SAME_TIME_FRAC, TIGHT_COSTS, answer
from phalanx.planner.sized import limit_of, sized_plans, smallest_plan
from phalanx.planner.training import Choice, Training
from tests.planner.plan_cases import LENGTHS, asked, profile, training

LORA_JOB, FULL_JOB = training(), training("full")
LLAMA = named_model("llama-3.1-405b").config
GIB = 2.0**30


def pretraining(config=None, **changes):
    """Rows of one length."""
    given = {"config": config, "seq_tokens": 8192, "method": "pretrain", "batch_tokens": 1 << 24}
    return Training(**(given | {"epochs": 0.0, "steps": 1} | changes))


@cache
def llama():
    """405B at 8,192 tokens on 16,384 devices, with the plans whose pipelines were played."""
    played = []

    def watched(shape, plans, times, cut):
        played.append(plans)
        return refine(shape, plans, times, cut)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "refine", watched)
        return answer(pretraining(LLAMA), asked(16384)), played


def test_an_answer_adds_up():
    found = answer(LORA_JOB, asked(4))
    assert found.fits and found.verdict == "fits" and found.num_fit == found.num_plans
    assert found.limit_bytes == 0.92 * 79.65 * 2**30
    expected, least, most = found.hours
    assert least < expected < most
    assert expected == pytest.approx(found.best.total_s * LORA_JOB.num_steps / 3600)
    assert found.dollars[0] == pytest.approx(expected * 4 * 6.88)
    which, share = found.bound
    assert found.best.shares()[which] == share == max(found.best.shares().values())
    assert sum(found.best.shares().values()) == pytest.approx(1.0)
    table = found.to_dict()
    assert table["peak_bytes"] == sum(table["memory"].values())
    assert table["plan"]["columns"] == found.best.sized.row


def test_prices_are_those_of_the_cost_models():
    found = answer(FULL_JOB, asked(4))
    machine, row = asked(4).cluster.machine, dict(found.best.sized.row)
    plans = TrainingPlans(**row, method="full", software="phalanx")
    step = training_step(FULL_JOB.shape, plans, machine)
    assert found.best.total_s == pytest.approx(step.total_s[0])
    bar = (found.best.low_s, found.best.high_s)
    assert bar == pytest.approx((step.low_s[0], step.high_s[0]))
    longest = FULL_JOB.rows.options(int(row["data"]))
    at = longest["row_limit"].index(found.best.sized.row_limit)
    held = replace(plans, row_tokens=longest["longest_tokens"][at])
    memory = training_memory(FULL_JOB.shape, held, machine)
    assert found.best.sized.peak_bytes == pytest.approx(memory.peak_bytes[0])


def test_steps_of_an_epoch_and_of_a_number():
    tokens = sum(LENGTHS) * 8
    assert -(-tokens // 1024) <= LORA_JOB.num_steps <= -(-tokens // 1024) + 1
    assert training(epochs=0.0, steps=7).num_steps == 7
    half = training(epochs=0.5).num_steps
    assert half <= LORA_JOB.num_steps / 2 + 1


def test_the_fastest_plan_is_chosen_or_the_smallest():
    fastest, smallest = (answer(FULL_JOB, asked(4), minimise=name) for name in ("time", "memory"))
    assert fastest.fastest.total_s <= smallest.best.total_s
    assert smallest.best.sized.peak_bytes <= fastest.best.sized.peak_bytes
    assert smallest.best.sized.peak_bytes == smallest.smallest.peak_bytes


def test_among_plans_that_cannot_be_told_apart_one_that_runs_is_taken(monkeypatch):
    monkeypatch.setattr(search, "NUM_PLAYED", 0)
    found = answer(FULL_JOB, asked(4))
    assert found.best.is_runnable and found.best is found.runnable
    assert found.fastest.total_s <= found.best.total_s <= found.fastest.high_s
    assert found.best.low_s <= found.fastest.total_s
    plans = sized_plans(FULL_JOB, asked(4).cluster)
    times = training_step(FULL_JOB.shape, plans.plans, asked(4).cluster.machine)
    known = [SCHEDULES.index(name) for name in search.PROVEN_SCHEDULES]
    proven = (plans.table["pipeline"] == 1) | np.isin(plans.table["schedule"], known)
    within = (times.total_s <= found.fastest.high_s) & (times.low_s <= found.fastest.total_s)
    within &= proven
    assert found.num_alike == within.sum() > 1
    assert (times.total_s[plans.runnable() & proven]).min() == found.best.total_s


def test_the_best_pipelines_are_played():
    found, (plans,) = llama()
    assert 1 <= plans.shape[0] <= search.NUM_PLAYED and (plans.pipeline > 1).all()
    assert {SCHEDULES[at] for at in plans.schedule.tolist()} <= set(PLAYED)
    assert sum(found.fastest.parts.values()) == pytest.approx(found.fastest.total_s)
    assert found.fastest.low_s <= found.fastest.total_s <= found.fastest.high_s


def test_a_schedule_without_a_published_run_is_told_beside_and_never_taken():
    found, _ = llama()
    schedules = {SCHEDULES[int(each.sized.row["schedule"])] for each in (found.best, found.fastest)}
    assert schedules <= set(search.PROVEN_SCHEDULES)
    assert SCHEDULES[int(found.unproven.sized.row["schedule"])] not in search.PROVEN_SCHEDULES
    assert found.unproven.total_s < found.fastest.total_s
    assert found.to_dict()["unproven"]["step_s"] == found.unproven.total_s


def test_what_does_not_run_yet_is_told_and_the_best_that_does_is_beside_it(monkeypatch):
    fastest = answer(FULL_JOB, asked(4)).fastest.sized.row
    alike = ("data", "tensor", "pipeline", "context", "zero")
    monkeypatch.setattr(
        sized_module,
        "obstacles",
        lambda columns, **_: {
            "this": np.logical_and.reduce([columns[n] == fastest[n] for n in alike])
        },
    )
    found = answer(FULL_JOB, asked(4))
    assert found.fastest.sized.missing == ("this",) and not found.runnable.sized.missing
    assert found.runnable.total_s >= found.fastest.total_s
    table = found.to_dict()
    told = table["fastest"] if found.best is found.runnable else table["plan"]
    runs = table["plan"] if found.best is found.runnable else table["runnable"]
    assert told["simulated_only"] == ["this"] and "mesh" not in told
    assert runs["mesh"].get("tp", 1) == found.runnable.sized.row["tensor"]


def test_a_plan_with_room_is_preferred_unless_it_takes_twice_as_long(monkeypatch):
    monkeypatch.setattr(search, "NUM_PLAYED", 0)
    plans = sized_plans(FULL_JOB, asked(4).cluster)
    times = training_step(FULL_JOB.shape, plans.plans, asked(4).cluster.machine).total_s
    peak, high = plans.memory.peak_bytes, plans.memory.high_bytes
    for limit in np.quantile(high, [0.02, 0.1, 0.5]):
        found = answer(FULL_JOB, asked(4), limit_bytes=float(limit))
        fits, has_room = peak <= limit, high <= limit
        with_room = times[has_room].min()
        without = times[fits & ~has_room].min(initial=np.inf)
        expected = without if TIGHT_COSTS * without < with_room else with_room
        assert found.fastest.total_s == pytest.approx(expected)
    smallest = peak.argmin()
    tight = answer(FULL_JOB, asked(4), limit_bytes=float(peak[smallest] * 1.0001))
    assert tight.fits and tight.verdict == "tight"


def test_what_does_not_fit_says_what_it_needs_most():
    found = answer(FULL_JOB, asked(2), limit_bytes=1e6)
    assert not found.fits and found.verdict == "does not fit" and found.best is None
    assert found.smallest.largest_term in found.smallest.terms
    assert found.to_dict()["memory"] == dict(found.smallest.terms)


def test_a_deadline_makes_a_plan_too_slow_and_a_budget_too_dear():
    free = answer(LORA_JOB, asked())
    hours, dollars = free.hours[0], free.dollars[0]
    assert answer(LORA_JOB, asked(), limit_s=3600 * hours * 1.01).fits
    slow = answer(LORA_JOB, asked(), limit_s=3600 * hours * 0.99)
    assert not slow.fits and slow.verdict == "too slow"
    assert answer(LORA_JOB, asked(), budget_usd=dollars * 1.01).fits
    dear = answer(LORA_JOB, asked(), budget_usd=dollars * 0.99)
    assert not dear.fits and dear.verdict == "too dear"


def test_more_ranks_than_documents_leave_no_legal_plan():
    alone = training(profile=profile((300,), times=2), batch_tokens=300)
    found = answer(alone, asked(7))
    assert found.verdict == "no legal plan" and sum(found.illegal.values()) > 0
    assert found.to_dict()["verdict"] == "no legal plan"


def test_what_a_job_fixes_is_kept():
    fixed = Choice(recompute=("full",), row_tokens=700, mesh={"shard": 2})
    found = answer(training(choice=fixed), asked())
    sized = found.best.sized
    assert (sized.recompute, sized.row_limit, sized.row["shard"]) == ("full", 700, 2)
    assert found.num_plans == 2  # gathered weights are kept, or given back


def test_moments_leave_for_the_host_only_where_a_plan_would_not_fit_otherwise():
    roomy = sized_plans(FULL_JOB, asked(2).cluster)
    assert not roomy.table["offload"].any()
    limit = float(np.quantile(roomy.memory.peak_bytes, 0.3))
    small = sized_plans(FULL_JOB, asked(2).cluster, limit)
    away = small.table["offload"] > 0
    assert away.sum() == (roomy.memory.peak_bytes > limit).sum() > 0
    assert (small.memory.host_bytes[away] > 0).all() and small.runnable()[away].any()
    assert not sized_plans(LORA_JOB, asked(2).cluster, 1e6).table["offload"].any()


def test_moments_leave_only_for_hosts_that_have_room():
    qwen = pretraining(named_model("qwen3-32b").config, seq_tokens=4096, batch_tokens=1 << 16)
    cluster = asked(1, "h100").cluster  # 262 GB of moments, 275 GB of host memory: not 405B's
    assert (sized_plans(qwen, cluster).table["offload"] > 0).any()
    llama_405b = sized_plans(pretraining(LLAMA, batch_tokens=1 << 16), cluster)
    assert not llama_405b.table["offload"].any() and llama_405b.illegal[NO_HOST] > 0


def test_plans_with_and_without_moments_on_the_device_stand_in_one_table():
    job, cluster = pretraining(FULL_JOB.config, seq_tokens=2048, batch_tokens=1 << 15), asked(4)
    limit = float(sized_plans(job, cluster.cluster).memory.peak_bytes.min()) * 1.1
    plans = sized_plans(job, cluster.cluster, limit)
    memory = training_memory(job.shape, plans.plans, cluster.cluster.machine)
    assert plans.plans.shape == (len(plans),) and set(plans.table["offload"]) == {0.0, 1.0}
    assert plans.memory.peak_bytes == pytest.approx(memory.peak_bytes)
    assert plans.memory.host_bytes == pytest.approx(memory.host_bytes)


@settings(max_examples=20, deadline=None)
@given(
    limits=st.lists(st.floats(1e6, 1e9), min_size=2, max_size=2),
    number=st.sampled_from([1, 2, 4]),
    method=st.sampled_from(["lora", "full"]),
)
def test_more_memory_never_turns_fits_into_does_not(limits, number, method):
    job = {"lora": LORA_JOB, "full": FULL_JOB}[method]
    less, more = (answer(job, asked(number), limit_bytes=each) for each in sorted(limits))
    assert less.fits <= more.fits
    if less.verdict == "fits":
        assert more.fastest.total_s <= less.fastest.total_s


@settings(max_examples=15, deadline=None)
@given(
    rows=st.lists(st.sampled_from([2**at for at in range(9, 18)]), min_size=2, max_size=2),
    number=st.sampled_from([1, 4, 8]),
    limit=st.floats(1.5e9, 3e10),
)
def test_a_longer_context_never_fits_where_a_shorter_one_does_not(rows, number, limit):
    peaks = []
    for seq in sorted(rows):
        job = pretraining(FULL_JOB.config, seq_tokens=seq, batch_tokens=seq * 8)
        peaks.append(sized_plans(job, asked(number).cluster, limit).memory.peak_bytes.min())
    assert (peaks[1] <= limit) <= (peaks[0] <= limit) and peaks[0] <= peaks[1]


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.integers(1, 1 << 17), min_size=2, max_size=2),
    method=st.sampled_from(["lora", "full"]),
)
def test_longer_rows_never_need_less_memory(rows, method):
    job = {"lora": LORA_JOB, "full": FULL_JOB}[method]
    plans = sized_plans(job, asked(4).cluster).plans
    short, long = (
        training_memory(
            job.shape, replace(plans, row_tokens=np.asarray(n)), asked(4).cluster.machine
        ).peak_bytes
        for n in sorted(rows)
    )
    assert (short <= long).all()


def test_more_recomputation_never_needs_much_more_memory():
    """One layer is computed again at a time: that one is in memory beside the inputs of all."""
    plans = sized_plans(FULL_JOB, asked(4).cluster)
    order = [RECOMPUTE.index(name) for name in ("none", "selective", "full")]
    peaks = plans.memory.peak_bytes.reshape(-1, len(order))
    activations = plans.memory.terms["activations"].reshape(-1, len(order))
    assert (peaks[:, 1] <= peaks[:, 0]).all()
    assert (activations[:, 2] <= 2.01 * activations[:, 0]).all()


def test_the_smallest_plan_of_a_cluster():
    found = smallest_plan(FULL_JOB, asked(4).cluster)
    assert found.peak_bytes == pytest.approx(
        sized_plans(FULL_JOB, asked(4).cluster).memory.peak_bytes.min()
    )


@pytest.mark.parametrize("job", [LORA_JOB, FULL_JOB], ids=["lora", "full"])
def test_twice_the_devices_never_need_more_memory_each(job):
    peaks = [smallest_plan(job, asked(number).cluster).peak_bytes for number in (1, 2, 4, 8, 16)]
    assert peaks == sorted(peaks, reverse=True)


def test_the_limit_is_what_the_device_leaves_or_less():
    cluster = asked(1, "v5p").cluster
    assert limit_of(cluster, 0.0) == 0.95 * 102.8e9
    assert limit_of(cluster, GIB) == GIB and limit_of(cluster, 1e15) == 0.95 * 102.8e9


@pytest.mark.parametrize(
    ("row", "mesh", "names"),
    [
        ({"data": 4, "zero": 0, "shard": 1}, {"replicate": 4}, ["replicate"]),
        ({"data": 4, "zero": 3, "shard": 4}, {"shard": 4}, ["fsdp"]),
        ({"data": 8, "zero": 3, "shard": 4}, {"replicate": 2, "shard": 4}, ["fsdp", "replicate"]),
        ({"data": 2, "zero": 3, "shard": 2, "tensor": 4}, {"shard": 2, "tp": 4},
         ["fsdp", "megatron"]),
        ({"data": 1, "tensor": 2}, {"replicate": 1, "tp": 2}, ["replicate", "megatron"]),
    ],
)  # fmt: skip
def test_a_plan_that_runs_becomes_a_mesh_and_policies(row, mesh, names):
    from phalanx.planner.runnable import layout_of

    plans = TrainingPlans(**({"row_tokens": 512, "data": 1} | row))
    layout = layout_of(plans.row(0), casts=False, trains_all=False)
    assert layout.mesh.to_dict() == mesh and layout.num_data_ranks == row["data"]
    assert [table["name"] for table in layout.tables()] == names
    assert {spec.axis for spec in layout.specs} <= set(layout.mesh.names)


def test_float32_masters_of_one_device_are_kept_by_a_shard_of_one():
    found = answer(training("full", master_dtype="float32"), asked(1))
    layout = found.runnable.sized.layout(found.training)
    assert layout == Layout(zero=3) and layout.mesh.to_dict() == {"shard": 1}


def test_the_published_sizing_of_llama_3_is_legal_and_within_the_bar():
    """tp 8, pp 16: dp 128 at 8,192 tokens, cp 16 and dp 8 at 131,072 (arXiv 2407.21783)."""
    for seq, context, data in ((8192, 1, 128), (131072, 16, 8)):
        job = pretraining(LLAMA, seq_tokens=seq)
        found = llama()[0] if seq == 8192 else answer(job, asked(16384))
        plans = sized_plans(job, asked(16384).cluster, found.limit_bytes)
        table = plans.table
        published = (
            (table["tensor"] == 8) & (table["pipeline"] == 16)
            & (table["context"] == context) & (table["data"] == data)
            & (plans.memory.peak_bytes <= found.limit_bytes)
        )  # fmt: skip
        times = training_step(job.shape, plans.plans, asked(16384).cluster.machine).total_s
        assert times[published].min() <= found.fastest.high_s


def test_whose_software_is_assumed():
    h100, v5p = (asked(1, name).cluster.machine for name in ("h100", "v5p"))
    assert training().software_on(h100) == training("full").software_on(h100) == "phalanx"
    assert pretraining(LLAMA).software_on(h100) == "torch"
    assert training().software_on(v5p) == "maxtext"
    assert training(software="megatron:25.09").software_on(v5p) == "megatron:25.09"


def test_precision_and_frozen_bits_that_the_trainer_lacks_are_simulated_only():
    found = answer(training(precision="fp8", base_bits=4), asked())
    assert found.runnable is None and found.best is found.fastest
    assert {"products in fp8", "frozen weights of 4 bits"} <= set(found.best.sized.missing)
    plain = answer(training(), asked())
    assert found.smallest.terms["weights"] < plain.smallest.terms["weights"]


def test_a_machine_without_a_price_keeps_to_no_budget():
    found = answer(training(), asked(2, "h20"), budget_usd=1e9)
    assert found.verdict == "no price" and not found.fits
    assert answer(training(), asked(2, "h20")).fits
    assert answer(training(), asked(2, "h20")).to_dict()["dollars"] is None


@pytest.mark.parametrize("number", [4, 8])
def test_of_plans_that_take_the_same_time_the_one_with_the_fewest_axes_is_taken(number):
    config = named_model("llama-3.1-8b").config
    lengths = tuple(37 * at % 4001 + 200 for at in range(100))
    job = training(config=config, profile=profile(lengths, 1), batch_tokens=1 << 16)
    found = answer(job, asked(number))
    runs = [plan for plan in found.ranked if plan.is_runnable]
    same = [plan for plan in runs if plan.total_s <= (1 + SAME_TIME_FRAC) * runs[0].total_s]
    axes = ("tensor", "pipeline", "context", "expert")
    degrees = [sum(plan.sized.row[axis] > 1 for axis in axes) for plan in same]
    assert found.best.total_s <= (1 + SAME_TIME_FRAC) * runs[0].total_s
    assert sum(found.best.sized.row[axis] > 1 for axis in axes) == min(degrees) < max(degrees)
    assert found.runnable is found.best
