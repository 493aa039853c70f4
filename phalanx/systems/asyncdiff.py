"""AsyncDiff."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="asyncdiff",
    title="AsyncDiff",
    papers=(
        Source(
            "AsyncDiff: Parallelizing Diffusion Models by Asynchronous Denoising",
            "arXiv 2406.06911",
            "NeurIPS 2024",
        ),
    ),
    mechanism=(
        "The denoiser is cut into consecutive parts of equal time, one per device, and every part "
        "reads what its predecessor produced one denoising step earlier, so all parts of a step "
        "run at once. The first steps run in order, because they fix the picture; a stride of two "
        "lets one parallel round serve two steps. The result is close to the original, not equal "
        "to it."
    ),
    policies=("denoise/asyncdiff",),
    code="github.com/czg1225/AsyncDiff",
)
