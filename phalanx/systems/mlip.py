"""MatRIS-MoE and Janus."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="mlip",
    title="MatRIS-MoE and Janus",
    papers=(
        Source(
            "Breaking the Training Barrier of Billion-Parameter Universal Machine Learning "
            "Interatomic Potentials",
            "arXiv 2604.15821",
            "Zhou, Wang, Du, Wang, Li, Hu and others (ICT/CAS, NSCC Shenzhen), 2026",
        ),
        Source("MatRIS", "arXiv 2603.02002", "ICLR 2026; the base model"),
    ),
    mechanism=(
        "An interatomic potential is trained on forces, which are gradients, so each step needs a "
        "gradient of a gradient: forward, backward with graph, second backward. One execution "
        "unit composes sharded data, graph and expert parallelism with a life of the parameters "
        "that survives the double backward; experts are chosen by element, so routing is known "
        "before the step and the energy stays smooth."
    ),
    policies=("data/fs3d",),
    modules=("models/interatomic",),
    code="github.com/HPC-AI-Team/MatRIS",
)
