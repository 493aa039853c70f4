"""RollPacker."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="rollpacker",
    title="RollPacker",
    papers=(
        Source(
            "RollPacker: Mitigating Long-Tail Rollouts for Fast, Synchronous RL Post-Training",
            "arXiv 2509.21009",
            "Gao, Zhao, An, Wu, Cao, Xiong and others (HKUST, Alibaba), NSDI 2026",
        ),
    ),
    mechanism=(
        "On-policy RL without waiting for stragglers: most steps launch more prompts and "
        "responses than they need, keep the first finishers and queue the slow prompts; when the "
        "queue holds a batch, one long round runs it. Rollout layout, reward workers and a "
        "trainer that starts on freed devices remove what then becomes the bottleneck."
    ),
    policies=("rollout/rollpacker",),
    code="github.com/Farrrrland/RollPacker",
)
