"""A user's own loss function, named in the job as "module:function".

    def z_loss(hidden_ND, head, targets_N, num_counted_global):
        logits_NV = head(hidden_ND).float()
        lse_N = logits_NV.logsumexp(-1)
        nll_N = lse_N - logits_NV.gather(1, targets_N[:, None])[:, 0]
        return (nll_N + 1e-4 * lse_N.square()).sum() / num_counted_global

It must be a sum over the rows that it gets, divided by `num_counted_global`: then the loss and its
gradients depend neither on ranks nor on micro-batches, and rows can be given to it in chunks, so
that never all logits are held. Ranks that share the tokens of a row (context parallelism) each get
the targets of their own tokens, so rows next to one another need not be neighbours in a document.
N may be 0, on a rank that has no target in a micro-batch; the function is called all the same, so
that every rank has the same gradients to exchange.

Legend: N counted positions (n of a chunk), D model, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phalanx.engines.callbacks import call
from phalanx.engines.user_code import load_named
from phalanx.errors import JobError, WorldError

Head = Callable[[Tensor], Tensor]
LossFunction = Callable[[Tensor, Head, Tensor, int], Tensor]
_WHERE = "train.loss"
_CHUNK_BYTES = 1 << 28  # of a chunk's logits in float32; a loss needs a few times that


def load_loss(spec: str) -> LossFunction:
    """The function that `spec` names; modules are looked for in the working folder too.

    Args:
        spec: "module:function", for example "losses:z_loss" for `z_loss` in ./losses.py.

    Raises:
        JobError: `job/bad-value` unless the module can be imported and has a function that takes
            (hidden_ND, head, targets_N, num_counted_global).
    """
    function = load_named(spec, _WHERE)
    if not callable(function):
        raise JobError("job/bad-value", _WHERE, spec, f"is a {type(function).__name__}")
    try:
        inspect.signature(function).bind(None, None, None, None)
    except TypeError as error:
        rule = (
            f"is called with (hidden_ND, head, targets_N, num_counted_global) "
            f"but takes {inspect.signature(function)}"
        )
        raise JobError("job/bad-value", _WHERE, spec, rule) from error
    return function


def user_loss(
    function: LossFunction,
    hidden_SD: Tensor,
    head: Head,
    counted_N: Tensor,
    targets_N: Tensor,
    *,
    num_counted_global: int,
    vocab_size: int,
    chunk_bytes: int = _CHUNK_BYTES,
) -> Tensor:
    """The user's loss of a micro-batch, a scalar; like `ops.loss.counted_cross_entropy`.

    Rows come in chunks; where there are several, what the function computes from a chunk is
    computed again in the backward pass instead of being kept.

    Args:
        function: from `load_loss`.
        hidden_SD: output of the decoder, after its last norm.
        head: hidden_ND -> logits_NV over the whole vocabulary, soft cap applied.
        counted_N, targets_N: rows that count, and the token that each should predict.
        num_counted_global: counted positions of the whole global batch.
        vocab_size: V.
        chunk_bytes: bound on a chunk's logits, counted in float32.

    Raises:
        WorldError: `train/callback` when the function fails or returns no scalar tensor.
    """
    name = f"{function.__module__}:{function.__qualname__}"

    def of_chunk(rows_nD: Tensor, targets_n: Tensor) -> Tensor:
        value = call(function, name, rows_nD, head, targets_n, num_counted_global)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            rule = "must return a floating-point tensor with one element"
            raise WorldError("train/callback", f"result of {name}", shape, rule)
        return value.reshape(())

    rows_ND = hidden_SD.index_select(0, counted_N)
    size = max(1, chunk_bytes // (4 * vocab_size))
    if rows_ND.shape[0] <= size:
        return of_chunk(rows_ND, targets_N)
    # stopping early would raise torch's signal inside the user's function, which may catch it
    parts = [
        checkpoint(of_chunk, rows_nD, targets_n, use_reentrant=False, early_stop=False)
        for rows_nD, targets_n in zip(rows_ND.split(size), targets_N.split(size))
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
