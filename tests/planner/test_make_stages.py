"""A simulated pipeline has the stages that training cuts, or those that the job names."""

from __future__ import annotations

import pytest

from phalanx.errors import PlanError
from phalanx.job import Job, load_job
from phalanx.planner.make import Planned, make_plan
from phalanx.planner.training_shape import training_shape
from tests.tiny_run import tiny_base

CONFIG = tiny_base(num_layers=5, vocab_size=900)
FLAGS = {
    "model.name": "tiny",
    "train.method": "pretrain",
    "train.item_tokens": [8, 8, 8],
    "plan.mesh": {"pp": 2},
    "plan.pipeline": {"name": "interleaved", "virtual": 2},
}


def job_of(**flags) -> Job:
    return load_job(None, FLAGS | {name.replace("__", "."): value for name, value in flags.items()})


def layers_of(planned: Planned) -> list[list[str]]:
    """Units of each stage, as its forward passes name them."""
    found: dict[int, dict[str, None]] = {}
    for actions in planned.program.lists:
        for action in actions:
            if action.kind == "compute" and action.phase == "F":
                unit = action.layer.removesuffix(".self_attn").removesuffix(".mlp")
                found.setdefault(action.stage, {})[unit] = None
    return [list(found[stage]) for stage in sorted(found)]


@pytest.mark.parametrize("given", [(), (2, 1, 1, 1)])
def test_simulated_stages_are_those_of_training(given):
    job = job_of(plan__stages=list(given)) if given else job_of()
    expected = [
        ["model.embed_tokens"] * stage.embeds
        + [f"model.layers.{at}" for at in range(stage.start, stage.stop)]
        + ["model.norm"] * stage.ends
        for stage in training_shape(job, CONFIG, 2).stages
    ]
    assert layers_of(make_plan(job, CONFIG, "2xh100")) == expected


@pytest.mark.parametrize(("layers", "says"), [(5, [2, 2, 1]), (4, [2, 2, 1, 0])])
def test_stages_that_a_toy_cannot_have_are_refused(layers, says):
    flags = {"model__name": "toy", "model__layers": layers}
    assert make_plan(job_of(**flags, plan__stages=[1] * 3 + [layers - 3]), None, "2xh100")
    with pytest.raises(PlanError, match=f"must hold {layers} layers in 4 stages"):
        make_plan(job_of(**flags, plan__stages=says), None, "2xh100")
