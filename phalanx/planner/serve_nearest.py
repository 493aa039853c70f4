"""What would serve a load that a cluster does not: a prefix cache, fewer bits, more devices, longer
promises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phalanx.cost.model_shape import ModelShape
from phalanx.cost.serving_plans import WEIGHT_BYTES
from phalanx.planner.clusters import AskedCluster
from phalanx.planner.serve_plan import ServeQuestion, serve_answer

_NEAR = 3


def nearest_that_serve(
    shape: ModelShape, asked: AskedCluster, question: ServeQuestion
) -> list[str]:
    """Up to three changes with which this kind of device serves what is asked."""
    found = []
    if question.names_prefixes and not question.reuses_prefixes:
        if _serves(shape, asked, replace(question, reuses_prefixes=True)):
            found.append(f"a prefix cache on {asked.text}")
    for precision in ("fp8", "fp4"):
        if WEIGHT_BYTES[precision] < WEIGHT_BYTES[question.precision]:
            if _serves(shape, asked, replace(question, precision=precision)):
                found.append(f"--precision {precision} on {asked.text}")
                break
    cluster = asked.cluster
    devices = cluster.num_devices * 2
    while devices <= max(1024, cluster.num_devices * 8) and len(found) < _NEAR:
        larger = AskedCluster(
            f"{devices}x{cluster.machine.name}", replace(cluster, num_devices=devices)
        )
        if _serves(shape, larger, question):
            found.append(f"{larger.text}")
            break
        devices *= 2
    for factor in (2.0, 4.0, 8.0):
        slower = replace(question, ttft_s=question.ttft_s * factor, tpot_s=question.tpot_s * factor)
        if np.isfinite(min(question.ttft_s, question.tpot_s)) and _serves(shape, asked, slower):
            found.append(f"promises {factor:g} times as long on {asked.text}")
            break
    return found[:_NEAR]


def _serves(shape: ModelShape, asked: AskedCluster, question: ServeQuestion) -> bool:
    """By the formulas alone."""
    answer = serve_answer(shape, asked, question, plays=False)
    return answer.fits
