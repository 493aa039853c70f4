"""All ranks in one process with real tensors: the first world in which a mistake has a stack.

`LocalWorld(mesh, ops)` carries out the same programs as `sim` and `dist`. A transfer happens when
all who take part have come to it; sums run in group order, so results are the same bit for bit on
every run. Times in the trace are measured, but ranks take turns: only `dist` tells how fast a plan
is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Mapping, Sequence
from typing import Any

import torch

from phalanx.action import Collective, Recv, Send
from phalanx.errors import CheckError
from phalanx.mesh import Mesh
from phalanx.worlds.pending import Entry, Pending
from phalanx.worlds.real import RealWorld
from phalanx.worlds.torch_tensors import IN_PLACE, Op, RankContext


class LocalWorld(RealWorld):
    """The world; see `RealWorld` for what it shares with `dist`.

    Args:
        mesh: the grid of the job.
        ops: name -> callable(context, action); an op works on `context.tensors`.
        device, dtype: of all ranks, read once from the plan.
        facts, job, traced_steps: see `RealWorld`.

    Attributes:
        contexts: rank -> its tensors; fill them before the program runs, read results after.
    """

    def __init__(
        self,
        mesh: Mesh,
        ops: Mapping[str, Op],
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        facts: Mapping[str, Any] | None = None,
        job: str = "",
        traced_steps: Container[int] | None = None,
    ) -> None:
        ranks = range(mesh.size)
        super().__init__(mesh, ranks, ops, facts=facts, job=job, traced_steps=traced_steps)
        self.contexts = {rank: RankContext(rank, mesh, device, dtype) for rank in ranks}
        self._present: dict[Hashable, list[Entry]] = {}
        self._counts: Counter[Hashable] = Counter()

    def context(self, rank: int) -> RankContext:
        return self.contexts[rank]

    def start_transfers(self, pending: Pending) -> None:
        while pending.ready_transfers:
            entry = pending.ready_transfers.popleft()
            if self.is_held(entry):
                continue
            entry.start = self.now()
            pending.set_under_way(entry)
            for each in self._copies(entry):
                self._arrive(each)

    def await_transfer(self, until_s: float | None) -> bool:
        return False  # they end when the last one comes, never by themselves

    def end_transfers(self) -> None:
        pass  # as above

    def await_earlier(self, entry: Entry) -> None:
        pass

    def _copies(self, entry: Entry) -> list[Entry]:
        """The entry, unless a fault loses it or lets it come twice."""
        if self.interference is None or not isinstance(entry.action, Send):
            return [entry]
        copies = self.interference.copies(entry)
        if not copies:
            self.end(entry)
        again = [Entry(entry.action, entry.rank, entry.step, entry.planned)] * (copies - 1)
        for each in again:
            each.ended = True  # nobody waits for a second arrival
        return [entry, *again][:copies]

    def _arrive(self, entry: Entry) -> None:
        key, size = self._meeting(entry)
        number = self._counts[entry.rank, entry.action.kind, key]
        self._counts[entry.rank, entry.action.kind, key] += 1
        present = self._present.setdefault((key, number), [])
        present.append(entry)
        if len(present) < size:
            return
        del self._present[key, number]
        if isinstance(entry.action, Collective):
            self._run_collective(sorted(present, key=self._place))
        else:
            send, recv = sorted(present, key=lambda each: each.action.kind, reverse=True)
            self._deliver(send, recv)
        for each in present:
            if not each.ended:
                self.end(each)

    def _meeting(self, entry: Entry) -> tuple[Hashable, int]:
        """What an entry meets its partners under, and how many come."""
        action, rank = entry.action, entry.rank
        if isinstance(action, Collective):
            members = self._members(action, rank)
            return (action.axis, members, action.epoch), len(members)
        assert isinstance(action, Send | Recv)
        peer = self.mesh.peer(rank, action.axis, action.peer)
        ends = (rank, peer) if isinstance(action, Send) else (peer, rank)
        return (action.axis, *ends, action.tensor), 2

    def _members(self, action: Collective, rank: int) -> tuple[int, ...]:
        return action.members or self.mesh.group(rank, action.axis)

    def _place(self, entry: Entry) -> int:
        return self._members(entry.action, entry.rank).index(entry.rank)

    def _deliver(self, send: Entry, recv: Entry) -> None:
        source, target = self.contexts[send.rank], self.contexts[recv.rank]
        tensor = source.get(send.action.tensor)
        source.require_size(send.action, tensor.nbytes)
        arrival = target.arrival(recv.action)
        target.require_size(recv.action, tensor.nbytes)
        arrival.view(-1).view(torch.uint8).copy_(
            tensor.contiguous().view(-1).view(torch.uint8)
        )  # bytes, as on a wire
        target.tensors[recv.action.tensor] = arrival

    def _run_collective(self, entries: Sequence[Entry]) -> None:
        actions = [entry.action for entry in entries]
        kinds = sorted({action.collective for action in actions})
        if len(kinds) > 1:
            where = f"ranks {[entry.rank for entry in entries]}"
            rule = "members of a group disagree on the next collective"
            raise CheckError("check/collective", where, " and ".join(kinds), rule)
        contexts = [self.contexts[entry.rank] for entry in entries]
        size = len(entries)
        inputs = [c.require_payload(action, size) for c, action in zip(contexts, actions)]
        if kinds == ["barrier"]:
            return
        for context, action, output in zip(contexts, actions, _outputs(kinds[0], inputs)):
            if action.into or kinds[0] not in IN_PLACE:
                context.tensors[action.into or action.tensor] = output
            else:
                context.tensors[action.tensor].copy_(output)


def _outputs(collective: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What each member gets, in group order."""
    size = len(inputs)
    if collective == "all_gather":
        return [torch.cat(list(inputs)) for _ in inputs]
    if collective == "broadcast":
        return [inputs[0].clone() for _ in inputs]
    if collective == "all_to_all":
        pieces = [tensor.chunk(size) for tensor in inputs]
        return [
            torch.cat([pieces[source][target] for source in range(size)]) for target in range(size)
        ]
    total = inputs[0].clone()
    for tensor in inputs[1:]:
        total += tensor
    if collective == "all_reduce":
        return [total.clone() for _ in inputs]
    return [piece.clone() for piece in total.chunk(size)]
