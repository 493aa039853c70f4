"""Optimizer states that wait outside the device: in host memory, or in a file.

Rajbhandari and others, "ZeRO-Offload", arXiv 2101.06840, section 4: gradients go down and weights
come up in the dtype in which weights are computed; moments and master weights never leave the host,
where the update runs. On a machine whose devices are the host itself a file takes their place
(ZeRO-Infinity, arXiv 2104.07857, section 5): it is mapped and updated piece by piece.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from phalanx.engines.coming import Coming, pinned_like
from phalanx.engines.local_parts import local_of, placed_on_host
from phalanx.engines.optim import MOMENTS, ShardedAdamW
from phalanx.errors import JobError

PIECE_BYTES = 1 << 26  # of states that are mapped at a time, and of gradients that are down
MASTER = "master"


class Store(Protocol):
    """Where states wait."""

    def zeros(self, like: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        """CPU tensors of these shapes, in their dtypes or in another one, filled with zeros."""
        ...

    def release(self) -> None:
        """What was touched may leave memory."""
        ...


class HostMemory:
    """Not pinned: no state travels, and torch rounds pinned memory up to powers of two."""

    def zeros(self, like: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        return [torch.zeros(each.shape, dtype=dtype or each.dtype) for each in like]

    def release(self) -> None:
        pass


class MappedFile:
    """Files without a name in a folder, so that nothing is left behind however a run ends.

    Args:
        folder: on a disk with room for the states.

    Raises:
        JobError: `environment/disk` for a disk without that room.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: list[mmap.mmap] = []

    def zeros(self, like: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        dtypes = [dtype or each.dtype for each in like]
        sizes = [-(-t.numel() * d.itemsize // 64) * 64 for t, d in zip(like, dtypes)]
        whole = self._mapped(max(sum(sizes), 64))
        parts = whole[: sum(sizes)].split(sizes) if sizes else ()
        return [
            part[: each.numel() * kind.itemsize].view(kind).view(each.shape)
            for part, each, kind in zip(parts, like, dtypes)
        ]

    def _mapped(self, num_bytes: int) -> Tensor:
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError as error:
                rule = f"has no room for {num_bytes:,} bytes of optimizer states: {error.strerror}"
                where = "plan.offload = file"
                raise JobError("environment/disk", where, self._folder, rule) from error
            self._maps.append(mmap.mmap(file.fileno(), num_bytes))
        return torch.frombuffer(self._maps[-1], dtype=torch.uint8)

    def release(self) -> None:
        for each in self._maps:
            each.madvise(mmap.MADV_DONTNEED)  # of a shared file: written back, read again


class OffloadedAdamW(ShardedAdamW):
    """AdamW on the host, with states that wait in a store; all else is as `ShardedAdamW`.

    Update for update the bits are those of `ShardedAdamW` on the host.

    Args:
        named_parameters: see `ShardedAdamW`; the device's, in the dtype that it computes in.
        store: of moments and masters.
        master: dtype of master weights; they are apart from the parameters where these are on
            another device or in another dtype, and start as their values.
        options: of `ShardedAdamW`.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        store: Store,
        master: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(named_parameters, **options)
        self._store, self._master = store, master

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """With masters, where they are apart, as a kind "master" beside the moments."""
        kinds = super().state_dict()
        for kind in (*MOMENTS, MASTER):
            for at, (name, parameter) in enumerate(self.named_parameters.items()):
                if kind in self._state:
                    placed = placed_on_host(parameter, self._state[kind][at])
                    kinds.setdefault(kind, {})[name] = placed
        return kinds

    def _create_state(self) -> None:
        if self._state or not self.parameters:
            return
        locals_ = [local_of(parameter) for parameter in self.parameters]
        for kind in MOMENTS:
            self._state[kind] = self._store.zeros(locals_, self._master)
        self._state["step"] = list(torch.zeros(len(locals_)).unbind())
        if any(map(self._is_apart, locals_)):
            self._state[MASTER] = self._store.zeros(locals_, self._master)
            self.take_weights()

    @torch.no_grad()
    def take_weights(self) -> None:
        for master, parameter in zip(self._state.get(MASTER, ()), self.parameters):
            master.copy_(local_of(parameter))

    def state_element_bytes(self, parameter: Tensor) -> int:
        itemsize = (self._master or parameter.dtype).itemsize
        return (len(MOMENTS) + self._is_apart(parameter)) * itemsize

    def _is_apart(self, weight: Tensor) -> bool:
        """Whether a weight has a master beside it."""
        return weight.is_cuda or weight.dtype != (self._master or weight.dtype)

    def _update(
        self,
        grads: list[Tensor | None],
        is_matrix: bool,
        lr: float,
        weight_decay: float,
        found_inf: Tensor | None,
    ) -> None:
        found_inf = None if found_inf is None else found_inf.cpu()
        locals_ = [local_of(parameter) for parameter in self.parameters]
        masters = self._state.get(MASTER, locals_)
        wanted = [
            at
            for at, grad in enumerate(grads)
            if grad is not None and (locals_[at].dim() > 1) == is_matrix
        ]
        pieces = list(_pieces(wanted, [each.nbytes for each in locals_]))
        coming = Coming([grads[at] for at in next(iter(pieces), ())])
        for piece, following in zip(pieces, [*pieces[1:], ()]):
            # the next gradients come down while these are used
            here, coming = coming.arrived(), Coming([grads[at] for at in following])
            rows = []
            for at, grad in zip(piece, here):
                state = [self._state[kind][at] for kind in (*MOMENTS, "step")]
                if masters[at].numel():
                    rows.append((masters[at], grad.to(masters[at].dtype), *state))
                else:
                    state[-1].add_(1.0 if found_inf is None else 1.0 - found_inf)
            if rows:
                self._adamw(rows, lr, weight_decay, found_inf)
            for at in piece:
                if masters[at] is not locals_[at]:
                    _send_up(masters[at], locals_[at])
            self._store.release()


def _send_up(master: Tensor, weight: Tensor) -> None:
    """Round a master to the weight that is computed with; the host does not wait for a device."""
    if not weight.is_cuda:
        weight.copy_(master)
        return
    weight.copy_(pinned_like(weight).copy_(master), non_blocking=True)


def make_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    offload: str,
    folder: Path,
    master: torch.dtype | None = None,
    **options: Any,
) -> ShardedAdamW:
    """The optimizer whose states wait where `plan.offload` says.

    Args:
        offload: "none", "host" or "file".
        folder: of the run; a file of states is in it, without a name.
        master: dtype of master weights of an offloaded update.
        options: of `ShardedAdamW`.
    """
    if offload == "none":
        return ShardedAdamW(named_parameters, **options)
    store = HostMemory() if offload == "host" else MappedFile(folder)
    return OffloadedAdamW(named_parameters, store=store, master=master, **options)


def _pieces(indices: Sequence[int], num_bytes: Sequence[int]) -> Iterator[list[int]]:
    """Neighbours of together at most `PIECE_BYTES`, or one that is larger."""
    piece: list[int] = []
    held = 0
    for at in indices:
        if piece and held + num_bytes[at] > PIECE_BYTES:
            yield piece
            piece, held = [], 0
        piece.append(at)
        held += num_bytes[at]
    if piece:
        yield piece
