"""Compiled forms of a serving step's work, in bfloat16 on CPUs, at the best level there is.

The level (AMX tiles, AVX-512 dot products of bfloat16, AVX2, plain) is chosen while the program
runs, by what the processor says and the system permits. Ask `loader.serves` first. Sizes are not
checked here.

Legend: S rows, D channels in, F channels out, R requests, H query heads, K kv heads, C channels per
head, N blocks of a request or candidates, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from phalanx.errors import JobError
from phalanx.ops.native.loader import address, function, library
from phalanx.ops.native.training import GATES

MOST_ROWS = 64  # of one product
MOST_CANDIDATES = 64
MOST_GROUP = 64  # query heads of a kv head
HEAD_STEP = 16  # channels of a head are a multiple of this


def levels() -> list[str]:
    """The levels that this machine has, best first; none without a compiler."""
    loaded = library()
    if loaded is None:
        return []
    loaded.phalanx_num_levels.restype = ctypes.c_int64
    loaded.phalanx_level_name.restype = ctypes.c_char_p
    count = loaded.phalanx_num_levels()
    return [loaded.phalanx_level_name(ctypes.c_int64(at)).decode() for at in range(count)]


@contextmanager
def level(name: str) -> Iterator[None]:
    """Inside, all threads compute at this level.

    Raises:
        JobError: `job/bad-value` for a level that this machine doesn't have.
    """
    names, choose = levels(), function("choose_level", "i")
    if name not in names:
        raise JobError("job/bad-value", "level", name, "is no level of this machine", legal=names)
    choose(names.index(name))
    try:
        yield
    finally:
        choose(-1)


def packed_linear(x_SD: Tensor, weight_FD: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x W^T [S, F] for at most `MOST_ROWS` rows, rounded once, or as float32."""
    (rows, columns), outputs = x_SD.shape, weight_FD.shape[0]
    y_SF = torch.empty((rows, outputs), dtype=dtype)
    x_SD = x_SD.contiguous()
    name = "packed_linear" if dtype == torch.bfloat16 else "packed_linear_wide"
    function(name, "pppiii")(
        *(x_SD.data_ptr(), weight_FD.data_ptr(), y_SF.data_ptr()), rows, outputs, columns
    )
    return y_SF


