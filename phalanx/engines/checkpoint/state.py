"""What a checkpoint of training holds: trained weights, moments and counts, by canonical name."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from phalanx.engines.checkpoint.manifest import OPTIMIZER, WEIGHTS
from phalanx.engines.checkpoint.slices import Slice, local_part, slice_of
from phalanx.engines.optim import ShardedAdamW

NAMED_BYTES = 256  # of a slice in a header and in the manifest, about


@dataclass(frozen=True)
class Entry:
    """A tensor of the state.

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


def predicted_bytes(optimizer: ShardedAdamW, num_ranks: int, *, with_optimizer: bool = True) -> int:
    """Of one checkpoint of all ranks together; headers and the manifest are estimated."""
    tensors = optimizer.named_parameters.values()
    values = sum(each.numel() * each.element_size() for each in tensors)
    copies, kinds = (3, 4) if with_optimizer else (1, 1)
    return copies * values + kinds * len(tensors) * (num_ranks + 1) * NAMED_BYTES
