"""Speed of the simulator on large clusters: folded ranks, and ranks that are all unlike.

    python benchmarks/simulator.py --json FILE

Seconds are CPU seconds of one run from the model's sizes to the finished step: lowering, checking
and playing. Memory is the most that the whole process ever held. Exits with 1 when a row misses.
"""

from __future__ import annotations

import random
import sys
from resource import RUSAGE_SELF, getrusage
from time import process_time

from gated import main

from phalanx.check import check_program
from phalanx.cost.roofline import RooflineCost
from phalanx.cost.serving_efficiency import serving_efficiency
from phalanx.cost.serving_plans import serving_plans
from phalanx.cost.training_plans import SCHEDULES, TrainingPlans
from phalanx.cost.training_step import training_step
from phalanx.drive import drive
from phalanx.hardware import parse_cluster
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.models.known import known_shape
from phalanx.models.named import named_model
from phalanx.planner.refined import play_documents, refine
from phalanx.planner.request_trace import poisson
from phalanx.planner.serve_events import play_requests
from phalanx.planner.work import model_work
from phalanx.registry import build
from phalanx.report import Report
from phalanx.worlds.sim import SimWorld

MODEL = "llama-3.1-405b"
MACHINE = parse_cluster("8xh100").machine
STAGES, CHUNKS, ITEMS, ROW_TOKENS = 16, 8, 32, 8192
MAX_FOLDED_S, MAX_UNLIKE_S, MAX_REFINE_S, MAX_REQUESTS_S = 10.0, 30.0, 2.0, 10.0
NUM_REQUESTS = 10_000
MAX_BYTES = 1e9
MEAN_DOCUMENT_TOKENS = 2048.0


def measure_folded(report: Report) -> None:
    """All operators and collectives of a step of 100,096 devices, one rank for all alike."""
    began = process_time()
    mesh = Mesh(shard=782, pp=STAGES, tp=8)
    work = model_work(named_model(MODEL).config, (ROW_TOKENS,) * ITEMS)
    order = build("pipeline", {"name": "interleaved", "virtual": CHUNKS})
    specs = [build("tensor", "megatron"), build("data", "fsdp")]
    program = lower(work, mesh, order, specs)
    check_program(program)
    cost = RooflineCost(
        flops_per_s=5e14,
        memory_bytes_per_s=2e12,
        link_bytes_per_s={"tp": 4e11, "pp": 5e10, "shard": 5e10},
        latency_s=dict.fromkeys(mesh.names, 5e-6),
        overhead_s=5e-6,
    )
    world = SimWorld(mesh, cost, fold=True)
    trace = drive(world, program=program)
    seconds = process_time() - began
    note = f"{MODEL}, {STAGES} stages x {CHUNKS} chunks, {ITEMS} items, {len(trace)} actions played"
    name = f"simulating {mesh.size:,} devices folded, interleaved"
    report.add(name, seconds, "s", "measured", note=note, target=MAX_FOLDED_S, bound="below")


def packed(draw: random.Random, tokens: int) -> list[int]:
    """Lengths of documents that fill a row."""
    lengths = []
    while tokens:
        length = min(tokens, 1 + int(draw.expovariate(1 / MEAN_DOCUMENT_TOKENS)))
        lengths.append(length)
        tokens -= length
    return lengths


def measure_unlike(report: Report) -> None:
    """4,096 devices whose data ranks all have other documents: nothing can be folded."""
    draw = random.Random(0)
    data = 4096 // STAGES
    documents = [[packed(draw, ROW_TOKENS) for _ in range(ITEMS)] for _ in range(data)]
    plan = TrainingPlans(
        pipeline=STAGES,
        data=data,
        virtual=CHUNKS,
        schedule=SCHEDULES.index("interleaved"),
        num_micro=ITEMS,
        row_tokens=ROW_TOKENS,
        shard=data,
        zero=1,
    )
    shape = known_shape(MODEL)
    assert shape is not None
    began = process_time()
    found = play_documents(shape, plan, MACHINE, documents)
    seconds = process_time() - began
    passes = len(found.played.wired.rows) * data
    note = f"{passes:,} passes; heaviest rank {found.work_imbalance:.3f} of the mean"
    name = "simulating 4,096 devices, other documents on every rank"
    report.add(name, seconds, "s", "measured", note=note, target=MAX_UNLIKE_S, bound="below")


def measure_refining(report: Report) -> None:
    """The ten best plans of a search, their pipelines played."""
    plans = TrainingPlans(
        tensor=8,
        pipeline=STAGES,
        data=128,
        virtual=[1, 1, 2, 4, 8, 1, 1, 2, 4, 8],
        schedule=[0, 1, 2, 2, 2, 0, 1, 2, 2, 2],
        num_micro=[16] * 5 + [128] * 5,
        row_tokens=ROW_TOKENS,
        shard=128,
        zero=1,
        sequence_parallel=1,
    )
    shape = known_shape(MODEL)
    assert shape is not None
    times = training_step(shape, plans, MACHINE)
    began = process_time()
    refined = refine(shape, plans, times)
    seconds = process_time() - began
    gap = abs(refined.total_s / times.total_s - 1).max()
    note = f"furthest from the formula by {gap:.1%}"
    report.add(
        *("playing the pipelines of ten plans", seconds, "s", "measured"),
        note=note,
        target=MAX_REFINE_S,
        bound="below",
    )


def measure_requests(report: Report) -> None:
    """A trace of 10,000 requests against two engines of a 70 B model with the real scheduler."""
    shape = known_shape("llama-3.1-70b")
    assert shape is not None
    plan = serving_plans(shape, MACHINE, tensor=4, precision="fp8")
    requests = poisson(16.0, NUM_REQUESTS, 1024, 256)
    began = process_time()
    rates = serving_efficiency().rates(plan)
    played = play_requests(plan, rates, requests, kv_tokens=5e5, max_running=512, engines=2)
    seconds = process_time() - began
    note = f"{played.end_s / 60:.0f} minutes of two engines, 256 output tokens a request"
    report.add(
        *(f"playing {NUM_REQUESTS:,} requests", seconds, "s", "measured"),
        note=note,
        target=MAX_REQUESTS_S,
        bound="below",
    )


def make_report() -> Report:
    """All rows."""
    report = Report("simulator, large clusters")
    for measure in (measure_folded, measure_unlike, measure_refining, measure_requests):
        measure(report)
    most_bytes = getrusage(RUSAGE_SELF).ru_maxrss * 1024.0
    report.add(
        *("memory of all of the above", most_bytes, "bytes", "measured"),
        target=MAX_BYTES,
        bound="below",
    )
    return report


if __name__ == "__main__":
    sys.exit(main(make_report, __doc__))
