"""Closed forms of pipeline schedules with equal stages and free transfers.

They take numbers or arrays. Symbols: P ranks, M micro-batches, W waves; T_F, T_B seconds of one
micro-batch on the share of the model that one rank holds (all of its chunks together); t_f, t_i,
t_w those of a forward pass, an input gradient and a weight gradient. Idle is seconds per rank and
step; a bubble share is idle over the whole step.

Sources
    GPipe, arXiv 1811.06965, section 2.3; 1F1B, arXiv 2104.04473, section 2.2;
    [H] Hanayo, DOI 10.1145/3581784.3607073, equation 1 and Figure 2;
    [Z] Zero Bubble Pipeline Parallelism, arXiv 2401.10241, Table 1.
"""

from __future__ import annotations

from typing import Any

ZERO_BUBBLE_WEIGHT_PARTS = {"1f1b": -1, "zb-h1": 1, "zb-h2": 2}


def flush_idle_s(ranks: Any, forward_s: Any, backward_s: Any) -> Any:
    """Idle of GPipe and 1F1B, (P - 1)(T_F + T_B)."""
    return (ranks - 1) * (forward_s + backward_s)


def hanayo_idle_s(ranks: Any, waves: Any, backward_s: Any) -> Any:
    """Idle of Hanayo with M = P, (P - 1) T_B / W.

    Found in the schedules that [H] draws; the equation that it prints counts about half of it in
    the length of the step (`hanayo_printed_bubble`).
    """
    return (ranks - 1) * backward_s / waves


def hanayo_bubble(ranks: Any, waves: Any, forward_s: Any = 1.0, backward_s: Any = 2.0) -> Any:
    """Bubble share of Hanayo with M = P; (2P - 2) / (3PW + 2P - 2) where T_B = 2 T_F."""
    idle_s = hanayo_idle_s(ranks, waves, backward_s)
    return idle_s / (ranks * (forward_s + backward_s) + idle_s)


def hanayo_printed_bubble(
    ranks: Any, waves: Any, forward_s: Any = 1.0, backward_s: Any = 2.0, hop_s: Any = 0.0
) -> Any:
    """The share as [H] prints it, equation 1, with the seconds of a hop between ranks."""
    hops = 1 + 2 * waves + 2 / ranks + (ranks - 2) / 3
    idle_s = backward_s / waves + hops * hop_s
    scale = ranks / (ranks - 1)
    length_s = scale * forward_s + (1 / (2 * waves) + scale) * backward_s
    return idle_s / (length_s + ((ranks - 2) / 2 + 4 * waves) * hop_s)


def hanayo_peak_chunks(ranks: Any, waves: Any, rank: Any) -> Any:
    """Chunks whose activations a rank keeps at most, M = P: (2W - 1) P + 1 + d."""
    return (2 * waves - 1) * ranks + 1 + rank


def chimera_bubble(ranks: Any, forward_s: Any = 1.0, backward_s: Any = 2.0) -> Any:
    """Bubble share of Chimera's two opposite pipelines on P ranks, M = P.

    One wave over half the ranks, relabelled [H, section 3]; a second copy of the weights pays.
    """
    return hanayo_bubble(ranks / 2, 1, forward_s, backward_s)


def zero_bubble_idle_s(
    ranks: Any, forward_s: Any, input_s: Any, weight_s: Any, schedule: str = "zb-h1"
) -> Any:
    """Idle of 1F1B with a split backward pass, ZB-H1 or ZB-H2 [Z, Table 1].

    (P - 1)(t_f + t_i - n t_w), n = -1, 1, 2: how many weight gradients fill a gap.
    """
    parts = ZERO_BUBBLE_WEIGHT_PARTS[schedule]
    return (ranks - 1) * (forward_s + input_s - parts * weight_s)
