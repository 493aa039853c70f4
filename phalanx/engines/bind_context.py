"""Context specs applied to a training process: which tokens of a row it has, how it attends.

It reads rules, never names of policies: the rule of the rows (pattern "") places tokens by a layout
(`layout.token_layout`); that of attention says how queries meet the keys of other ranks
(`ops.context_attention`):

- "ring": keys and values go round;
- "all_gather": each rank gathers those of the whole row;
- "all_to_all": each rank gets the whole row of its part of the heads;
- "wanted", of layers with a sliding window: ranks send one another the keys that are seen there.

Two specs compose on two axes where one exchanges heads: then the ranks of its axis hold one place
of the other one's layout between them.

Modules stay as they are. Rows are cut before the embedding, and attention is given to the decoder
with every row (`models.decoder_layers.Attend`). Parameters see the axes as more data axes:
`bind.bind_data` sums gradients over them.

Legend: c tokens of a rank, H query heads, K key/value heads, C channels per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh

from phalanx.data.batches import MicroBatch
from phalanx.data.row_part import RowPart, cut_row
from phalanx.errors import PlanError
from phalanx.layout.context_part import ContextPart, require_head_split
from phalanx.layout.tensor_split import kv_heads_of
from phalanx.layout.token_layout import row_multiple
from phalanx.models.decoder_layers import Attend
from phalanx.models.spec import DecoderConfig
from phalanx.ops.context_attention import (
    PartAttend,
    gathered_attention,
    ring_attention,
    ulysses_attention,
    wanted_attention,
)
from phalanx.policy import Rule, Spec

EXCHANGES = ("ring", "all_gather", "all_to_all")
_HEADS, _WANTED = "all_to_all", "wanted"
_ATTENTION = "model.layers.0.self_attn"


class BoundContext:
    """How the ranks of one axis, or of two, share every row.

    Args:
        axes: of the mesh, for the log of what is shared.
        layout: of tokens, one of `layout.token_layout.LAYOUTS`.
        places: group of ranks that hold different places of the layout; None: there is one place.
        heads: group of ranks that hold one place between them and exchange heads, or None.
        attend: attention, with its groups bound.
    """

    def __init__(
        self,
        axes: tuple[str, ...],
        layout: str,
        places: dist.ProcessGroup | None,
        heads: dist.ProcessGroup | None,
        attend: PartAttend,
    ) -> None:
        self.axes, self.layout, self._attend = axes, layout, attend
        self._num_places, place = _size_and_rank(places)
        self._per_place, member = _size_and_rank(heads)
        self.rank = place * self._per_place + member

    @property
    def degree(self) -> int:
        """Ranks that share a row."""
        return self._num_places * self._per_place

    @property
    def row_multiple(self) -> int:
        """Tokens of a row must be a multiple of it."""
        return lcm(row_multiple(self.layout, self._num_places), self.degree)

    def length(self, num_tokens: int) -> int:
        """Tokens that each rank has of a row of so many."""
        return num_tokens // self.degree

    def cut(self, row: MicroBatch) -> RowPart:
        """This rank's tokens of a row, with positions and targets."""
        return cut_row(row, self._part(row).tokens_c)

    def attend(self, row: MicroBatch) -> Attend:
        """Attention of this rank's queries to the row, for `Decoder.forward`; all ranks that share
        the row call it as often, in one order."""
        return partial(self._attend, part=self._part(row))

    def _part(self, row: MicroBatch) -> ContextPart:
        starts, length = row.document_starts, len(row.tokens_S)
        return ContextPart.of_row(
            self.layout, self.rank, self.degree, starts, length, inner=self._per_place
        )


