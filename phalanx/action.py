"""What ranks do: the nine actions, and the program that gives each rank its list.

Grammar of a list
- An action names its `lane`. Actions of one lane run in list order, one at a time; lanes run side
  by side. Overlap is therefore visible: a lane of its own, and `after` where one lane waits for
  another. Lanes: "compute", "axis:<name>" (one process group's stream),
  "send:<axis>:<peer>", "recv:<axis>:<peer>", "copy", "control", or any other name.
- `label` names an action within its rank; `after` lists labels of earlier or later actions of the
  same rank that must have finished first. Only what is waited for needs a label.
- Peers and groups are written along mesh axes (`axis="pp", peer=2`: the rank that differs from mine
  only in standing at 2 on pp), so ranks that behave alike share ONE list and 100,000 ranks cost no
  more than their distinct lists.
- Tensors are handles ("layers.3/full"), sizes are bytes, work is FLOPs: no tensors, no clocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from phalanx.mesh import Mesh

COLLECTIVES = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "barrier",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What all actions share.

    Attributes:
        label: name within the rank, unique in its list ("" when nothing waits for it).
        lane: the queue that it occupies while it runs.
        after: labels of the same rank that must finish first.
        phase: "F" forward, "B" full backward, "I" input gradient, "W" weight gradient, "O"
            optimizer, "P" prefill, "D" decode, or "" outside a step.
        item: micro-batch or request (-1: none).
        stage: pipeline stage, counted along the model (-1: none).
        layer: the module that it works on, by canonical prefix ("layers.3.mlp").
        ranks: who carries it out, where a leader decides for a scope; () = everyone in the scope.
    """

    kind: ClassVar[str] = "action"
    label: str = ""
    lane: str = "compute"
    after: tuple[str, ...] = ()
    phase: str = ""
    item: int = -1
    stage: int = -1
    layer: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def operator(self) -> str:
        """What the trace calls it: the op of a Compute, the collective's kind, the name of a Mark,
        "alloc.host" where the memory is not the device's, else the class."""
        return self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(Action):
    """Run the op named `op`: a world looks it up among its ops, a cost model prices it.

    Attributes:
        op: name known both to the world's ops and to the cost model.
        flops: floating-point operations (a multiply-add is 2).
        moved_bytes: bytes read and written in device memory.
        num_tokens: tokens of the item, for ops priced per token.
        batch: arrays of an engine step (one action carries the whole batch), opaque here.
    """

    kind: ClassVar[str] = "compute"
    op: str
    flops: float = 0.0
    moved_bytes: float = 0.0
    num_tokens: int = 0
    batch: object = None

    @property
    def operator(self) -> str:
        return self.op


@dataclass(frozen=True, slots=True, kw_only=True)
class Send(Action):
    """Send `tensor` to the rank at coordinate `peer` on `axis`."""

    kind: ClassVar[str] = "send"
    axis: str
    peer: int
    tensor: str
    payload_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recv(Action):
    """Receive `tensor` from the rank at coordinate `peer` on `axis`."""

    kind: ClassVar[str] = "recv"
    axis: str
    peer: int
    tensor: str
    payload_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(Action):
    """One collective over the group along `axis` (or over `members` in a group that changes).

    Attributes:
        collective: one of `COLLECTIVES`.
        axis: mesh axis, or the name of a logical group whose membership has epochs.
        tensor: handle of the input.
        into: handle of the output ("" = the input's: in place).
        payload_bytes: size of the whole logical tensor on one rank: the gathered output, the
            input of a reduce-scatter, the reduced tensor. Independent of the algorithm.
        members: global ranks, in order, where membership is a decision; () = the axis' group.
        epoch: membership epoch of a logical group.
    """

    kind: ClassVar[str] = "collective"
    collective: str
    axis: str
    tensor: str = ""
    into: str = ""
    payload_bytes: float = 0.0
    members: tuple[int, ...] = ()
    epoch: int = 0

    @property
    def operator(self) -> str:
        return self.collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Move(Action):
    """Copy `tensor` between memories of one rank ("device", "host", "disk")."""

    kind: ClassVar[str] = "move"
    tensor: str
    source: str
    target: str
    payload_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alloc(Action):
    """`num_bytes` of `memory` are taken from here on under the handle `tensor`; takes no time."""

    kind: ClassVar[str] = "alloc"
    tensor: str
    num_bytes: float
    memory: str = "device"

    @property
    def operator(self) -> str:
        return self.kind if self.memory == "device" else f"{self.kind}.{self.memory}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Free(Action):
    """The memory of `tensor` is given back; takes no time."""

    kind: ClassVar[str] = "free"
    tensor: str
    memory: str = "device"

    @property
    def operator(self) -> str:
        return self.kind if self.memory == "device" else f"{self.kind}.{self.memory}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer(Action):
    """An event after `delay_s`; occupies no lane."""

    kind: ClassVar[str] = "timer"
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark(Action):
    """A named instant or decision in the trace; takes no time."""

    kind: ClassVar[str] = "mark"
    name: str
    value: float = 0.0

    @property
    def operator(self) -> str:
        return self.name


@dataclass(frozen=True)
class Program:
    """One list of actions per rank; ranks that behave alike share a list.

    Attributes:
        mesh: the grid that axes and peers refer to.
        lists: the distinct lists.
        list_of_rank: index into `lists` for each rank of the mesh.
    """

    mesh: Mesh
    lists: tuple[Sequence[Action], ...]
    list_of_rank: tuple[int, ...]
    notes: Mapping[str, object] = field(default_factory=dict)

    @staticmethod
    def by_axis(mesh: Mesh, axis: str, lists: Sequence[Sequence[Action]]) -> Program:
        """Ranks take the list of their coordinate on `axis`."""
        of_rank = tuple(mesh.coordinate(rank, axis) for rank in range(mesh.size))
        return Program(mesh, tuple(lists), of_rank)

    @staticmethod
    def alike(mesh: Mesh, actions: Sequence[Action]) -> Program:
        """All ranks run the same list."""
        return Program(mesh, (actions,), (0,) * mesh.size)

    def of(self, rank: int) -> Sequence[Action]:
        """The list of a rank."""
        return self.lists[self.list_of_rank[rank]]

    def representatives(self) -> Iterator[int]:
        """The lowest rank of each distinct list."""
        seen: set[int] = set()
        for rank, index in enumerate(self.list_of_rank):
            if index not in seen:
                seen.add(index)
                yield rank

    def __len__(self) -> int:
        """Actions over all ranks."""
        sizes = [len(actions) for actions in self.lists]
        return sum(sizes[index] for index in self.list_of_rank)
