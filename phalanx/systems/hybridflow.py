"""HybridFlow."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="hybridflow",
    title="HybridFlow",
    papers=(
        Source(
            "HybridFlow: A Flexible and Efficient RLHF Framework",
            "arXiv 2409.19256",
            "Sheng, Zhang, Ye, Wu, Zhang, Zhang, Peng, Lin, Wu (HKU, ByteDance), EuroSys 2025",
        ),
    ),
    mechanism=(
        "One controller holds the graph of models of an RL step while each model runs as an "
        "ordinary many-process program; registered transfer rules split and collect batches "
        "between their layouts. Trainer and generator share devices: the generation groups are "
        "chosen so that each rank's training shard is part of its generation shard, which makes "
        "re-sharding free of redundant copies."
    ),
    policies=("rollout/hybridflow", "place/auto_mapping"),
    code="github.com/volcengine/verl",
)
