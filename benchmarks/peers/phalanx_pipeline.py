"""Our engine on two processes, a pipeline of two stages."""

from __future__ import annotations

from collections.abc import Callable

from peers.case import Case
from peers.phalanx_engine import built, job_of
from phalanx.layout.stage_split import split_layers
from phalanx.models.adapter_folder import lora_of
from phalanx.models.source import model_source

NAME = "Phalanx, pipeline of 2 processes"
NUM_PROCESSES = 2


def build(case: Case) -> Callable[[int], None]:
    """A step of the engine, 1F1B, layers dealt by weight as a plan does."""
    job = job_of(case)
    config = model_source(job).config
    stages = split_layers(config, NUM_PROCESSES, lora=lora_of(job, config))
    ranges = [(stage.start, stage.stop) for stage in stages]
    order = {"family": "pipeline", "name": "1f1b"}
    return built(case, {"pp": NUM_PROCESSES}, [], order=order, stages=ranges)
