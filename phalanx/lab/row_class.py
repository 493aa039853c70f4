"""Classes of training rows, by source and columns.

| class | which rows |
|---|---|
| rl | workload starts with "rl": the step includes generation |
| lora | workload is "lora" |
| grid | sources that sweep plans (`GRIDS`), or, of a source not named here, rows of which at least five share everything but the plan |
| moe | all other rows of a model with experts |
| vendor-tuned | dense pre-training from makers of accelerators or of their frameworks (`VENDORS`): one plan a model, the maker's best |
| other | the rest: papers, frameworks' tables, full fine-tuning |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping

from phalanx.cost.model_shape import ModelShape
from phalanx.lab.csv_rows import CsvRow

TRAINING_CLASSES = ("vendor-tuned", "grid", "moe", "lora", "rl", "other")
VENDORS = ("nvidia_", "mlperf_", "megatron_", "amd_", "aws_neuron", "tpu_", "maxtext_")
GRIDS = ("nanotron_", "vtrain_", "bloom_prequel", "bigscience_", "sailor_")
LEAST_PLANS = 5  # that make a grid


def training_class(row: CsvRow, shape: ModelShape | None) -> str:
    """The class of a row by itself; grids of unknown sources are found over the whole table."""
    workload, source = row.words("workload"), row.words("source_id")
    if workload.startswith("rl"):
        return "rl"
    if "lora" in workload:
        return "lora"
    if source.startswith(GRIDS):
        return "grid"
    if row.count("experts") or (shape is not None and shape.expert_params):
        return "moe"
    if workload in ("", "pretrain") and source.startswith(VENDORS):
        return "vendor-tuned"
    return "other"


def is_grid(row_class: str, source_id: str, plans_of_grid: Mapping[str, set], grid: str) -> bool:
    """Whether a row belongs to a grid, given the different plans of each rank group."""
    if row_class == "grid":
        return True
    may_be = row_class in ("moe", "other") and not source_id.lower().startswith(VENDORS)
    return may_be and len(plans_of_grid.get(grid, ())) >= LEAST_PLANS
