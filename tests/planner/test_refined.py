"""Plans whose pipelines are played: the formula's limits, and what it leaves out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cost.training_bubble import bubble_micro_batches, split_frac
from phalanx.cost.training_plans import RECOMPUTE, SCHEDULES, TrainingPlans
from phalanx.cost.training_step import StepTimes, training_step
from phalanx.errors import JobError
from phalanx.hardware import parse_cluster
from phalanx.job import load_job
from phalanx.layout.stage_split import most_stages
from phalanx.models.known import known_shape
from phalanx.models.named import named_model
from phalanx.planner.cuts import cut_of, equal_cut
from phalanx.planner.jobs import config_of
from phalanx.planner.make import make_plan
from phalanx.planner.refined import play_documents, refine
from phalanx.planner.training_shape import training_shape
from phalanx.registry import build
from tests.tiny_run import tiny_base

MACHINE = parse_cluster("8xh100").machine
SHAPE = known_shape("llama-3.1-8b")
INTERLEAVED = SCHEDULES.index("interleaved")


def plans(**columns) -> TrainingPlans:
    return TrainingPlans(**{"row_tokens": 4096, "pipeline": 4, "num_micro": 8} | columns)


def with_parts(count: int, **parts: float) -> StepTimes:
    """A step of these seconds and nothing else."""
    names = ("compute", "recompute", "tensor", "expert", "context", "overhead", "head", "bubble",
             "pipeline", "data", "optimizer")  # fmt: skip
    table = {name: np.full(count, parts.get(name, 0.0)) for name in names}
    total = sum(table.values())
    return StepTimes(table, total, total, total, None, "test")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [
        *(
            ("gpipe", 1),
            ("1f1b", 1),
            ("interleaved", 2),
            ("zero-bubble", 1),
            ("zbv", 2),
            ("dualpipe-v", 2),
        ),
        *(("hanayo", 2), ("hanayo", 4)),
    ],
)
def test_equal_stages_without_messages_idle_as_the_formula_says(schedule, virtual):
    """32 layers on 4 ranks, 8 micro-batches, a negligible head: (p - 1) / (m v) of the work of
    interleaved 1F1B, and so on (`cost.training_bubble`)."""
    shape = replace(SHAPE, vocab=1)
    table = plans(schedule=SCHEDULES.index(schedule), virtual=virtual)
    work_s = 8.0
    idle = bubble_micro_batches(table.schedule, 4, virtual, 8)
    idle_s = work_s / 8 * float(idle)
    found = refine(shape, table, with_parts(1, compute=work_s, bubble=idle_s, optimizer=1.0))
    assert found.is_played.all()
    assert found.waits_s[0] == pytest.approx(idle_s, rel=1e-4)
    assert found.total_s[0] == pytest.approx(work_s + idle_s + 1.0, rel=1e-4)


def test_a_plan_without_a_pipeline_or_an_order_keeps_the_formula():
    table = plans(pipeline=np.array([1, 4]), schedule=np.array([1, SCHEDULES.index("dualpipe")]))
    times = training_step(SHAPE, table, MACHINE)
    found = refine(SHAPE, table, times)
    assert not found.is_played.any()
    assert found.total_s.tolist() == times.total_s.tolist()


def test_a_long_step_is_told_by_two_short_ones():
    """200 micro-batches extrapolated as if all had been played."""
    from phalanx.planner import refined

    table = plans(num_micro=200, schedule=INTERLEAVED, virtual=2)
    times = training_step(SHAPE, table, MACHINE)
    told = refine(SHAPE, table, times).waits_s[0]
    row = {name: column[0] for name, column in table.columns().items()}
    parts = {name: float(values.reshape(1)[0]) for name, values in times.parts.items()}
    stages = refined._stages(SHAPE, table, row, parts, partial(equal_cut, 32))
    assert told == pytest.approx(refined._played_waits(row, stages, 200), rel=1e-6)


def test_a_played_step_stays_near_the_formula():
    table = plans(schedule=np.array([0, 1, 2, 2]), virtual=np.array([1, 1, 2, 4]), num_micro=16)
    times = training_step(SHAPE, table, MACHINE)
    found = refine(SHAPE, table, times)
    assert found.total_s == pytest.approx(times.total_s, rel=0.1)


@given(st.integers(1, 200), st.integers(1, 64))
def test_chunks_hold_all_layers_and_differ_by_one(layers, chunks):
    held = equal_cut(layers, chunks)
    assert held.sum() == layers
    assert held.max() - held.min() <= 1


def test_126_layers_on_128_chunks_leave_the_ends_empty():
    """As Llama 3 405B does for its embedding and its head."""
    held = equal_cut(126, 128)
    assert held[0] == held[-1] == 0
    assert (held[1:-1] == 1).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(64, 4096))
def test_whole_rows_on_every_rank_are_the_step_of_one_rank(data, num_micro, row_tokens):
    table = plans(data=data, num_micro=num_micro, row_tokens=row_tokens, pipeline=2, schedule=1)
    found = play_documents(SHAPE, table, MACHINE, [[[row_tokens]] * num_micro] * data)
    refined = refine(SHAPE, table, training_step(SHAPE, table, MACHINE))
    assert found.step_s == pytest.approx(refined.total_s[0], rel=1e-6)
    assert found.work_imbalance == pytest.approx(1.0)


def test_a_rank_with_longer_documents_holds_up_the_others():
    """Same tokens, but half the rows of one rank are one document: attention costs more."""
    table = plans(data=3, num_micro=4, row_tokens=32768, schedule=1)
    short = [[2048] * 16] * 4
    mixed = [[32768], [2048] * 16, [32768], [2048] * 16]
    alike = play_documents(SHAPE, table, MACHINE, [short] * 3)
    unlike = play_documents(SHAPE, table, MACHINE, [short, mixed, short])
    assert unlike.step_s > alike.step_s
    assert unlike.pipeline_s.argmax() == 1
    assert unlike.pipeline_s[0] == alike.pipeline_s[0]
    assert unlike.work_imbalance > 1.05
    assert unlike.played.idle_frac > alike.played.idle_frac


@pytest.mark.parametrize(
    "documents", [[[[64]]], [[[64]] * 8] * 2, [[[0]] * 8], [[[]] * 8], [[[64]] * 7]]
)
def test_documents_that_do_not_match_the_plan_are_an_error(documents):
    with pytest.raises(JobError) as caught:
        play_documents(SHAPE, plans(data=1, schedule=1), MACHINE, documents)
    assert caught.value.code == "job/bad-value" and "documents" in str(caught.value)


def test_a_schedule_without_an_order_cannot_play_documents():
    table = plans(schedule=SCHEDULES.index("dualpipe"))
    with pytest.raises(JobError, match="dualpipe"):
        play_documents(SHAPE, table, MACHINE, [[[64]] * 8])


def test_simulating_a_preset_needs_no_download_and_a_bare_shape_is_refused(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('[model]\nname = "llama-3.1-70b"\n[train]\nmethod = "pretrain"\n')
    assert config_of(load_job(path)).num_layers == 80
    path.write_text('[model]\nname = "deepseek-v3"\n[train]\nmethod = "pretrain"\n')
    with pytest.raises(JobError) as caught:
        config_of(load_job(path))
    assert caught.value.code == "model/unknown" and "phalanx plan" in str(caught.value)


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1f1b", 1), ("zero-bubble", 1), ("zbv", 2), ("dualpipe-v", 2)]
)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_formula_and_timeline_agree_on_what_parts_of_a_pass_compute_again(
    schedule, virtual, recompute
):
    """Equal stages without a head: an input and a weight gradient each compute a layer again, so
    zero bubble pays for two recomputations; DualPipeV splits the passes of fill and drain alone.
    """
    shape = replace(SHAPE, vocab=1)
    table = plans(
        schedule=SCHEDULES.index(schedule),
        virtual=virtual,
        num_micro=16,
        recompute=RECOMPUTE.index(recompute),
        software="torch",
    )
    times = training_step(shape, table, MACHINE)
    found = refine(shape, table, times)
    assert found.total_s == pytest.approx(times.total_s, rel=0.01)


def test_parts_that_compute_again_do_so_twice():
    one, two = (
        training_step(SHAPE, plans(schedule=SCHEDULES.index(name), recompute=2), MACHINE).parts
        for name in ("1f1b", "zero-bubble")
    )
    assert two["recompute"] == pytest.approx(2 * one["recompute"])
    assert two["compute"] == pytest.approx(one["compute"])


@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv", "dualpipe-v"])
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_the_share_of_split_passes_is_that_of_the_order(schedule, ranks):
    """Of the rank that has most of them."""
    for num_micro in (2 * ranks, 5 * ranks + 1):
        lists = build("pipeline", {"name": schedule.replace("-", "_")}).order(ranks, num_micro)
        shares = [
            sum(step.kind == "W" for step in steps) / sum(step.kind in "BW" for step in steps)
            for steps in lists
        ]
        share = split_frac(SCHEDULES.index(schedule), ranks, num_micro)
        assert float(share) == pytest.approx(max(shares))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 9),
    st.sampled_from([64, 5000]),
    st.booleans(),
    st.sampled_from([("1f1b", 1), ("interleaved", 2), ("zbv", 2)]),
    st.sampled_from([1, 2, 3]),
)
def test_planner_simulation_and_training_cut_alike(layers, vocab, tied, schedule, ranks):
    """One split, for tied and untied tables, odd layer counts and stages without a layer."""
    config = replace(tiny_base(num_layers=layers, vocab_size=vocab), tied_head=tied)
    name, virtual = schedule
    chunks = ranks * virtual
    if ranks == 1 or chunks > most_stages(config):
        return
    flags = {
        "model.name": "tiny",
        "train.method": "pretrain",
        "train.item_tokens": [8] * 2 * ranks,
        "plan.mesh": {"shard": 1, "pp": ranks},
        "plan.data": "zero",
        "plan.pipeline": {"name": name} | ({"virtual": 2} if name == "interleaved" else {}),
    }
    job = load_job(None, flags)
    trained = [each.stop - each.start for each in training_shape(job, config, ranks).stages]
    assert cut_of(config, None, "", layers)(chunks).tolist() == trained
    played: dict[int, set[str]] = {stage: set() for stage in range(chunks)}
    for action in chain(*make_plan(job, config, f"{ranks}xh100").program.lists):
        if action.kind == "compute" and action.phase == "F" and ".layers." in action.layer:
            played[action.stage].add(action.layer.rsplit(".", 1)[0])
    assert [len(played[stage]) for stage in range(chunks)] == trained


def test_other_programs_and_models_keep_equal_chunks():
    config = tiny_base(num_layers=5, vocab_size=5000)
    equal = equal_cut(5, 3).tolist()
    assert cut_of(config, None, "megatron", 5)(3).tolist() == equal
    assert cut_of(config, None, "", 5)(3).tolist() != equal
    assert cut_of(None, None, "", 126)(128)[0] == 0


def test_the_busiest_rank_of_a_refined_plan_is_that_of_its_cut():
    """8B in 8 stages: training takes layers off the ends, so equal chunks would tell another
    step; parts sum to it, and none is negative."""
    config = named_model("llama-3.1-8b").config
    table = plans(pipeline=8, num_micro=16, software="phalanx", method="full")
    times = training_step(SHAPE, table, MACHINE)
    ours, equal = (
        refine(SHAPE, table, times, cut_of(config, None, software, 32))
        for software in ("", "megatron")
    )
    assert ours.total_s[0] < 0.97 * equal.total_s[0]
    for found in (ours, equal):
        assert sum(float(each[0]) for each in found.parts.values()) == pytest.approx(
            found.total_s[0]
        )
        assert min(float(each[0]) for each in found.parts.values()) >= 0