def bind_context(
    specs: Sequence[Spec], mesh: DeviceMesh, config: DecoderConfig, tensor_degree: int = 1
) -> BoundContext | None:
    """How rows are shared; None where each rank has its own.

    Args:
        specs: of axes with more than one rank at most two, of which one exchanges heads.
        mesh: with the specs' axes among its named dims.
        tensor_degree: ranks that share the heads already.

    Raises:
        PlanError: `plan/illegal` for an axis that the mesh lacks, specs that do not compose, or an
            exchange that is not carried out; `layout/divide` for heads that cannot be exchanged.
    """
    by_kind: dict[bool, tuple[Spec, Rule, Rule]] = {}
    for spec in _sharing(specs, mesh):
        rows, attention = _rules(spec)
        of_heads = attention.placement == _HEADS
        if of_heads in by_kind:
            rule = "two axes share rows where one of them exchanges heads, and only then"
            axes = f"{by_kind[of_heads][0].axis}+{spec.axis}"
            raise PlanError("plan/illegal", "plan.context", axes, rule)
        by_kind[of_heads] = spec, rows, attention
    if not by_kind:
        return None
    axes = tuple(spec.axis for spec, *_ in by_kind.values())
    outer, inner = by_kind.get(False), by_kind.get(True)
    around = None if outer is None else _bound(*outer, mesh.get_group(outer[0].axis))
    if inner is None:
        spec, rows, _ = outer
        return BoundContext(axes, rows.placement, mesh.get_group(spec.axis), None, around)
    heads = mesh.get_group(inner[0].axis)
    _require_heads(config, heads.size(), tensor_degree, f"plan.mesh.{inner[0].axis}")
    attend = partial(ulysses_attention, group=heads, attend=around)
    if outer is None:
        return BoundContext(axes, inner[1].placement, heads, None, attend)
    places = mesh.get_group(outer[0].axis)
    return BoundContext(axes, outer[1].placement, places, heads, attend)


def _size_and_rank(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (1, 0) if group is None else (group.size(), group.rank())


def _sharing(specs: Sequence[Spec], mesh: DeviceMesh) -> list[Spec]:
    """The specs along axes of more than one rank."""
    for spec in specs:
        if spec.axis not in (mesh.mesh_dim_names or ()):
            where = f"policy.{spec.family}.{spec.policy_name}.axis"
            rule, legal = "the mesh has no such axis", mesh.mesh_dim_names or ()
            raise PlanError("plan/illegal", where, spec.axis, rule, legal=legal)
    return [spec for spec in specs if mesh[spec.axis].size() > 1]


def _rules(spec: Spec) -> tuple[Rule, Rule]:
    """Of the rows and of attention."""
    rows, attention = spec.rule_for(""), spec.rule_for(_ATTENTION)
    if rows is None or attention is None or attention.placement not in EXCHANGES:
        where = f"policy.{spec.family}.{spec.policy_name}"
        value = None if attention is None else attention.placement
        rule = "is no way in which ranks share a row"
        raise PlanError("plan/illegal", where, value, rule, legal=EXCHANGES)
    return rows, attention


def _bound(spec: Spec, _rows: Rule, attention: Rule, group: dist.ProcessGroup) -> PartAttend:
    """Attention among ranks that hold different places."""
    if attention.placement == "ring":
        attend = partial(ring_attention, group=group)
    else:
        name = attention.reduce_dtype
        dtype = getattr(torch, name) if name else None
        attend = partial(gathered_attention, group=group, sum_dtype=dtype)
    windowed = spec.rule_for(f"{_ATTENTION}.window")
    if windowed is None or windowed.placement != _WANTED:
        return attend
    return partial(_by_window, attend, partial(wanted_attention, group=group))


def _by_window(
    attend: PartAttend,
    of_windows: PartAttend,
    q_cHC: Tensor,
    k_cKC: Tensor,
    v_cKC: Tensor,
    part: ContextPart,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """`of_windows` where a query sees so many keys only, else `attend`."""
    chosen = attend if window is None else of_windows
    return chosen(q_cHC, k_cKC, v_cKC, part, scale=scale, window=window)


def _require_heads(config: DecoderConfig, degree: int, tensor_degree: int, where: str) -> None:
    """Refuse heads of a rank, after tensor parallelism, that the ranks cannot share out."""
    for kind in config.kinds:
        of_rank = kv_heads_of(kind.num_heads, kind.num_kv_heads, tensor_degree, 0)
        require_head_split(kind.num_heads // tensor_degree, len(of_rank), degree, where)
