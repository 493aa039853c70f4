"""Pipeline schedules on four real processes beside the simulation of the same lists.

    python benchmarks/pipeline.py --json FILE

First with kernels that sleep (0.16 s forward and 0.32 s backward per micro-batch on one rank's
share of the model, four micro-batches), so that four processes need no four cores; a message takes
what one took before the steps. Then with products of matrices on as many processes as there are
cores, where the simulation takes passes as long as they took in the step itself and predicts the
waiting between them. Exits with 1 when a simulated step is more than 10 % from the measured one, or
Hanayo and interleaving do not gain over 1F1B what their lists say.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.multiprocessing as mp
from gated import main
from torch import Tensor, nn
from torch import distributed as dist

from phalanx.doctor.machine import num_cores, processor_name
from phalanx.policy import Order, Step
from phalanx.registry import build
from phalanx.report import Report
from phalanx.systems.reproductions._sleeping import (
    AGREES_FRAC,
    BACKWARD_S,
    FORWARD_S,
    ITEMS,
    ORDERS,
    asleep_s,
)
from phalanx.worlds.pipeline_arrays import play
from phalanx.worlds.pipeline_plan import PipelinePlan, PlannedShapes
from phalanx.worlds.torch_pipelining import TorchPipeline

WHOLE = [name for name in ORDERS if name != "ZB-H1"]  # backward passes in one part
ROUNDS = 3
LAYERS, ROWS, WIDTH = 8, 512, 1024  # of a rank's share, with products


class _Through(torch.autograd.Function):
    """The input; asleep on the way there and on the way back."""

    @staticmethod
    def forward(ctx, x: Tensor, there_s: float, back_s: float) -> Tensor:
        ctx.back_s = back_s
        time.sleep(there_s)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        time.sleep(ctx.back_s)
        return grad, None, None


class Sleeping(nn.Module):
    """A stage; half of its backward pass is the weight's."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.forward_s, self.part_s = forward_s, backward_s / 2

    def forward(self, x: Tensor) -> Tensor:
        through = _Through.apply(x, self.forward_s, self.part_s)
        return through + _Through.apply(self.weight, 0.0, self.part_s)


