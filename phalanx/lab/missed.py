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
    "nanotron's sweep: a fifth of its runs are off by more than half. With four pipeline stages "
    "and more, a micro-batch takes one to two seconds longer on 512 devices, on some of 64 and "
    "128, and on hardly any of 256; no column tells which. Order and choice of plans survive it.",
    "Mixtures of experts: tables name neither what is recomputed or offloaded nor how tokens were "
    "spread, and releases move the same plan (Qwen3 30B on 8 B200 printed 14.5, 28.2, 27.1 and, "
    "with larger micro-batches, 9.8 s).",
    "A size that no fit has seen: vTrain's 64 GPUs, left out as a whole, are predicted 13 % too "
    "fast from its single nodes.",
    "float8 with a scale for each row (torchtitan) takes 30 to 50 % longer than with one for each "
    "tensor; no column names the recipe.",
    "TTFT near saturation: it measures the queue. A small error of capacity is a large one of "
    "waiting.",
    "Peaks of runs that offload activations to the host are overestimated: no table says that they "
    "do.",
    "Rows that print TFLOP/s alone are not compared, because conventions of counting differ. Where "
    "the convention is known, rows of Megatron that were never fitted come out 4 to 15 % slow.",
    "Accelerators without a row in the tables take the efficiencies of their generation, or of "
    "all. Their bars are wider: of serving by what fits were off that had left an accelerator or a "
    "release out, of training by an assumed spread between accelerators, which nobody has checked.",
    "Real runs on the machine at hand are priced from rates measured there, not from these tables: "
    "of ten, seven steps are within 10 % and nine peaks within 6 %, in the right order "
    "(docs/performance.md).",
)
