"""Why targets are missed, and what is weak although they are met; the page prints both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

REASONS: Mapping[str, str] = {
    "MoE: step time, median error": (
        "five sources, 149 of 185 rows from one. There the same model, plan and accelerator differ "
        "between releases: Qwen3 30B on 16 H100 takes 51.3 s a step in 26.02 and "
        "28.9 s in 26.02.01. What was recomputed, offloaded or replayed as a graph is not printed."
    ),
}

WEAK: Sequence[str] = (
    "nanotron's sweep: a fifth of its runs are off by more than half. Pipelines of eight and more "
    "stages on 32 to 128 devices took over a second a micro-batch there, the same plans on 256 "
    "devices tens of milliseconds. The state of that network is no input, so one kind or the other "
    "must be wrong; ranks and choices suffer less than times.",
    "Mixtures of experts: tables name neither what is recomputed or offloaded nor how tokens were "
    "spread; consecutive releases of one container move the same plan by up to 60 %.",
    "TTFT near saturation: it measures the queue. A small error of capacity is a large one of "
    "waiting.",
    "Peaks of runs that offload activations to the host are overestimated: no table says that they "
    "do.",
    "Rows that print TFLOP/s alone are not compared, because conventions of counting differ.",
    "Accelerators without a row in the tables take the efficiencies of their generation or vendor; "
    "their bars are wider, and nobody has checked them.",
)
