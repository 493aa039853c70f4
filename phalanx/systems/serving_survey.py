"""Serving survey."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="serving-survey",
    title="Serving survey",
    papers=(
        Source(
            "Towards Efficient Generative Large Language Model Serving: A Survey from "
            "Algorithms to Systems",
            "arXiv 2312.15234",
            "Miao, Oliaro, Zhang, Cheng, Jin, Chen, Jia; ACM Computing Surveys 2025, DOI "
            "10.1145/3754448",
        ),
    ),
    mechanism=(
        "Used as the checklist of a serving engine: continuous batching, chunked prefill, paged "
        "caches and prefix reuse, quantisation, sampling, streaming, speculation, parallel "
        "layouts. An item counts as here when it has a test."
    ),
    policies=(
        "serve/continuous",
        "cluster/round_robin",
        "speculate/draft_target",
    ),
)
