"""Three small programs and their ops, to be run in every world.

N elements of a message; handles carry the rank or item that they belong to.
"""

from __future__ import annotations

import torch

from phalanx.action import Alloc, Collective, Compute, Free, Mark, Move, Program, Recv, Send
from phalanx.mesh import Mesh
from phalanx.worlds.torch_tensors import RankContext

N = 7
MESSAGE_BYTES = 4.0 * N


def fill(context: RankContext, action: Compute) -> None:
    """Values that depend on the rank only; `num_tokens` parts of N."""
    generator = torch.Generator().manual_seed(100 + context.rank)
    x = torch.randn(max(1, action.num_tokens) * N, generator=generator)
    context.tensors[f"x:{context.rank}"] = context.tensors["x"] = x


def fold(context: RankContext, action: Compute) -> None:
    """What came from the rank before joins what is here."""
    before = (context.rank - 1) % context.mesh.size
    mine = f"x:{context.rank}"
    context.tensors[mine] = 0.5 * context.tensors[mine] + context.tensors[f"x:{before}"]


def stage(context: RankContext, action: Compute) -> None:
    """Forward of a pipeline stage, another map on each."""
    arrived = context.tensors.get(f"act:{action.stage - 1}.{action.item}")
    x_N = torch.full((N,), 1.0 + action.item) if arrived is None else arrived
    context.tensors[f"act:{action.stage}.{action.item}"] = torch.sin(x_N) * (2.0 + action.stage)


def square(context: RankContext, action: Compute) -> None:
    """The gathered tensor, element by element."""
    context.tensors["full"] = context.tensors["full"] ** 2


OPS = {"fill": fill, "fold": fold, "stage": stage, "square": square}


def ring(size: int, num_rounds: int = 2) -> Program:
    """Each rank gives to the next one and folds in what the one before gave."""
    lists = []
    for me in range(size):
        actions = [Compute(op="fill", label="fill")]
        for n in range(num_rounds):
            before = (me - 1) % size
            message = {"axis": "cp", "payload_bytes": MESSAGE_BYTES, "item": n}
            send = Send(
                **message,
                peer=(me + 1) % size,
                tensor=f"x:{me}",
                lane="send:cp",
                label=f"send{n}",
                after=(f"fold{n - 1}" if n else "fill",),
            )
            recv = Recv(
                **message,
                peer=before,
                tensor=f"x:{before}",
                lane="recv:cp",
                label=f"recv{n}",
                after=(f"fold{n - 1}",) if n else (),  # which still reads what came last
            )
            both = (send.label, recv.label)
            actions += [send, recv, Compute(op="fold", label=f"fold{n}", after=both, item=n)]
        lists.append(actions)
    return Program.by_axis(Mesh(cp=size), "cp", lists)


def pipeline(num_items: int = 3) -> Program:
    """Two stages; the second one starts an item while the first computes the next."""
    first, second = [], []
    for item in range(num_items):
        message = {"axis": "pp", "tensor": f"act:0.{item}", "payload_bytes": MESSAGE_BYTES}
        first += [
            Alloc(tensor=f"act:0.{item}", num_bytes=MESSAGE_BYTES),
            Compute(op="stage", label=f"0F{item}", stage=0, item=item, phase="F"),
            Send(**message, peer=1, lane="send:pp", label=f"0SEND{item}", after=(f"0F{item}",)),
            Free(tensor=f"act:0.{item}", after=(f"0SEND{item}",), lane="free"),
        ]
        second += [
            Recv(**message, peer=0, lane="recv:pp", label=f"1RECV{item}"),
            Compute(
                op="stage", label=f"1F{item}", stage=1, item=item, phase="F",
                after=(f"1RECV{item}",),
            ),
        ]  # fmt: skip
    return Program.by_axis(Mesh(pp=2), "pp", [first, second])


def reduce(size: int) -> Program:
    """Scatter the sum, gather it again, work on it, reduce, and keep a copy on the host."""
    whole = size * MESSAGE_BYTES
    group = {"axis": "dp", "lane": "axis:dp"}
    kinds = ("reduce_scatter", "all_gather", "all_reduce")
    scatter, gather, total = (
        Collective(**group, collective=kind, payload_bytes=whole, **more)
        for kind, more in zip(
            kinds,
            (
                {"tensor": "x", "into": "part", "label": "scatter", "after": ("fill",)},
                {"tensor": "part", "into": "full", "label": "gather"},
                {"tensor": "full", "label": "total", "after": ("square",)},
            ),
        )
    )
    actions = [
        Alloc(tensor="scratch", num_bytes=whole),
        Compute(op="fill", label="fill", num_tokens=size),
        scatter,
        gather,
        Compute(op="square", label="square", after=("gather",)),
        total,
        Collective(**group, collective="broadcast", tensor="part", payload_bytes=MESSAGE_BYTES),
        Collective(**group, collective="all_to_all", tensor="x", into="turned",
                   payload_bytes=whole),
        Collective(**group, collective="barrier", label="barrier"),
        Move(tensor="full", source="device", target="host", payload_bytes=whole,
             lane="copy", after=("total",)),
        Free(tensor="scratch", lane="free", after=("total",)),
        Mark(name="finished", lane="control", after=("barrier",)),
    ]  # fmt: skip
    return Program.alike(Mesh(dp=size), actions)
