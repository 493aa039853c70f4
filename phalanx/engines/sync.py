"""Outer synchronisation of real parameters: fragments, their outer state, and the ops on them.

Legend: N elements of one fragment, flat.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.action import Compute
from phalanx.errors import PlanError
from phalanx.ops.outer import blend_, nesterov_step_, outer_delta_
from phalanx.worlds.torch_tensors import Op, RankContext

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def strided_fragments(names: Sequence[str], num_fragments: int) -> list[list[str]]:
    """Layer l goes to fragment l mod P ("strided"); what no layer holds goes to fragment 0.

    Args:
        names: canonical parameter names ("layers.3.mlp.up_proj.weight"), each tensor once.
        num_fragments: P.

    Raises:
        PlanError: `plan/illegal` when a fragment would be empty.

    Source: arXiv 2501.18512, Section 2.2. Which fragment carries the embedding is not stated there.
    """
    fragments: list[list[str]] = [[] for _ in range(num_fragments)]
    for name in names:
        layer = _LAYER.search(name)
        fragments[int(layer[1]) % num_fragments if layer else 0].append(name)
    filled = sum(1 for fragment in fragments if fragment)
    if filled < num_fragments:
        rule = f"only {filled} fragments would hold a parameter"
        raise PlanError("plan/illegal", "num_fragments", num_fragments, rule, legal=[filled])
    return fragments


class Fragment:
    """Local parameters of one fragment beside its outer parameters, momentum and delta.

    The three are flat and of one dtype; they start as the local values, zero and zero. Replicas
    must start from identical local values.

    Args:
        locals_: the parameters that the inner optimizer moves, in the same order on all replicas.
        dtype: of the outer state; float32 keeps small outer updates that bfloat16 would lose.
    """

    def __init__(self, locals_: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.locals_ = list(locals_)
        self.outer_N = torch.cat([p.detach().reshape(-1).to(dtype) for p in self.locals_])
        self.momentum_N = torch.zeros_like(self.outer_N)
        self.delta_N = torch.zeros_like(self.outer_N)

    @property
    def num_bytes(self) -> int:
        """What one exchange carries."""
        return self.delta_N.numel() * self.delta_N.element_size()

    def measure_delta(self) -> Tensor:
        """outer - local, flat; the same memory each time."""
        for delta, outer, local in self._pairs(self.delta_N, self.outer_N):
            outer_delta_(delta, outer, local.detach())
        return self.delta_N

    def apply(
        self, sum_N: Tensor, num_contributors: int, lr: float, momentum: float, blend: float
    ) -> None:
        """Outer step with the sum of the contributors' deltas (overwritten), then the blend."""
        mean_N = sum_N.div_(num_contributors)
        nesterov_step_(self.outer_N, self.momentum_N, mean_N, lr, momentum)
        for outer, local in self._pairs(self.outer_N):
            blend_(local.detach(), outer, blend)

    def state_dict(self) -> dict[str, Tensor]:
        """Outer parameters and momentum: what a replica that joins needs beside the rest."""
        return {"outer": self.outer_N, "momentum": self.momentum_N}

    def _pairs(self, *flat: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """For each local parameter the views of its part in `flat`, then the parameter."""
        sizes = [p.numel() for p in self.locals_]
        for local, *pieces in zip(self.locals_, *(each.split(sizes) for each in flat)):
            yield *(piece.view(local.shape) for piece in pieces), local


class OuterSync:
    """The ops that a sync policy's actions name, on the parameters of one rank.

    Args:
        params: canonical name -> local parameter (or this rank's shard of it).
        fragments: names of each fragment, as `strided_fragments` gives them.
        dtype: of the outer state and of the exchange.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        fragments: Sequence[Sequence[str]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.fragments = [Fragment([params[name] for name in part], dtype) for part in fragments]

    @property
    def facts(self) -> dict[str, Any]:
        """What the policy's view must hold."""
        return {"fragment_bytes": tuple(fragment.num_bytes for fragment in self.fragments)}

    @property
    def ops(self) -> dict[str, Op]:
        """Op name -> function of the rank's context and the action."""
        return {"outer.delta": self._delta, "outer.apply": self._apply}

    def _delta(self, context: RankContext, action: Compute) -> None:
        index = action.batch["fragment"]
        context.tensors[f"fragment.{index}/delta"] = self.fragments[index].measure_delta()

    def _apply(self, context: RankContext, action: Compute) -> None:
        options = dict(action.batch)
        index = options.pop("fragment")
        self.fragments[index].apply(context.get(f"fragment.{index}/delta"), **options)
