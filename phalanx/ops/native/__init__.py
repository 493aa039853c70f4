"""The few kernels in C++, behind a C interface: compiled once per machine, then cached.

`serves` says whether they may be used: plain bfloat16 tensors on the CPU, and a C++ compiler on
this machine. CUDA, other dtypes, tensor subclasses (fake tensors, DTensors) and machines without a
compiler take the plain torch code beside each caller.

Training: elementwise work and attention, forward and backward (`training`). Serving: products of
few rows, paged attention, choices from a vocabulary and what lies between them (`serving`).
"""

from phalanx.ops.native.loader import plain, serves
from phalanx.ops.native.serving import (
    HEAD_STEP,
    MOST_CANDIDATES,
    MOST_GROUP,
    MOST_ROWS,
    add_norm_,
    decode_layer_,
    gate_pairs,
    level,
    levels,
    packed_linear,
    paged_decode,
    read_all,
    turn_and_store,
    vocabulary_best,
)
from phalanx.ops.native.training import (
    MOST_KEYS,
    attention_backward,
    attention_forward,
    gate_backward,
    gate_forward,
    loss_tile_,
    loss_tile_gradient_,
    norm_backward,
    norm_forward,
    partial_backward,
    partial_forward,
    serves_attention,
    serves_partial,
)

__all__ = [
    "HEAD_STEP",
    "MOST_CANDIDATES",
    "MOST_GROUP",
    "MOST_KEYS",
    "MOST_ROWS",
    "add_norm_",
    "attention_backward",
    "attention_forward",
    "decode_layer_",
    "gate_backward",
    "gate_forward",
    "gate_pairs",
    "level",
    "levels",
    "loss_tile_",
    "loss_tile_gradient_",
    "norm_backward",
    "norm_forward",
    "packed_linear",
    "paged_decode",
    "partial_backward",
    "partial_forward",
    "plain",
    "read_all",
    "serves",
    "serves_attention",
    "serves_partial",
    "turn_and_store",
    "vocabulary_best",
]