def vocabulary_best(hidden_RD: Tensor, head_VD: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest logits [R, N], float32, in falling order, and their tokens, int64."""
    (rows, columns), tokens = hidden_RD.shape, head_VD.shape[0]
    hidden_RD = hidden_RD.contiguous()
    logits_RN = torch.empty((rows, count), dtype=torch.float32)
    tokens_RN = torch.empty((rows, count), dtype=torch.int64)
    function("vocabulary_best", "ppppiiii")(
        *map(address, (hidden_RD, head_VD, logits_RN, tokens_RN)), rows, tokens, columns, count
    )
    return logits_RN, tokens_RN


def paged_decode(
    q_RHC: Tensor,
    keys_BKTC: Tensor,
    values_BKTC: Tensor,
    blocks_RN: Tensor,
    seen_R2: Tensor,
    scale: float,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention of one query row per request through its block table, [R, H, C]."""
    (requests, heads, channels), kv_heads = q_RHC.shape, keys_BKTC.shape[1]
    q_RHC = q_RHC.contiguous()
    out_RHC = torch.empty((requests, heads, channels), dtype=torch.bfloat16)
    tensors = (q_RHC, keys_BKTC, values_BKTC, blocks_RN, seen_R2, out_RHC)
    function("paged_decode", "ppppppiiiiiff")(
        *(each.data_ptr() for each in tensors),
        *(requests, blocks_RN.shape[1], kv_heads, heads // kv_heads, channels),
        *(scale, soft_cap or 0.0),
    )
    return out_RHC


def add_norm_(
    x_SD: Tensor, y_SD: Tensor | None, after_D: Tensor | None, before_D: Tensor | None, eps: float
) -> Tensor | None:
    """x += norm(y) * after, in place; then norm(x) * before.

    Args:
        x_SD: contiguous.
        y_SD: None: x stays as it is.
        after_D: float32; None: y itself is added.
        before_D: float32; None: nothing is returned.
    """
    rows, channels = x_SD.shape
    normed_SD = None if before_D is None else torch.empty_like(x_SD)
    y_SD = None if y_SD is None else y_SD.contiguous()
    function("add_norm", "pppppiif")(
        *map(address, (x_SD, y_SD, after_D, before_D, normed_SD)), rows, channels, eps
    )
    return normed_SD


def gate_pairs(gate_up_SF: Tensor, activation: str) -> Tensor:
    """activation(first half of each row) * second half."""
    rows, width = gate_up_SF.shape
    out_SF = torch.empty((rows, width // 2), dtype=torch.bfloat16)
    function("gate_pairs", "ppiii")(
        *(gate_up_SF.contiguous().data_ptr(), out_SF.data_ptr()),
        *(rows, width // 2, GATES[activation]),
    )
    return out_SF


def turn_and_store(
    made_SNC: Tensor,
    scale_HC: Tensor | None,
    rope: tuple[Tensor, Tensor],
    places_SK: Tensor,
    pools: tuple[Tensor, Tensor],
    num_heads: int,
    *,
    eps: float,
    norms_values: bool,
) -> Tensor:
    """Queries [S, H, C], normalised and rotated; keys and values go into the pools.

    Args:
        made_SNC: what qkv gave: H queries, then nothing, keys, or keys and values.
        scale_HC: of the norm of queries and keys [H + K, C], float32; None: no norm.
        rope: cos and sin, float32 [S, 1, C / 2] each.
        places_SK: rows of the pools, seen as [.., C].
        pools: of keys and values of the layer.
        norms_values: values are normalised, without a scale.
    """
    (rows, num_made, channels), num_kv_heads = made_SNC.shape, places_SK.shape[1]
    q_SHC = torch.empty((rows, num_heads, channels), dtype=torch.bfloat16)
    made_SNC = made_SNC.contiguous()
    function("turn_and_store", "ppppppppiiiiiif")(
        *map(address, (made_SNC, scale_HC, *rope, places_SK, q_SHC, *pools)),
        *(rows, num_made, num_heads, num_kv_heads, channels, int(norms_values), eps),
    )
    return q_SHC


def decode_layer_(
    x_SD: Tensor,
    normed_SD: Tensor,
    matrices: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    rope: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor, Tensor],
    pools: tuple[Tensor, Tensor],
    num_heads: int,
    *,
    activation: str,
    norms_values: bool,
    scale: float,
    eps: float,
) -> None:
    """A layer of a decode step in one call: x and its norm become those of the next layer.

    The same kernels as the functions above, one after the other, without Python in between.

    Args:
        matrices: qkv, out, gate_up, down, as `engines.serve.packed` has them.
        scales: of the norms of queries and keys, after attention, before and after the
            feed-forward, and before the next layer.
        tables: places of new keys [S, K], blocks [S, N] and what of them is seen [S, 2].
        pools: of keys and values of the layer [.., K, 16, C].
    """
    (rows, width), (_, num_kv_heads, _, channels) = x_SD.shape, pools[0].shape
    tensors = (x_SD, normed_SD, *matrices, *scales, *rope, *tables, *pools)
    function("decode_layer", "p" * 18 + "i" * 10 + "ff")(
        *map(address, tensors),
        *(rows, width, matrices[0].shape[0] // channels, num_heads, num_kv_heads, channels),
        *(matrices[3].shape[1], tables[1].shape[1], GATES[activation], int(norms_values)),
        *(scale, eps),
    )


def read_all(words: Tensor) -> int:
    """The sum of all int64 words, wrapped: as fast as all threads can read memory in order."""
    total = torch.empty((), dtype=torch.int64)
    function("read_all", "pip")(words.data_ptr(), words.numel(), total.data_ptr())
    return int(total)
