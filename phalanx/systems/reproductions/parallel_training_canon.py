"""The classics: ZeRO's bytes, idle shares of the first pipelines, work and bytes of sequence
parallelism, by formula and on the real orders and lowered steps.

Works without a policy here are named as such; they gate nothing.
"""

from __future__ import annotations

from phalanx.cost.context_formulas import contiguous_pairs, ring_bytes, ulysses_bytes
from phalanx.cost.memory_formulas import zero_bytes
from phalanx.cost.pipeline_formulas import flush_idle_s, zero_bubble_idle_s
from phalanx.mesh import Mesh
from phalanx.registry import build
from phalanx.report import Report
from phalanx.systems._measured import measured
from phalanx.systems._published import published
from phalanx.systems.reproductions._fsdp_steps import (
    BF16_BYTES,
    equal_units,
    full_sharding,
    play,
    replication,
    whole_numbers,
)
from phalanx.systems.reproductions._pictures import draw_schedule
from phalanx.systems.reproductions.striped_attention import pairs_of_ranks
from phalanx.worlds.pipeline_arrays import play as play_order

_PARAMS = 7.5e9
_STAGES = {"no sharding": 0, "stage 1": 1, "stage 2": 2, "stage 3": 3}
_LAYERS, _ROWS, _WIDTH = 6, 512, 8


def reproduce() -> Report:
    """Rows of the classics beside ours."""
    report = Report("Parallel training canon")
    _zero(report)
    _traffic(report)
    _pipelines(report)
    _sequences(report)
    report.rows += measured("parallel-training-canon")
    report.notes["covered"] = (
        "DDP, ZeRO 1 to 3, ZeRO-Offload, GPipe, 1F1B with flush, Zero Bubble H1 and ZB-V, ring and "
        "all-gather attention, Ulysses, USP, Megatron tensor and sequence parallelism, selective "
        "recomputation, local SGD, checkpoints loaded under another layout, slow-rank search"
    )
    report.notes["not reproduced"] = (
        "expert parallelism and its systems, compressed gradients, 2D tensor parallelism, "
        "TeraPipe, asynchronous pipelines and the fault-tolerant systems of the list have no "
        "policy here; speed-ups of abstracts need the authors' machines and models"
    )
    return report


def _zero(report: Report) -> None:
    """Figure 1 of the ZeRO paper."""
    for row in published("parallel-training-canon"):
        if row.experiment != "ZeRO model-state memory":
            continue
        assert row.number is not None
        quantity = f"model states per device, 7.5B, {row.devices} devices, {row.configuration}"
        stage = _STAGES[row.configuration]
        report.add(
            quantity,
            zero_bytes(_PARAMS, int(row.devices), stage) / 1e9,
            "GB",
            "formula",
            target=row.number,
            tolerance=0.05,
            note="printed with one digit",
        )
        report.rows.append(row.row(quantity, "GB"))
    for stage, wanted in zip(range(4), (16.0, 7.0, 5.5, 4.0)):
        quantity = f"bytes of a parameter's states, 4 ranks, ZeRO stage {stage}"
        report.add(quantity, zero_bytes(1.0, 4, stage), "B", "formula", target=wanted)


def _traffic(report: Report) -> None:
    """Volume of a lowered and simulated step in units of the model, 2, 2 and 3 without (N-1)/N."""
    ranks = 8
    work = equal_units(_LAYERS, _ROWS, _WIDTH)
    model_bytes = _LAYERS * _ROWS * _WIDTH * BF16_BYTES * (ranks - 1) / ranks
    ways = {
        "replication": (Mesh(replicate=ranks), replication(), "replicate", 2.0),
        "ZeRO stage 1": (Mesh(shard=ranks), [build("data", _zero_table(1))], "shard", 2.0),
        "ZeRO stage 2": (Mesh(shard=ranks), [build("data", _zero_table(2))], "shard", 2.0),
        "full sharding": (Mesh(shard=ranks), full_sharding(), "shard", 3.0),
    }
    for name, (mesh, specs, axis, wanted) in ways.items():
        sent = play(work, mesh, specs, whole_numbers()).wire_bytes(axis)
        quantity = f"bytes sent per rank over the model's, {name}, {ranks} ranks"
        report.add(quantity, wanted, "1", "formula", note="times (N - 1) / N")
        report.add(quantity, sent / model_bytes, "1", "simulated", target=wanted)


