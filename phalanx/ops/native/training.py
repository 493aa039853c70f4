"""Compiled forms of the elementwise work and the attention of training, in bfloat16 on CPUs.

Every function computes what the plain torch code beside its caller computes, in fewer passes over
memory and with one rounding; `loader.serves` says whether it may be used.

Legend: S rows (any leading dimensions), D channels, c half of them, F channels of a gate, n rows
and v entries of a tile of logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.ops.native.loader import address, function, library, serves

GATES = {"gelu_tanh": 0, "silu": 1}
MOST_KEYS = 4096  # of one call: 32 queries' scores and gradients are 1 MiB


def _call(name: str, *arguments: Tensor | int | float | None) -> None:
    letters = {int: "i", float: "f"}
    signature = "".join(letters.get(type(each), "p") for each in arguments)
    converted = (each if type(each) in letters else address(each) for each in arguments)
    function(name, signature)(*converted)


def norm_forward(
    x_SD: Tensor, scale_D: Tensor, eps: float, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(x / sqrt(mean(x^2) + eps) * scale, rotated where cos and sin [S, 1, c] are given; the
    reciprocal root of each row [..., 1], float32).

    Args:
        scale_D: float32.
    """
    x_SD = x_SD.contiguous()
    out_SD = torch.empty_like(x_SD)
    inverse_S1 = x_SD.new_empty((*x_SD.shape[:-1], 1), dtype=torch.float32)
    sizes = _norm_sizes(x_SD, cos)
    _call("norm_forward", x_SD, scale_D, *_tables(cos, sin), out_SD, inverse_S1, *sizes, float(eps))
    return out_SD, inverse_S1


