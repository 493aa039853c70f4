"""Results that autograd does not keep, but how to make them: once, when the backward pass asks.

    with remaking() as remade:
        whole = gather(part)
        if remade is not None:
            remade.note(whole, gather, part)
        out = products(whole)  # keep `part`; their backward passes share one more gather

Regions may lie in one another: the outermost keeps the books for all. Inside `repeated`, where a
whole pass is computed again in the backward pass, nothing needs to be made again, so there are no
regions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

_current: Remade | None = None
_is_repeated = False


class Remade:
    """What a region knows how to make."""

    def __init__(self) -> None:
        self._makers: dict[StorageWeakRef, _Maker] = {}

    def note(self, result: Tensor, make: Callable[..., Tensor], *args: Any, **kwargs: Any) -> None:
        """`make(*args, **kwargs)` gives the values of `result`; its storage stands for it."""
        maker = _Maker(make, _detached(args), _detached(kwargs), result._version)
        self._makers[StorageWeakRef(result.untyped_storage())] = maker

    def _pack(self, tensor: Tensor) -> Any:
        """What to keep for a tensor that the backward pass wants."""
        if isinstance(tensor, DTensor):
            return tensor
        maker = self._makers.get(StorageWeakRef(tensor.untyped_storage()))
        if maker is None or maker.version != tensor._version:
            return tensor
        maker.num_left += 1
        return _Kept(maker, tensor.size(), tensor.stride(), tensor.storage_offset())


@contextmanager
def remaking() -> Iterator[Remade | None]:
    """A region whose noted results are made again; None where nothing is kept for a backward pass,
    or everything is repeated."""
    global _current
    if _current is not None or _is_repeated or not torch.is_grad_enabled():
        yield _current
        return
    _current = Remade()
    try:
        with saved_tensors_hooks(_current._pack, _unpack):
            yield _current
    finally:
        _current = None


@contextmanager
def repeated() -> Iterator[None]:
    """A pass that the backward pass computes again as a whole."""
    global _is_repeated
    before, _is_repeated = _is_repeated, True
    try:
        yield
    finally:
        _is_repeated = before


class _Maker:
    """How to make a result again; made once for all who want it, and forgotten after the last."""

    def __init__(self, make: Callable[..., Tensor], args: tuple, kwargs: dict, version: int):
        self.make, self.args, self.kwargs, self.version = make, args, kwargs, version
        self.num_left = 0
        self._result: Tensor | None = None

    def result(self) -> Tensor:
        """The same values in the same layout."""
        result = self._result
        if result is None:
            with torch.no_grad():
                result = self.make(*self.args, **self.kwargs)
        self.num_left -= 1
        self._result = result if self.num_left > 0 else None
        return result


class _Kept(NamedTuple):
    """A view of a result that will be made again."""

    maker: _Maker
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    return kept.maker.result().as_strided(kept.size, kept.stride, kept.offset)


def _detached(value: Any) -> Any:
    """Arguments without what autograd knows of them."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple):
        return tuple(_detached(each) for each in value)
    if isinstance(value, dict):
        return {name: _detached(each) for name, each in value.items()}
    return value
