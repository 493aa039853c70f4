"""The LoRA adapters of a job, on matrices that its model has."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.errors import JobError, nearest_names
from phalanx.job import Job
from phalanx.models.config import DecoderConfig
from phalanx.models.spec import PROJECTIONS, LoraSpec, lora_targets
from phalanx.planner.importers import ForeignPlan
from phalanx.planner.models import PricedModel, stored_bits


@dataclass(frozen=True)
class Adapters:
    """What is adapted, and what a reader has to know of it.

    Attributes:
        config: of the decoder that trains them; None where the model is priced by its shape alone,
            also for matrices that `phalanx train` does not adapt (stacked experts).
        base_bits: of a frozen weight.
        notes: a line each.
    """

    lora: LoraSpec
    config: DecoderConfig | None
    base_bits: int
    notes: tuple[str, ...] = ()


def adapters_of(
    job: Job, model: PricedModel, base_bits: int, foreign: ForeignPlan | None
) -> Adapters:
    """Of a job with `train.method` "lora".

    Args:
        base_bits: as they were asked for; 0: as the name of the model says.

    A file of another program may name matrices of other models too, as PEFT allows; what the job
    itself names must be there.

    Raises:
        JobError: `job/bad-value` for a target that matches no matrix of the model.
    """
    named, notes = tuple(job.train.lora_targets), []
    absent = [target for target in named if not _is_in(model, target)]
    if absent:
        kept = tuple(target for target in named if target not in absent)
        if not (kept and foreign is not None and named == foreign.lora_targets):
            raise _unknown(model, absent[0])
        notes += [f"{foreign.path}: {model.name} has no {', '.join(absent)}: priced without"]
        named = kept
    lora = LoraSpec(
        rank=job.train.lora_rank, alpha=job.train.lora_alpha, targets=named or PROJECTIONS
    )
    bits = base_bits or stored_bits(model.name)
    if bits < 16 and not base_bits:
        says = f"{model.name}: frozen weights of {bits} bits, as its name says"
        notes += [f"{says} (--base-bits 16: whole ones)"]
    return Adapters(lora, _decoder(model, lora), bits, tuple(notes))


def _decoder(model: PricedModel, lora: LoraSpec) -> DecoderConfig | None:
    """The model's, unless adapters lie on stacked experts, which its trainer leaves alone."""
    try:
        if model.config is not None:
            lora_targets(model.config, lora)
    except JobError:
        layers, hidden = model.sizes.layers, model.sizes.hidden
        adapted = [each for layer in layers for each in layer.adapted(hidden, lora.targets)]
        if not any(product.is_expert for product in adapted):
            raise
        return None
    return model.config


def _is_in(model: PricedModel, target: str) -> bool:
    hidden = model.sizes.hidden
    return any(layer.adapted(hidden, (target,)) for layer in model.sizes.layers)


def _unknown(model: PricedModel, target: str) -> JobError:
    shape = model.sizes
    matrices = {each.name for layer in shape.layers for each in layer.products(shape.hidden)}
    legal = nearest_names(target, matrices) or sorted(matrices)
    rule = f"matches no matrix of {model.name}"
    return JobError("job/bad-value", "train.lora_targets", repr(target), rule, legal=legal)
