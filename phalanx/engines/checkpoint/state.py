"""What a checkpoint of training holds: trained weights, moments and counts, by canonical name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.engines.checkpoint.agree import Council
from phalanx.engines.checkpoint.manifest import OPTIMIZER, WEIGHTS
from phalanx.engines.checkpoint.slices import Slice, local_part, slice_of
from phalanx.engines.optim import ShardedAdamW

NAMED_BYTES = 256  # of a slice in a header and in the manifest, about


@dataclass(frozen=True)
class Entry:
    """A tensor of the state, as a rank holds it.

    Attributes:
        part: kind of file that it is kept in, `WEIGHTS` or `OPTIMIZER`.
        tensor: plain or DTensor; shares memory with the model or the optimizer.
        held: what this rank has of it.
    """

    part: str
    tensor: Tensor
    held: Slice

    @property
    def local(self) -> Tensor:
        """What this rank has of it, in place."""
        return local_part(self.tensor)


class Form(NamedTuple):
    """Shape and dtype of a whole tensor; all ranks know those of all, whoever holds them."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        """Of a plain tensor or a DTensor."""
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    @property
    def element_bytes(self) -> int:
        """Of one element."""
        return getattr(torch, self.dtype).itemsize


def all_forms(council: Council, tensors: Mapping[str, Tensor]) -> dict[str, Form]:
    """Of the tensors of all ranks together, by name; the stages of a pipeline hold different ones.

    All ranks call it.
    """
    forms: dict[str, Form] = {}
    for of_rank in council.gather({name: Form.of(each) for name, each in tensors.items()}):
        forms |= {name: Form(tuple(shape), dtype) for name, (shape, dtype) in of_rank.items()}
    return forms


def weight_entries(optimizer: ShardedAdamW) -> dict[str, Entry]:
    """Trained parameters: the optimizer's, because those of the module may be gathered just now."""
    named = optimizer.named_parameters.items()
    return {name: Entry(WEIGHTS, each, slice_of(name, each)) for name, each in named}


def optimizer_entries(optimizer: ShardedAdamW) -> dict[str, Entry]:
    """Moments and numbers of updates, "optimizer.<kind>.<canonical name>"."""
    return {
        (full := f"{OPTIMIZER}.{kind}.{name}"): Entry(OPTIMIZER, each, slice_of(full, each))
        for kind, tensors in optimizer.state_dict().items()
        for name, each in tensors.items()
    }


class Sizes(NamedTuple):
    """Of what is trained, on all ranks together.

    Attributes:
        num_tensors: trained weights.
        weight_bytes, state_bytes: of them, and of what the optimizer keeps for them.
    """

    num_tensors: int
    weight_bytes: int
    state_bytes: int

    @classmethod
    def of(cls, council: Council, optimizer: ShardedAdamW) -> Sizes:
        """All ranks call it; what several hold counts once."""
        mine = {
            name: (each.nbytes, each.numel() * optimizer.state_element_bytes(each))
            for name, each in optimizer.named_parameters.items()
        }
        every = {n: each for of_rank in council.gather(mine) for n, each in of_rank.items()}
        return cls(len(every), *(sum(each[at] for each in every.values()) for at in (0, 1)))

    def checkpoint_bytes(self, num_ranks: int, *, with_optimizer: bool = True) -> int:
        """Of one checkpoint; headers and the manifest are estimated."""
        kinds = 4 if with_optimizer else 1
        named_bytes = kinds * self.num_tensors * (num_ranks + 1) * NAMED_BYTES
        return self.weight_bytes + with_optimizer * self.state_bytes + named_bytes
