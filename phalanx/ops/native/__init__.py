"""Compiled forms of elementwise work on CPUs in bfloat16; compiled once per machine, then cached.

Every function here computes what the plain torch code beside its caller computes, in fewer passes
over memory and with one rounding. `serves` says whether it may be used: plain bfloat16 tensors on
the CPU, and a C++ compiler on this machine. CUDA, other dtypes, tensor subclasses (fake tensors,
DTensors) and machines without a compiler take the plain code.

Legend: S rows (any leading dimensions), D channels, c half of them, F channels of a gate, n rows
and v entries of a tile of logits.
"""

from __future__ import annotations

import ctypes
import platform
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from shutil import which

import torch
from torch import Tensor, nn

from phalanx.data.cached import cache_folder, cached_file, content_key

_FOLDER = Path(__file__).parent
_SOURCES = ("kernels.cpp", "attention.cpp")
# no -ffast-math: a NaN must stay one, the guard of training looks for it
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-std=c++17")
_COMPILERS = ("g++", "clang++", "c++")
_GATES = {"gelu_tanh": 0, "silu": 1}
_LONGEST_DOCUMENT = 4096  # 32 queries' scores and gradients: 1 MiB
_PLAIN = (Tensor, nn.Parameter)
_is_enabled = True


def serves(*tensors: Tensor | None) -> bool:
    """Whether the functions below may be given these tensors (None counts as yes)."""
    return (
        _is_enabled
        and all(
            each is None
            or (type(each) in _PLAIN and each.dtype == torch.bfloat16 and each.device.type == "cpu")
            for each in tensors
        )
        and _library() is not None
    )


@contextmanager
def plain() -> Iterator[None]:
    """Inside, `serves` says no: to compare with the plain code."""
    global _is_enabled
    before, _is_enabled = _is_enabled, False
    try:
        yield
    finally:
        _is_enabled = before


@cache
def _library() -> ctypes.CDLL | None:
    compiler = next(filter(None, map(which, _COMPILERS)), None)
    if compiler is None:
        _say_plain("there is no C++ compiler (g++ or clang++)")
        return None
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    code = [path.read_text() for path in sorted(_FOLDER.glob("*.[ch]*")) if path.suffix != ".so"]
    made_of = (code, _FLAGS, version, platform.machine(), _processor_flags())
    path = cache_folder("native") / f"{content_key(*made_of)}.so"
    try:
        return ctypes.CDLL(str(cached_file(path, lambda new: _compile(compiler, new))))
    except subprocess.CalledProcessError as error:
        _say_plain(f"{compiler} failed: {error.stderr.strip().splitlines()[-1:]}")
    except OSError as error:
        _say_plain(str(error))
    return None


def _compile(compiler: str, new: Path) -> None:
    command = [
        compiler,
        *_FLAGS,
        "-shared",
        "-fPIC",
        "-o",
        str(new),
        *(str(_FOLDER / name) for name in _SOURCES),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)


def _processor_flags() -> str:
    """What -march=native goes by."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    names = ("model name", "flags", "Features")
    lines = info.read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.split("\t")[0] in names}))


def _say_plain(why: str) -> None:
    warnings.warn(f"bfloat16 work on this CPU runs as plain torch operators: {why}", stacklevel=3)


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p | None:
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


def _call(name: str, *arguments: Tensor | int | float | None) -> None:
    library = _library()
    assert library is not None, "ask `serves` first"
    converted = [
        _pointer(each)
        if each is None or isinstance(each, Tensor)
        else ctypes.c_float(each)
        if isinstance(each, float)
        else ctypes.c_int64(each)
        for each in arguments
    ]
    getattr(library, f"phalanx_{name}")(*converted)


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
    _call("gate_forward", gate_SF, up_SF, out_SF, gate_SF.numel(), _GATES[activation])
    return out_SF


def gate_backward(
    grad_SF: Tensor, gate_SF: Tensor, up_SF: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up."""
    parts = [each.contiguous() for each in (grad_SF, gate_SF, up_SF)]
    grads = torch.empty_like(parts[1]), torch.empty_like(parts[2])
    _call("gate_backward", *parts, *grads, parts[0].numel(), _GATES[activation])
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
        longest <= _LONGEST_DOCUMENT
        and q_SHC.shape[-1] % 32 == 0
        and serves(q_SHC, k_SKC, v_SKC)
        and _library().phalanx_attention_supported() == 1
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


def _attention_sizes(
    q_SHC: Tensor, k_SKC: Tensor, bounds: Sequence[int], window: int | None
) -> tuple[int, ...]:
    return len(bounds) - 1, q_SHC.shape[1], k_SKC.shape[1], q_SHC.shape[2], window or 0
