"""Which layers each chunk of a pipeline holds, by the program that runs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np

from phalanx.errors import JobError
from phalanx.job import Job
from phalanx.layout.stage_split import job_stages, most_stages, split_layers
from phalanx.models.adapter_folder import lora_of
from phalanx.models.config import DecoderConfig
from phalanx.models.spec import LoraSpec
from phalanx.planner.models import PricedModel

Cut = Callable[[int], np.ndarray]  # number of chunks -> layers of each, along the model
_OWN = ("", "phalanx")


def equal_cut(num_layers: int, chunks: int) -> np.ndarray:
    """Layers of each chunk, as equal as can be; what remains goes to the middle, so that the ends,
    which hold the embedding and the head, carry less."""
    base, rest = divmod(num_layers, chunks)
    layers = np.full(chunks, base)
    first = (chunks - rest) // 2
    layers[first : first + rest] += 1
    return layers


@lru_cache(maxsize=64)
def trained_cut(config: DecoderConfig, lora: LoraSpec | None, chunks: int) -> np.ndarray:
    """Layers of each chunk as `phalanx train` cuts them (`layout.stage_split`); equal ones where
    it has no cut into so many."""
    if chunks > most_stages(config, lora):
        return equal_cut(config.num_layers, chunks)
    return np.array([each.stop - each.start for each in split_layers(config, chunks, lora=lora)])


def cut_of(config: DecoderConfig | None, lora: LoraSpec | None, software: str, layers: int) -> Cut:
    """The cut of a plan.

    Args:
        config: of a model that `phalanx train` runs; None: of another.
        software: that the job names; "": this one. Other programs cut equal chunks.
        layers: of the model.
    """
    if config is None or software not in _OWN:
        return partial(equal_cut, layers)
    return partial(trained_cut, config, lora)


def written_cut(job: Job, model: PricedModel, num_ranks: int) -> Cut:
    """The stages that training would run of a job as it is written; equal ones of a model that it
    does not run.

    Raises:
        JobError: `job/bad-value` for stages of such a model. PlanError: from `job_stages`.
    """
    config, given = model.config, job.plan.stages
    if config is None:
        if given:
            rule = f"the operators of {model.name} are not known, so its stages are equal"
            raise JobError("job/bad-value", "plan.stages", list(given), rule, legal=[[]])
        return partial(equal_cut, model.sizes.num_layers)
    lora = lora_of(job, config)

    def trained(chunks: int) -> np.ndarray:
        stages = job_stages(config, chunks, num_ranks, given, lora=lora)
        return np.array([stage.stop - stage.start for stage in stages])

    return trained
