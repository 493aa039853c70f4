"""Trained weights whole, one after another, wherever the ranks of a mesh hold them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.models.decoder import Decoder


def whole_weights(
    decoder: Decoder, group: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, whole tensor on the CPU) of what is trained, in model order.

    All ranks call it and go through it to the end: what a mesh has cut is gathered on the way. Rank
    0 of the world gets every tensor; elsewhere the weights of other stages are left out.

    Args:
        decoder: bound.
        group: ranks that hold the stages of this rank's pipeline; None: it is not cut into stages.
    """
    mine = {name: each for name, each in decoder.named_parameters() if each.requires_grad}
    if group is None:
        yield from ((name, _whole(each)) for name, each in mine.items())
        return
    forms = [{}] * group.size()
    dist.all_gather_object(
        forms, {n: (tuple(p.shape), p.dtype) for n, p in mine.items()}, group=group
    )
    # a weight of two stages (the embedding, where it is the head too) comes from the first
    owner = {name: rank for rank in reversed(range(group.size())) for name in forms[rank]}
    rank, collects = group.rank(), dist.get_global_rank(group, 0) == 0
    for name in sorted(owner, key=lambda name: _depth(name, decoder.config.num_layers)):
        source = owner[name]
        if source == rank:
            whole = _whole(mine[name])
            if rank > 0 and collects:
                dist.send(whole.contiguous(), group=group, group_dst=0)
            yield name, whole
        elif rank == 0 and collects:
            shape, dtype = forms[source][name]
            whole = torch.empty(shape, dtype=dtype)
            dist.recv(whole, group=group, group_src=source)
            yield name, whole


def _depth(name: str, num_layers: int) -> int:
    """Place in the model: embeddings, layers by number, then what follows them."""
    words = name.split(".")
    if "layers" in words:
        return int(words[words.index("layers") + 1])
    return -1 if any(word.startswith("embed") for word in words) else num_layers


def _whole(parameter: nn.Parameter) -> Tensor:
    value = parameter.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
