"""A layout that is written down (mesh, policies, schedule) as a row of the table that is priced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.training_plans import CONTEXT_KINDS, RECOMPUTE, SCHEDULES, TrainingPlans
from phalanx.hardware import Machine
from phalanx.job import Job
from phalanx.mesh import Mesh
from phalanx.models.config import DecoderConfig
from phalanx.models.spec import PROJECTIONS, LoraSpec
from phalanx.planner.runnable import order_table
from phalanx.planner.training import Training
from phalanx.policy import Order, Spec

_SCHEDULE_OF = {
    table["name"]: name for name in SCHEDULES if (table := order_table(name, 2)) is not None
}
ROW_COLUMNS = (
    *("micro_rows", "row_tokens", "document_tokens", "counted_frac", "imbalance"),
    *("expert_imbalance", "num_micro"),
)


def schedule_of(order: Order) -> str:
    """The schedule of an order as prices know it; "" for one that they do not."""
    is_deep = getattr(order, "depth", 1) > 1
    return "" if is_deep else _SCHEDULE_OF.get(order.policy_name, "")


def idle_axes(mesh: Mesh, specs: Sequence[Spec]) -> list[str]:
    """Axes of several devices that no policy uses, and no pipeline."""
    used = {spec.axis for spec in specs} | {"pp"}
    return [axis for axis in mesh.names if axis not in used and mesh.degree(axis) > 1]


def layout_columns(
    mesh: Mesh, order: Order, specs: Sequence[Spec], *, has_experts: bool
) -> dict[str, Any]:
    """Columns of `TrainingPlans` that a layout decides. A schedule that prices do not know stands
    as the one with as many chunks that they do."""

    def degree(family: str) -> int:
        return prod(mesh.degree(spec.axis) for spec in specs if spec.family == family)

    pipeline = mesh.degree("pp")
    chunks = order.num_stages(pipeline) // pipeline
    name = schedule_of(order) or ("interleaved" if chunks > 1 else "1f1b")
    stages = [(_zero(spec), mesh.degree(spec.axis)) for spec in specs if spec.family == "data"]
    zero, shard = max(stages, default=(0, 1))
    context = [spec for spec in specs if spec.family == "context" and mesh.degree(spec.axis) > 1]
    kind = context[0].policy_name.replace("_", "-") if context else CONTEXT_KINDS[0]
    ranks = shard * degree("context")
    return {
        "pipeline": pipeline,
        "data": degree("data"),
        "tensor": degree("tensor"),
        "context": degree("context"),
        "context_kind": CONTEXT_KINDS.index(kind),
        "shard": ranks if zero else 1,
        "zero": zero if ranks > 1 else 0,
        "keeps_gathered": int(
            zero == 3 and ranks > 1 and any(_keeps_gathered(spec) for spec in specs)
        ),
        "virtual": chunks if pipeline > 1 else 1,
        "schedule": SCHEDULES.index(name if pipeline > 1 else "1f1b"),
        "expert_tensor": degree("tensor") if has_experts else 1,
        "sequence_parallel": int(
            any(splits_tokens(spec) and mesh.degree(spec.axis) > 1 for spec in specs)
        ),
    }


def splits_tokens(spec: Spec) -> bool:
    """Whether ranks of a tensor policy share the tokens between blocks (sequence parallelism)."""
    blocks = [rule for rule in spec.rules() if rule.placement == "block"]
    exchanges = [exchange for rule in blocks for exchange in rule.exchanges]
    is_split = any(each.collective == "reduce_scatter" for each in exchanges)
    return spec.family == "tensor" and is_split


def _zero(spec: Spec) -> int:
    """What a data policy shards, in stages of ZeRO."""
    return {"fsdp": 3, "zero": getattr(spec, "stage", 1)}.get(spec.policy_name, 0)


def _keeps_gathered(spec: Spec) -> bool:
    return not getattr(spec, "reshard_after_forward", True)


def written_plan(
    job: Job,
    machine: Machine,
    shape: ModelShape,
    layout: Mapping[str, Any],
    rows: Mapping[str, Any],
    config: DecoderConfig | None = None,
) -> TrainingPlans:
    """The row of a layout.

    Args:
        layout: from `layout_columns`.
        rows: columns of `ROW_COLUMNS`, and "software", where a price had one.
        config: of a model that `phalanx train` runs; None: of another.
    """
    lora = None
    if job.train.method == "lora":
        targets = tuple(job.train.lora_targets) or PROJECTIONS
        lora = LoraSpec(rank=job.train.lora_rank, alpha=job.train.lora_alpha, targets=targets)
    training = Training(
        config=config,
        known_shape=shape,
        method=job.train.method,
        lora=lora,
        software=str(rows.get("software", "")),
    )
    columns = {name: value for name, value in rows.items() if name in ROW_COLUMNS}
    return TrainingPlans(
        **layout,
        **columns,
        recompute=RECOMPUTE.index(job.plan.recompute),
        offload=0.0 if job.plan.offload == "none" else 1.0,
        method=job.train.method,
        lora_rank=lora.rank if lora else 0,
        lora_targets=training.lora_targets,
        software=training.software_on(machine),
    )