def _zero_table(stage: int) -> dict[str, object]:
    return {"name": "zero", "stage": stage, "axis": "shard"}


def _pipelines(report: Report) -> None:
    ranks, items = 4, 4
    order = build("pipeline", {"name": "gpipe"}).order(ranks, items)
    played = play_order(order, 1.0, 2.0)
    quantity = f"idle share, GPipe, {ranks} stages, {items} micro-batches"
    idle_s = float(flush_idle_s(ranks, 1.0, 2.0))
    formula = idle_s / (idle_s + items * 3.0)
    report.add(quantity, formula, "1", "formula", target=3 / 7)
    report.add(quantity, played.idle_frac, "1", "simulated", target=formula, tolerance=1e-9)
    peak = float(played.peak_in_flight.max())
    report.add("micro-batches kept, GPipe", peak, "1", "simulated", target=float(items))
    ranks, items = 8, 16
    schedules = (("1f1b", "1f1b", -1), ("zb-h1", "zero_bubble", 1))
    for schedule, name, parts in schedules:
        lists = build("pipeline", {"name": name}).order(ranks, items)
        split = parts > 0  # where weight gradients are passes of their own
        found = play_order(lists, 1.0, 1.0 if split else 2.0, 0.0, 1.0 if split else 0.0)
        idle_s = float(found.step_s[0]) - items * 3.0
        quantity = f"idle, {schedule}, {ranks} ranks, passes of one second"
        formula = float(zero_bubble_idle_s(ranks, 1.0, 1.0, 1.0, schedule))
        report.add(quantity, formula, "s", "formula")
        report.add(quantity, idle_s, "s", "simulated", target=formula, tolerance=1e-9)


def _sequences(report: Report) -> None:
    ranks, tokens = 4, 4096
    quantity = f"busiest over idlest rank, causal ring, {ranks} ranks, contiguous blocks"
    ends = [float(contiguous_pairs(ranks, tokens, rank)) for rank in (ranks - 1, 0)]
    report.add(quantity, ends[0] / ends[1], "1", "formula", note="towards 2N - 1 for long rows")
    uneven = pairs_of_ranks("contiguous", tokens, ranks)
    counted = max(uneven) / min(uneven)
    report.add(quantity, counted, "1", "simulated", target=7.0, tolerance=0.01)
    quantity = f"busiest over idlest rank, causal ring, {ranks} ranks, head and tail"
    each = pairs_of_ranks("head_tail", tokens, ranks)
    report.add(quantity, max(each) / min(each), "1", "simulated", target=1.0)
    heads = 8
    volume = [float(ulysses_bytes(n, tokens, heads, heads, 64, 2) * n / (n - 1)) for n in (4, 8)]
    report.add(
        "all-to-all bytes of a rank, 8 ranks / 4 ranks (Ulysses)",
        volume[1] / volume[0],
        "1",
        "formula",
        target=0.5,
        note="a rank sends 1/N of what gathering every activation would",
    )
    report.add(
        "ring bytes of a rank, 1 key and value head / 8",
        float(ring_bytes(4, tokens, 1, 64, 2) / ring_bytes(4, tokens, 8, 64, 2)),
        "1",
        "formula",
        target=1 / 8,
        note="grouped heads divide what travels",
    )


def draw(path: str) -> None:
    """Weight gradients fill the bubble of 1F1B."""
    draw_schedule({"name": "zero_bubble"}, 4, 8, path)
