"""What a training step needs, as columns over plans: work, traffic and the shape of its pipeline.

No speeds: `training_price` turns these counts into seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.training_bubble import (
    again_micro_batches,
    bubble_micro_batches,
    split_frac,
    stage_layers,
)
from phalanx.cost.training_compute import ComputeWork, compute_work
from phalanx.cost.training_efficiency import writes_scores
from phalanx.cost.training_plans import TrainingPlans
from phalanx.cost.training_traffic import Held, Traffic, sharing_ranks, tensor_blocks, traffic_of


@dataclass(frozen=True)
class StepWork:
    """Counts; all columns broadcast to [N].

    Attributes:
        compute, traffic: of a mean layer, of the head, and of all weights.
        plan: columns of the plans that prices depend on, and what follows from them: layers of the
            fullest and the last pipeline rank, idle micro-batches, backward passes in two parts,
            parameters that a rank updates and holds.
    """

    compute: ComputeWork
    traffic: Traffic
    plan: Mapping[str, Any]


def count_step(shape: ModelShape, plans: TrainingPlans, domain: int) -> StepWork:
    """FLOPs, bytes, rounds and launches of a step; no speeds yet."""
    compute = compute_work(shape, plans)
    fullest, last = stage_layers(shape.num_layers, plans.pipeline, plans.virtual)
    is_lora = plans.method == "lora"
    whole = Held(
        compute.dense_params * fullest + compute.edge_params, compute.expert_params * fullest
    )
    adapters = Held(compute.trained_params * fullest, 0.0)
    trained = adapters if is_lora else whole
    weight_bytes = plans.base_bits / 8 if is_lora else 2.0
    moves_all = plans.zero == 3
    gathered = Held(
        *(
            np.where(moves_all, a * weight_bytes, b * 2.0)
            for a, b in zip(whole, trained, strict=True)
        )
    )
    traffic = traffic_of(shape, plans, domain, gathered, trained)
    (_, shared, _), (_, expert_shared, _) = sharing_ranks(plans)
    bubble = bubble_micro_batches(plans.schedule, plans.pipeline, plans.virtual, plans.num_micro)
    plan = {
        "layers": fullest,
        "last_layers": last,
        "mean_layers": shape.num_layers / plans.pipeline,
        "micro": plans.num_micro,
        "pipeline": plans.pipeline,
        "tensor": plans.tensor,
        "tensor_calls": 2 * tensor_blocks(shape, plans),
        "virtual": plans.virtual,
        "domains": plans.devices / domain,
        "bubble": bubble,
        "bubble_again": again_micro_batches(plans.schedule, plans.pipeline, bubble),
        "split": split_frac(plans.schedule, plans.pipeline, plans.num_micro),
        "zero": plans.zero,
        "keeps_gathered": plans.keeps_gathered,
        "recompute": plans.recompute,
        "imbalance": plans.imbalance,
        "offload": plans.offload,
        "trains_all": 0.0 if is_lora else 1.0,
        "writes_scores": 1.0 if writes_scores(plans.software) else 0.0,
        "is_narrow": 1.0 if plans.precision in ("fp8", "fp4") else 0.0,
        "updated": trained.dense / shared + trained.experts / expert_shared,
        "held": trained.dense + trained.experts,
    }
    return StepWork(compute, traffic, plan)
