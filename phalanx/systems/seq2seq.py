"""Sequence to sequence, one layer per GPU."""

from __future__ import annotations

from phalanx.registry import Source
from phalanx.systems._system import System

SYSTEM = System(
    slug="seq2seq",
    title="Sequence to sequence, one layer per GPU",
    papers=(
        Source(
            "Sequence to Sequence Learning with Neural Networks",
            "arXiv 1409.3215",
            "I. Sutskever, O. Vinyals, Q. V. Le, NIPS 2014",
        ),
    ),
    mechanism=(
        "The four LSTM layers sit on four GPUs and pass activations on time step by time step, a "
        "wavefront over layer and time, while four more GPUs each hold a quarter of the "
        "vocabulary head. It is the smallest mixed plan: a pipeline over time and a "
        "vocabulary-parallel head in one job."
    ),
    policies=("pipeline/wavefront", "tensor/vocab_parallel"),
    modules=("models/seq2seq",),
)
