"""Pipelines: how many layers the fullest stage holds, and how long its devices stand idle.

Symbols: p pipeline ranks, v model chunks of a rank, m micro-batches of a step, t_f, t_b, t_w
seconds of a stage forward, backward for inputs and backward for weights.

Idle time over the work of one micro-batch on a stage, t_f + t_b + t_w (`bubble_micro_batches`)
    gpipe, 1f1b     p - 1               [M2] section 2.2.1
    interleaved     (p - 1) / v         [M2] section 2.2.2
    zero-bubble     (p - 1) / 3         [Z] ZB-H1, (p - 1)(t_f + t_b - t_w), t_f = t_b = t_w
    zbv             (p - 1) / 6         ZB-V, (p - 1) t_f of a chunk; 0 in [Z], where ranks go on
                                        to the next step without meeting
    dualpipe        (p / 2 - 1) 2 / 3   [D] (p / 2 - 1)(F&B + B - 3 W), F&B = 3, B = 2, W = 1
    dualpipe-v      (p - 1) / 6         (p - 1) forward passes of a chunk: its list, one pass after
                                        the other; what runs at the same time is not credited
    hanayo          2 (p - 1) / (3 W)   [H] W = v / 2 waves, (p - 1) t_b / W for m = p; any further
                                        p micro-batches add 2p - 3 forward passes of a chunk
Divided by m that is idle over ideal time, for 1f1b `training_formulas.bubble_frac`.

Backward passes in two parts, of all (`split_frac`)
    zero-bubble, zbv    all             [Z]
    dualpipe-v          (2 p - 1) / 2 m of rank 0, in fill and drain; it has the most
    dualpipe            (p - 1) / m     as DualPipeV on half the ranks
Each part computes once more what is not kept, so a layer that is recomputed is so twice. With r
seconds for that, a stage idles (`again_micro_batches`)
    gpipe to interleaved, hanayo    as above, of t_f + t_b + t_w + r
    zero-bubble     (p - 1)(t_f + r)
    zbv             (p - 1)(t_f + r) of a chunk
    dualpipe(-v)    as above: fill and drain have as many such parts as they have gaps
which is what their lists give when they are played.

Sources
    [M2] Narayanan et al., SC'21, arXiv 2104.04473.
    [Z] Qi et al.: Zero Bubble Pipeline Parallelism, ICLR'24, arXiv 2401.10241; section 2 and
        table 1; ZB-V: arXiv 2405.15362.
    [D] DeepSeek-V3 technical report, arXiv 2412.19437, table 2.
    [H] Liu et al.: Hanayo, SC'23, arXiv 2308.15762, figure 2; beyond m = p ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from phalanx.cost.training_plans import SCHEDULES

_INTERLEAVED, _ZERO_BUBBLE, _ZBV, _DUALPIPE, _DUALPIPE_V, _HANAYO = map(
    SCHEDULES.index,
    ("interleaved", "zero-bubble", "zbv", "dualpipe", "dualpipe-v", "hanayo"),
)


def bubble_micro_batches(
    schedule: Any, pipeline: Any, virtual: Any = 1, num_micro: Any = 0
) -> np.ndarray:
    """Idle time of a rank in units of a micro-batch's work on it; arrays broadcast.

    Args:
        schedule: index into `training_plans.SCHEDULES`.
        num_micro: micro-batches of a step; only hanayo's idle time depends on them.
    """
    p = np.asarray(pipeline, dtype=float)
    schedule = np.asarray(schedule)
    chunks = np.where(schedule == _INTERLEAVED, np.asarray(virtual, dtype=float), 1.0)
    idle = (p - 1) / chunks
    idle = np.where(schedule == _ZERO_BUBBLE, (p - 1) / 3, idle)
    in_v = (schedule == _ZBV) | (schedule == _DUALPIPE_V)
    idle = np.where(in_v, (p - 1) / 6, idle)
    waves = np.maximum(np.asarray(virtual, dtype=float) / 2, 1.0)
    further = np.maximum(np.asarray(num_micro, dtype=float) / p - 1, 0.0)
    in_waves = (2 * (p - 1) / 3 + further * np.maximum(2 * p - 3, 0.0) / 6) / waves
    idle = np.where(schedule == _HANAYO, in_waves, idle)
    return np.where(schedule == _DUALPIPE, np.maximum(p / 2 - 1, 0.0) * 2 / 3, idle)


def again_micro_batches(schedule: Any, pipeline: Any, bubble: Any) -> np.ndarray:
    """Idle time of a rank in units of one recomputation of a micro-batch on it; arrays broadcast.

    Args:
        bubble: from `bubble_micro_batches`.
    """
    p, schedule = np.asarray(pipeline, dtype=float), np.asarray(schedule)
    idle = np.where(schedule == _ZERO_BUBBLE, p - 1, np.asarray(bubble, dtype=float))
    idle = np.where(schedule == _ZBV, (p - 1) / 2, idle)
    return np.where((schedule == _DUALPIPE) | (schedule == _DUALPIPE_V), 0.0, idle)


def split_frac(schedule: Any, pipeline: Any, num_micro: Any) -> np.ndarray:
    """Share of a rank's backward passes that are an input and a weight gradient, each by itself;
    arrays broadcast.

    Args:
        schedule: index into `training_plans.SCHEDULES`.
        num_micro: micro-batches of a step.
    """
    p, schedule = np.asarray(pipeline, dtype=float), np.asarray(schedule)
    m = np.maximum(np.asarray(num_micro, dtype=float), 1.0)
    share = np.where((schedule == _ZERO_BUBBLE) | (schedule == _ZBV), 1.0, 0.0)
    share = np.where(schedule == _DUALPIPE_V, (2 * p - 1) / (2 * m), share)
    share = np.where(schedule == _DUALPIPE, (p - 1) / m, share)
    return np.where(p > 1, np.minimum(share, 1.0), 0.0)


def stage_layers(num_layers: int, pipeline: Any, virtual: Any = 1) -> tuple[np.ndarray, np.ndarray]:
    """(layers of the fullest rank, layers of the last rank), chunks as equal as they can be.

    What does not divide goes to middle chunks first, so that the ends, which hold the embedding
    and the head, carry less (Llama 3: 126 layers on 128 chunks).
    """
    p = np.asarray(pipeline, dtype=float)
    chunks = p * np.asarray(virtual, dtype=float)
    in_each = np.floor(num_layers / chunks)
    rest = num_layers - in_each * chunks
    held = in_each * np.asarray(virtual, dtype=float)
    return held + np.ceil(rest / p), held + np.floor(rest / p)
