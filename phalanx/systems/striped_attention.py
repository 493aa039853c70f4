"""Striped Attention."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="striped-attention",
    title="Striped Attention",
    papers=(
        Source(
            "Striped Attention: Faster Ring Attention for Causal Transformers",
            "arXiv 2311.09431",
            "Brandon, Nrusimha, Qian, Ankner, Jin, Song, Ragan-Kelley (MIT), 2023",
        ),
        Source(
            "Ring Attention with Blockwise Transformers",
            "arXiv 2310.01889",
            "Liu, Zaharia, Abbeel, ICLR 2024; the parent",
        ),
    ),
    mechanism=(
        "Only the place of tokens changes: token t goes to rank t mod N of the attention ring. "
        "Under a causal mask every rank then skips about half of its work in every round, where "
        "contiguous blocks leave at least one rank with a full block. Exact, as attention does "
        "not mind a permutation that masks and positions follow; two chunks per rank, head and "
        "tail, balance alike."
    ),
    builds_on=("context/ring",),
    modules=("layout/token_layout", "layout/context_part", "ops/context_attention"),
    code="github.com/exists-forall/striped_attention",
    ran=(
        "One process: pairs, bytes and the theoretical table (this page).",
        (
            "Two and four gloo processes on CPUs: ring, gathered and all-to-all attention "
            "in five token layouts, float64 within 1e-12 of one process, gradients "
            "included, bytes as counted (tests/ops, tests/engines); work of the slowest "
            "rank timed rank by rank (benchmarks/context.py)."
        ),
        "Not run: CUDA's flash kernels behind the same signature, NCCL.",
    ),
)
