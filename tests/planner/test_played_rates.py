"""A played step takes what its plan is priced at, but for what the timeline adds."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cli.app import run
from phalanx.cost.model_shape import shape_of
from phalanx.cost.roofline import RooflineCost
from phalanx.cost.training_plans import RECOMPUTE
from phalanx.errors import JobError
from phalanx.hardware import parse_cluster
from phalanx.job import load_job
from phalanx.models.known import known_shape
from phalanx.models.named import named_model
from phalanx.models.spec import LoraSpec
from phalanx.plan import Plan
from phalanx.planner.jobs import config_of
from phalanx.planner.make import Planned, make_plan
from phalanx.planner.runnable import layout_of
from phalanx.planner.simulate import simulate
from phalanx.planner.sized import sized_plans
from phalanx.planner.training import Training
from phalanx.planner.written import layout_columns
from phalanx.registry import build
from tests.tiny_run import tiny_base

ITEMS = [4096] * 8
SPLIT = {"name": "megatron", "sequence_parallel": True, "gather_twice": False}


def planned(on: str, model: str = "llama-3.1-8b", **flags) -> Planned:
    keys = {"model.name": model, "train.method": "full", "train.item_tokens": ITEMS}
    keys |= {name.replace("__", "."): value for name, value in flags.items()}
    job = load_job(None, keys)
    return make_plan(job, config_of(job), on)


def ratio(plan: Planned) -> float:
    assert plan.priced_s is not None and plan.rates.startswith("rates: efficiencies fitted")
    return simulate(plan).trace.end_s / plan.priced_s


@pytest.mark.parametrize(
    ("on", "flags", "least", "most"),
    [
        # of FSDP the first gather and the last reduction have nothing to hide behind
        ("8xh100", {}, 1.0, 1.02),
        ("8xh100", {"train__method": "lora", "plan__mesh": {"replicate": 8},
                    "plan__data": "replicate"}, 0.999, 1.002),
        # zero gathers what is updated after the update; Megatron's does beside the next step
        ("8xh100", {"plan__data": {"name": "zero", "stage": 1}}, 1.0, 1.03),
        # the head's loss makes its gradients forward, and the host's seconds per step are no pass
        ("4xh100", {"plan__mesh": {"pp": 4}, "plan__pipeline": "1f1b"}, 0.99, 1.005),
        ("4xh100", {"plan__mesh": {"pp": 4}, "plan__pipeline": "1f1b",
                    "plan__recompute": "full"}, 0.99, 1.005),
        ("4xh100", {"plan__mesh": {"pp": 4}, "plan__pipeline": "zero_bubble",
                    "plan__recompute": "full"}, 0.99, 1.01),
        ("8xh100", {"plan__mesh": {"cp": 4, "tp": 2}, "plan__tensor": SPLIT,
                    "plan__context": "ring"}, 0.995, 1.005),
        # exchanges of two axes around a block run side by side when played
        ("8xh100", {"plan__mesh": {"cp": 4, "tp": 2}, "plan__tensor": SPLIT,
                    "plan__context": "ulysses"}, 0.96, 1.0),
        ("8xh100", {"plan__mesh": {"shard": 2, "pp": 2, "tp": 2}, "plan__tensor": "megatron",
                    "plan__data": {"name": "zero", "stage": 2}, "plan__pipeline": "1f1b"},
         0.995, 1.03),
    ],
)  # fmt: skip
def test_a_played_step_takes_what_it_is_priced_at(on, flags, least, most):
    assert least < ratio(planned(on, **flags)) < most


def test_a_folded_step_of_405b_takes_what_it_is_priced_at():
    mesh = {"shard": 8, "pp": 16, "tp": 8}
    flags = {"plan__mesh": mesh, "plan__tensor": SPLIT, "plan__data": {"name": "zero", "stage": 2}}
    plan = planned(
        "1024xh100",
        "llama-3.1-405b",
        **flags,
        plan__pipeline="1f1b",
        train__method="pretrain",
        train__item_tokens=[8192] * 16,
    )
    assert ratio(plan) == pytest.approx(1.0, abs=0.02)


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(["lora", "full", "pretrain"]),
    st.sampled_from(RECOMPUTE),
    st.integers(1, 5),
    st.integers(1, 5000),
    st.booleans(),
)
def test_a_step_without_hidden_exchanges_is_its_price(method, recompute, items, tokens, on_tensor):
    """Nothing waits and nothing hides, so every part of the price is in some action."""
    flags = (
        {"plan__mesh": {"replicate": 1, "tp": 2}, "plan__tensor": "megatron"} if on_tensor else {}
    )
    plan = planned(
        f"{1 + on_tensor}xh100",
        **({"plan__mesh": {"replicate": 1}, "plan__data": "replicate"} | flags),
        train__method=method,
        plan__recompute=recompute,
        train__item_tokens=[tokens] * items,
    )
    assert ratio(plan) == pytest.approx(1.0, rel=2e-3)


def test_grains_take_the_same_time():
    flags = {"plan__mesh": {"pp": 4}, "plan__pipeline": "zero_bubble", "plan__data": ""}
    steps = [
        simulate(planned("4xh100", **flags, plan__grain=grain)).trace.end_s
        for grain in ("stage", "unit", "operator")
    ]
    assert steps == pytest.approx([steps[0]] * 3)


def test_toys_and_tables_of_costs_keep_their_times_and_the_machines_own_rates_can_be_asked_for():
    toy = planned("2xh100", "toy", plan__mesh={"pp": 2}, plan__data="", train__item_tokens=[8] * 2)
    assert isinstance(toy.cost, RooflineCost) and toy.priced_s is None
    job = load_job(None, {"model.name": "llama-3.1-8b", "train.item_tokens": ITEMS})
    own = make_plan(job, config_of(job), "8xh100", rates="machine")
    assert isinstance(own.cost, RooflineCost) and "as they stand" in own.rates
    with pytest.raises(JobError, match="--rates"):
        make_plan(job, config_of(job), "8xh100", rates="fast")


def test_a_layout_without_a_price_is_played_at_the_machines_rates_and_says_so():
    plan = planned("8xh100", plan__mesh={"shard": 4, "tp": 2})
    assert isinstance(plan.cost, RooflineCost) and plan.priced_s is None
    assert "no policy uses the axis 'tp'" in plan.rates


@pytest.mark.parametrize(
    ("method", "model"), [("lora", "dense"), ("full", "dense"), ("full", "mixture")]
)
def test_a_layout_that_is_written_down_is_read_as_the_row_that_was_priced(method, model):
    """Every plan that `phalanx train` runs, as its lockfile has it."""
    config = named_model("llama-3.1-8b").config
    known = known_shape("mixtral-8x7b") if model == "mixture" else None
    shape = known or shape_of(config)
    training = Training(
        config=config,
        known_shape=known,
        seq_tokens=2048,
        method=method,
        lora=LoraSpec(rank=16, alpha=32) if method == "lora" else None,
        batch_tokens=1 << 16,
        epochs=0.0,
        steps=1,
    )
    has_experts = any(layer.feed_forward.num_experts for layer in shape.layers)
    sized = sized_plans(training, parse_cluster("8xh100"))
    seen = set()
    for at, runs in enumerate(sized.runnable()):
        row = sized.plans.row(at)
        kind = tuple(v for name, v in row.items() if name not in ("micro_rows", "num_micro"))
        if not runs or kind in seen or (row["zero"] == 0 and training.casts):
            continue
        seen.add(kind)
        layout = layout_of(row, casts=training.casts, trains_all=method != "lora")
        table = dict(layout.schedule or {"name": "1f1b"})
        table.pop("family", None)
        order = build("pipeline", table)
        columns = layout_columns(layout.mesh, order, layout.specs, has_experts=has_experts)
        assert columns == {name: row[name] for name in columns}
    assert len(seen) > 20


def test_the_step_of_a_lockfile_is_priced_as_the_plan_said(tmp_path, capsys):
    """Rows of two documents, and tokens of a step that the words of simulate do not repeat."""
    path, words = str(tmp_path / "plan.json"), ["--train.method", "full"]
    rows = ["--seq", "2k", "--global-tokens", "512k", "--on", "8xh100", "-o", path]
    assert run(["plan", "llama-3.1-8b", "--full", *rows]) == 0
    predicted = {row["quantity"]: row["value"] for row in Plan.load(path).predictions}
    capsys.readouterr()
    assert run(["simulate", "llama-3.1-8b", "--plan", path, *words, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)["report"]
    told = {row["quantity"]: row["value"] for row in report["rows"]}
    assert told["step time, as priced"] == pytest.approx(predicted["training/step time"])
    assert told["tokens of a step"] == 512 * 1024
    assert told["played over priced"] == pytest.approx(1.0, abs=0.03)
    assert run(["simulate", "llama-3.1-8b", "--plan", path, "--rates", "none"]) == 2
    assert "--rates" in capsys.readouterr().err


def test_adapters_alone_are_played_as_they_are_priced():
    config = tiny_base(num_layers=3)
    job = load_job(
        None,
        {"model.name": "tiny", "train.method": "lora", "train.item_tokens": [64, 64],
         "plan.mesh": {"replicate": 2}, "plan.data": "replicate"},
    )  # fmt: skip
    plan = make_plan(job, config, "2xh100")
    assert ratio(plan) == pytest.approx(1.0, rel=0.01)
