"""Hanayo."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="hanayo",
    title="Hanayo",
    papers=(
        Source(
            "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model "
            "Training Efficiency",
            "arXiv 2308.15762",
            "Z. Liu, S. Cheng, H. Zhou, Y. You (NUS), SC'23, DOI 10.1145/3581784.3607073",
        ),
    ),
    mechanism=(
        "A micro-batch zig-zags over the P devices: the model is cut into 2 P W stages that walk "
        "down the devices and back up, W times, so two consecutive stages share the device at "
        "each turn and the turn costs no transfer. More waves give thinner stages and smaller "
        "bubbles without a second copy of the weights."
    ),
    policies=("pipeline/hanayo",),
    ran=(
        ("One process, arrays: orders of 2 to 32 ranks played in virtual time (this page)."),
        (
            "Two and four gloo processes on CPUs: gradients equal to the bit to one process "
            "that adds micro-batches in the same order (tests/worlds), sleeping kernels "
            "beside the simulation (benchmarks/pipeline.py), `phalanx train` with "
            '`plan.pipeline = "hanayo"` (tests/engines, examples/layouts/pp-cp.toml).'
        ),
        "Not run: NCCL, several machines.",
    ),
)