def products(num_layers: int) -> nn.Module:
    """A stage of square products."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(num_layers)]
    return nn.Sequential(*layers)


def total(output: Tensor, target: None, *, num_counted_global: int) -> Tensor:
    """The loss: gradients do not matter here."""
    return output.sum() / num_counted_global


def make_report() -> Report:
    """Measure all schedules, each in every round."""
    report = Report("Pipeline schedules on real processes")
    report.notes["machine"] = f"{processor_name()}, {num_cores()} cores, {date.today()}"
    report.notes["steps"] = f"{ITEMS} micro-batches; median of {ROUNDS} interleaved rounds"
    asleep = _run(4, sleeps=True)
    for name in ORDERS:
        message_s = asleep[name]["passes"][0]["message_s"]
        played = [asleep_s(name, 4, message_s)]
        _add(report, f"{name}, asleep, 4 processes", asleep[name], played)
    steps = {name: median(asleep[name]["step_s"]) for name in ORDERS}
    for name, gain, slack in (("Hanayo W=2", 0.73, 0.05), ("interleaved v=2", 0.79, 0.04)):
        ratio = steps[name] / steps["1F1B"]
        report.add(f"{name} / 1F1B, asleep", ratio, "1", "measured", target=gain, tolerance=slack)
    ratio = steps["Hanayo W=4"] / steps["Hanayo W=2"]
    report.add("Hanayo W=4 / W=2, asleep", ratio, "1", "measured", target=1.0, bound="below")
    ranks = max(2, min(4, num_cores()))
    awake = _run(ranks, sleeps=False)
    for name in WHOLE:
        played = [_played_s(name, ranks, passes) for passes in awake[name]["passes"]]
        _add(report, f"{name}, products, {ranks} processes", awake[name], played)
    return report


def _add(report: Report, what: str, found: dict[str, Any], played_s: list[float]) -> None:
    steps = found["step_s"]
    measured_s, simulated_s = median(steps), median(played_s)
    note = f"{min(steps):.3f} to {max(steps):.3f}"
    report.add(f"step, {what}", measured_s, "s", "measured", note=note)
    report.add(
        f"step, {what}",
        simulated_s,
        "s",
        "simulated",
        target=measured_s,
        tolerance_frac=AGREES_FRAC,
    )


def _played_s(name: str, ranks: int, passes: dict[str, Any]) -> float:
    """Simulated step with the passes [stage][item] and the message of a measured one."""
    lists = build("pipeline", ORDERS[name]).order(ranks, ITEMS)
    return float(play(lists, passes["F"], passes["B"], passes["message_s"]).step_s[0])


# ---- the processes -----------------------------------------------------------------------------


def _run(ranks: int, sleeps: bool) -> dict[str, Any]:
    """By schedule: seconds of its steps, and of the passes of each; from rank 0."""
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # gloo asks a silent name server
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(ranks, folder, sleeps), nprocs=ranks)
        return json.loads((Path(folder) / "found.json").read_text())


def _rank(rank: int, ranks: int, folder: str, sleeps: bool) -> None:
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    names = list(ORDERS) if sleeps else WHOLE
    pipelines = {name: _pipeline(name, rank, ranks, sleeps) for name in names}
    found: dict[str, Any] = {name: {"step_s": [], "passes": []} for name in names}
    inputs = [torch.zeros(_sizes(sleeps), requires_grad=True) for _ in range(ITEMS)]
    message_s = _message_s(rank, _sizes(sleeps))
    for number in range(ROUNDS if sleeps else 1 + ROUNDS):
        for name, pipeline in pipelines.items():
            dist.barrier()
            began_s = time.perf_counter()
            pipeline.step(inputs, [None] * ITEMS, num_counted_global=1)
            step_s = _longest(time.perf_counter() - began_s)
            passes = _passes(pipeline)
            if sleeps or number > 0:  # the first products warm up
                found[name]["step_s"].append(step_s)
                found[name]["passes"].append(passes | {"message_s": message_s})
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _sizes(sleeps: bool) -> tuple[int, int]:
    return (1, 1) if sleeps else (ROWS, WIDTH)


def _longest(own_s: float) -> float:
    seconds = torch.tensor(own_s, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _pipeline(name: str, rank: int, ranks: int, sleeps: bool) -> TorchPipeline:
    order: Order = build("pipeline", ORDERS[name])
    num_stages = order.num_stages(ranks)
    shape = _sizes(sleeps)
    shapes = PlannedShapes(
        inputs=[shape] * ITEMS,
        outputs=[[shape] * ITEMS] * num_stages,
        dtype="float32",
        input_dtype="float32",
    )
    lists, placement = order.order(ranks, ITEMS), order.rank_of_stage(ranks)
    plan = PipelinePlan(lists=lists, rank_of_stage=placement, shapes=shapes)
    share = ranks / num_stages
    modules = {
        stage: Sleeping(share * FORWARD_S, share * BACKWARD_S)
        if sleeps
        else products(round(LAYERS * share))
        for stage in plan.stages_of(rank)
    }
    return TorchPipeline(plan, modules, total)


def _passes(pipeline: TorchPipeline) -> dict[str, Any]:
    """Seconds of the passes of the latest step, all ranks: "F" and "B", [stage][item]."""
    seconds = torch.zeros(2, pipeline.plan.num_stages, ITEMS, dtype=torch.float64)
    for row in pipeline.trace_rows():
        step = Step.parse(row["action_id"])
        if step is not None and step.kind in "FB":
            seconds["FB".index(step.kind), step.stage, step.item] = row["dur_s"]
    dist.all_reduce(seconds)
    forward_s, backward_s = seconds.tolist()
    return {"F": forward_s, "B": backward_s}


def _message_s(rank: int, shape: tuple[int, int]) -> float:
    """One way from rank 0 to rank 1, half of there and back."""
    tensor, seconds = torch.zeros(shape), []
    for _ in range(9):
        dist.barrier()
        began_s = time.perf_counter()
        if rank == 0:
            dist.send(tensor, 1)
            dist.recv(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)
        seconds.append((time.perf_counter() - began_s) / 2)
    return _longest(median(seconds) if rank < 2 else 0.0)


if __name__ == "__main__":
    sys.exit(main(make_report, __doc__))
