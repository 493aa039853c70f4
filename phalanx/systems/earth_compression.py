"""D2AR Earth-observation compression."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="earth-compression",
    title="D2AR Earth-observation compression",
    papers=(
        Source(
            "Transforming the Use of Earth Observation Data: Exascale Training of a "
            "Generative Compression Model with Historical Priors for up to 10,000x Data "
            "Reduction",
            "arXiv 2605.08633",
            "Zhang, Dong, Wu, Huang, Cheng, Yang and others (Tsinghua, Sun Yat-sen, NUS, NSCC "
            "Shenzhen), 2026",
        ),
    ),
    mechanism=(
        "A light encoder keeps a few control tokens of a scene and a large flow-matching "
        "transformer regenerates it from tokens, place and time; the number of tokens sets the "
        "compression rate. It is trained on a machine of CPUs alone: parallel plans follow NUMA "
        "domains, gradients are reduced inside a node first, and weights live across a small fast "
        "and a large slow memory."
    ),
    policies=("data/hierarchical",),
    builds_on=("data/fsdp",),
    modules=("models/codec",),
)