def norm_backward(
    grad_SD: Tensor,
    x_SD: Tensor,
    scale_D: Tensor,
    inverse_S1: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    needs_scale: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and, where asked, of the scale (float32)."""
    grad_SD, x_SD = grad_SD.contiguous(), x_SD.contiguous()
    grad_x_SD = torch.empty_like(x_SD)
    grad_scale_D = torch.empty_like(scale_D) if needs_scale else None
    tables, sizes = _tables(cos, sin), _norm_sizes(x_SD, cos)
    _call(
        "norm_backward",
        grad_SD,
        x_SD,
        scale_D,
        inverse_S1,
        *tables,
        grad_x_SD,
        grad_scale_D,
        *sizes,
    )
    return grad_x_SD, grad_scale_D


def _norm_sizes(x_SD: Tensor, cos: Tensor | None) -> tuple[int, int, int]:
    rows = x_SD.numel() // x_SD.shape[-1]
    return rows, 1 if cos is None else rows // cos.shape[0], x_SD.shape[-1]


def _tables(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if cos is None or sin is None:
        return None, None
    return cos.contiguous(), sin.contiguous()


def gate_forward(gate_SF: Tensor, up_SF: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, each rounded."""
    gate_SF, up_SF = gate_SF.contiguous(), up_SF.contiguous()
    out_SF = torch.empty_like(gate_SF)
    _call("gate_forward", gate_SF, up_SF, out_SF, gate_SF.numel(), GATES[activation])
    return out_SF


def gate_backward(
    grad_SF: Tensor, gate_SF: Tensor, up_SF: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    parts = [each.contiguous() for each in (grad_SF, gate_SF, up_SF)]
    grads = torch.empty_like(parts[1]), torch.empty_like(parts[2])
    _call("gate_backward", *parts, *grads, parts[0].numel(), GATES[activation])
    return grads


def loss_tile_(
    raw_nv: Tensor,
    targets_n: Tensor,
    start: int,
    soft_cap: float | None,
    peak_n1: Tensor,
    sum_n1: Tensor,
    target_n1: Tensor,
) -> None:
    """Take a tile of logits into each row's largest logit, its sum of exponentials less that peak,
    and the logit of its target if the tile begins at or before it; in place, float32."""
    rows, count = raw_nv.shape
    state = (peak_n1, sum_n1, target_n1)
    _call("loss_tile", raw_nv, targets_n, *state, rows, count, start, float(soft_cap or 0.0))


def loss_tile_gradient_(
    raw_nv: Tensor, targets_n: Tensor, start: int, soft_cap: float | None, lse_n1: Tensor
) -> Tensor:
    """The tile, overwritten with the gradient of the rows' losses by its raw logits."""
    rows, count = raw_nv.shape
    cap = float(soft_cap or 0.0)
    _call("loss_tile_gradient", raw_nv, targets_n, lse_n1, rows, count, start, cap)
    return raw_nv


def serves_attention(q_SHC: Tensor, k_SKC: Tensor, v_SKC: Tensor, longest: int) -> bool:
    """Whether the attention below may be given these: it needs a processor with bfloat16 dot
    products, and documents whose scores of a block fit into a core's cache."""
    return (
        longest <= MOST_KEYS
        and q_SHC.shape[-1] % 32 == 0
        and serves(q_SHC, k_SKC, v_SKC)
        and library().phalanx_attention_supported() == 1
    )


def attention_forward(
    q_SHC: Tensor,
    k_SKC: Tensor,
    v_SKC: Tensor,
    bounds: Sequence[int],
    scale: float,
    window: int | None,
) -> Tensor:
    """softmax(scale * q k^T) v, causal within each document, [S, H, C]."""
    q_SHC, k_SKC, v_SKC = (each.contiguous() for each in (q_SHC, k_SKC, v_SKC))
    out_SHC, ends = torch.empty_like(q_SHC), torch.tensor(bounds)
    sizes = _attention_sizes(q_SHC, k_SKC, bounds, window)
    _call("attention_forward", q_SHC, k_SKC, v_SKC, out_SHC, ends, *sizes, scale)
    return out_SHC


def attention_backward(
    grad_SHC: Tensor,
    q_SHC: Tensor,
    k_SKC: Tensor,
    v_SKC: Tensor,
    bounds: Sequence[int],
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    inputs = [each.contiguous() for each in (grad_SHC, q_SHC, k_SKC, v_SKC)]
    grads, ends = tuple(map(torch.empty_like, inputs[1:])), torch.tensor(bounds)
    parts_HSC = q_SHC.new_empty((2, *q_SHC.transpose(0, 1).shape), dtype=torch.float32)
    sizes = _attention_sizes(q_SHC, k_SKC, bounds, window)
    _call("attention_backward", *inputs, *grads, *parts_HSC, ends, *sizes, scale)
    return grads


def serves_partial(q_QHC: Tensor, k_TKC: Tensor, v_TKC: Tensor) -> bool:
    """Whether `partial_forward` may be given these: as for attention, in stretches of keys."""
    return serves_attention(q_QHC, k_TKC, v_TKC, min(len(k_TKC), MOST_KEYS))


def partial_forward(
    q_QHC: Tensor, k_TKC: Tensor, v_TKC: Tensor, first_Q: Tensor, last_Q: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """(out [Q, H, C], lse [Q, H]), float32, over the keys first .. last - 1 of each query.

    Args:
        k_TKC, v_TKC: at most `MOST_KEYS`.
        first_Q, last_Q: int64, neither falls.
    """
    inputs = [each.contiguous() for each in (q_QHC, k_TKC, v_TKC)]
    out_QHC = torch.empty_like(inputs[0], dtype=torch.float32)
    lse_QH = out_QHC.new_empty(out_QHC.shape[:2])
    sizes = _partial_sizes(q_QHC, k_TKC)
    _call("partial_forward", *inputs, out_QHC, lse_QH, first_Q, last_Q, *sizes, scale)
    return out_QHC, lse_QH


def partial_backward(
    grad_QHC: Tensor,
    q_QHC: Tensor,
    k_TKC: Tensor,
    v_TKC: Tensor,
    lse_QH: Tensor,
    slope_QH: Tensor,
    first_Q: Tensor,
    last_Q: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v by these keys, float32.

    Args:
        lse_QH, slope_QH: float32, of the queries' whole softmax.
    """
    inputs = [each.contiguous() for each in (grad_QHC, q_QHC, k_TKC, v_TKC)]
    whole = [each.contiguous() for each in (lse_QH, slope_QH)]
    grads = tuple(torch.empty_like(each, dtype=torch.float32) for each in inputs[1:])
    parts = lse_QH.new_empty(2, q_QHC.shape[1], len(k_TKC), q_QHC.shape[2])
    sizes = _partial_sizes(q_QHC, k_TKC)
    outputs = (*grads, *parts)
    _call("partial_backward", *inputs, *whole, *outputs, first_Q, last_Q, *sizes, scale)
    return grads


def _partial_sizes(q_QHC: Tensor, k_TKC: Tensor) -> tuple[int, ...]:
    return len(q_QHC), len(k_TKC), q_QHC.shape[1], k_TKC.shape[1], q_QHC.shape[2]


def _attention_sizes(
    q_SHC: Tensor, k_SKC: Tensor, bounds: Sequence[int], window: int | None
) -> tuple[int, ...]:
    return len(bounds) - 1, q_SHC.shape[1], k_SKC.shape[1], q_SHC.shape[2], window or 0
