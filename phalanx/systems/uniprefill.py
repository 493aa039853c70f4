"""UniPrefill."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="uniprefill",
    title="UniPrefill",
    papers=(
        Source(
            "UniPrefill: Universal Long-Context Prefill Acceleration via Block-wise Dynamic "
            "Sparsification",
            "arXiv 2605.06221",
            "Fan, Huang, Wu, Wang, He (CASIA, UCAS, WeChat), 2026",
        ),
    ),
    mechanism=(
        "At chosen full-attention layers the last queries of a prompt score the blocks of tokens, "
        "and only the smallest set that holds a fraction p of the attention mass goes on through "
        "all later layers. The choice is packed over requests and agreed between tensor-parallel "
        "ranks; caches have a length per layer. Lossy, with a bound at the layer that drops."
    ),
    policies=("serve/uniprefill",),
    code="github.com/qhfan/UniPrefill",
)
