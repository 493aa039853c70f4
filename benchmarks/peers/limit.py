"""The least time that the products of a step can take here: every shape at its best kernel.

Counted are the products of the frozen matrices, of the adapters and of the head, forward and
backward; not those of attention, which count as time lost to attention. Kernels: what torch offers
for bfloat16 on a CPU (linear, matmul in either orientation, oneDNN with packed weights), the best
of several runs, with the threads of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from peers.case import RANK, Case
from phalanx.models.spec import canonical_tensors, read_config

NAME = "limit"
NUM_PROCESSES = 1
_REPEATS, _ROUND = 4, 32
_HEAD_TILES = (2048, 8192, 1 << 30)

Product = tuple[int, int, int]  # rows, columns, summed


def build(case: Case) -> Callable[[int], None]:
    """A "step" measures every product of the case once more; the best ever counts."""
    best: dict[Product, float] = {}

    def step(number: int) -> None:
        for product in products_of(case, number):
            best[product] = min(best.get(product, float("inf")), _best_s(product))
        step.seconds = sum(times * best[p] for p, times in products_of(case, number).items())  # type: ignore[attr-defined]
        step.flops = sum(t * 2.0 * m * n * k for (m, n, k), t in products_of(case, number).items())  # type: ignore[attr-defined]

    return step


def profiled(step: Callable[[int], None], number: int) -> dict[str, float]:
    """What `step` found: seconds and FLOPs of a step's products."""
    step(number)
    return {"limit_s": step.seconds, "flops": step.flops}  # type: ignore[attr-defined]


def products_of(case: Case, number: int) -> Counter[Product]:
    """Products of a step and how often each comes; rows as our engine fills them."""
    config = read_config(case.model)
    matrices = [
        (spec.shape, spec.name)
        for spec in canonical_tensors(config).values()
        if ".layers." in spec.name and len(spec.shape) == 2
    ]
    found: Counter[Product] = Counter()
    for row in case.rows(number):
        num_rows = -(-len(row.tokens_S) // _ROUND) * _ROUND
        for (num_out, num_in), name in matrices:
            found.update(_of_matrix(num_rows, num_out, num_in, ".layers.0.self_attn.q" in name))
    counts = [len(row.targets_N) for row in case.rows(number)]
    typical = max(1, round(sum(counts) / len(counts)))
    found[(typical, config.vocab_size, config.hidden_size)] += len(counts)
    found[(typical, config.hidden_size, config.vocab_size)] += len(counts)
    return found


def _of_matrix(rows: int, num_out: int, num_in: int, is_first: bool) -> Iterator[Product]:
    yield rows, num_out, num_in  # forward
    if not is_first:
        yield rows, num_in, num_out  # gradient of the input
    yield from ((rows, RANK, num_in), (rows, num_out, RANK))  # adapter forward
    yield from ((rows, RANK, num_out), (rows, num_in, RANK))  # gradients of low and input
    yield from ((RANK, num_in, rows), (num_out, RANK, rows))  # gradients of A and B


def _best_s(product: Product) -> float:
    rows, columns, summed = product
    if max(columns, summed) > 1 << 16:
        return min(_tiled_s(product, tile) for tile in _HEAD_TILES)
    a_MK, b_NK = _drawn(rows, summed), _drawn(columns, summed)
    a_KM, b_KN = a_MK.t().contiguous(), b_NK.t().contiguous()
    ways = [
        lambda: F.linear(a_MK, b_NK),
        lambda: a_MK @ b_KN,
        lambda: a_KM.t() @ b_KN,
        lambda: F.linear(b_NK, a_MK),
    ]
    if rows >= _ROUND and min(columns, summed) >= _ROUND:
        packed = torch.ops.mkldnn._reorder_linear_weight(b_NK, rows)
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(a_MK, packed, None, "none", [], ""))
    return min(map(_time_s, ways))


def _tiled_s(product: Product, tile: int) -> float:
    """The head's products, the long side in tiles, each tile's result dropped."""
    rows, columns, summed = product
    if columns > summed:
        a_MK, b_NK = _drawn(rows, summed), _drawn(columns, summed)

        def all_tiles() -> Tensor:
            for part in b_NK.split(tile):
                logits_MN = F.linear(a_MK, part)
            return logits_MN

        return _time_s(all_tiles, 1)
    a_MK, b_KN = _drawn(rows, summed), _drawn(summed, columns)

    def sum_of_tiles() -> Tensor:
        total = torch.zeros(rows, columns)
        for a, b in zip(a_MK.split(tile, 1), b_KN.split(tile)):
            total += a @ b
        return total

    return _time_s(sum_of_tiles, 1)


def _drawn(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_()


def _time_s(call: Callable[[], Tensor], inner: int = 2) -> float:
    call()
    spent = []
    for _ in range(_REPEATS):
        start_s = perf_counter()
        for _ in range(inner):
            call()
        spent.append((perf_counter() - start_s) / inner)
    return min(spent)
