"""Sparse matrix multiplication, row split and merge."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="spmm",
    title="Sparse matrix multiplication, row split and merge",
    papers=(
        Source(
            "Design Principles for Sparse Matrix Multiplication on the GPU",
            "arXiv 1803.08601",
            "Yang, Buluc, Owens (UC Davis, LBNL), Euro-Par 2018",
        ),
    ),
    mechanism=(
        "A sparse matrix times a tall dense one, in plain CSR: either every worker takes whole "
        "rows, good for long regular rows, or every worker takes equally many non-zeros with a "
        "fix-up at the borders, immune to skew. The mean row length decides between the two."
    ),
    policies=("tiles/row_split", "tiles/merge_spmm"),
    modules=("ops/spmm",),
    code="github.com/owensgroup/merge-spmm",
)
