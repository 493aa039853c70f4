"""Would this program run to its end? Asked before any process starts.

A program is checked on one rank per kind (`worlds.sim_fold`): ranks that share a list and meet
alike partners are the same rank to every check, so 4,096 ranks of a pipeline of 16 stages cost what
16 cost, plus a few sorts of 4,096 integers.

Messages are checked against the strictest transport in use: one in-order rendezvous channel per
pair of ranks that carries both directions (a NCCL communicator per pair, gloo). What passes there
passes everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import zip_longest

import numpy as np

from phalanx.action import Action, Alloc, Collective, Free, Program, Recv, Send
from phalanx.check_order import check_order, format_grid
from phalanx.cost.table import TableCost
from phalanx.errors import CheckError
from phalanx.mesh import Mesh
from phalanx.worlds.sim_engine import Engine
from phalanx.worlds.sim_fold import equitable_colors
from phalanx.worlds.sim_memory import MemoryAccount
from phalanx.worlds.sim_stuck import stuck_error
from phalanx.worlds.sim_table import Template, compile_list, require_labels

__all__ = ["check_order", "check_program", "format_grid"]

Message = Send | Recv
_SHOWN = 6  # actions around a difference


def check_program(
    program: Program, *, memory_bytes: float | Mapping[str, float] | None = None
) -> None:
    """Raise for the first rule that a program breaks.

    Args:
        program: what all ranks do.
        memory_bytes: limit of the device memory, or memory -> limit. Allocations count in list
            order as far as `after` allows, which is how a rank with one thread would run the list;
            the simulator knows the peak for given durations.

    Raises:
        CheckError: `check/label`, `check/cycle`, `check/send`, `check/size`, `check/collective`,
            `check/deadlock`, `check/handle`, `check/memory`.
        JobError: `mesh/axis`, `mesh/rank` for an axis or a peer that the mesh does not have.
    """
    serial: dict[int, list[Action]] = {}
    for rank in program.representatives():
        template = compile_list(program.of(rank))
        require_labels(template, f"rank {rank}")
        serial[rank] = _serial_order(template, rank)
    colors = _colors(program)
    players = np.unique(colors, return_index=True)[1].tolist()
    meetings = [_Meetings.of(actions) for actions in program.lists]
    for rank in players:
        _require_matched_messages(program, rank, meetings)
        _require_equal_collectives(program, rank, meetings)
    _require_progress(program, colors, players)
    for rank, actions in serial.items():
        _require_memory(actions, rank, memory_bytes)


def _colors(program: Program) -> np.ndarray:
    listed = any(isinstance(a, Collective) and a.members for list_ in program.lists for a in list_)
    return np.arange(program.mesh.size) if listed else equitable_colors(program)


def _name(action: Action) -> str:
    return action.label or f"{action.operator} {getattr(action, 'tensor', '')}".strip()


# ---- one list --------------------------------------------------------------------------------


def _serial_order(template: Template, rank: int) -> list[Action]:
    """A list as one thread would run it: always the first action that waits for nothing.

    Raises:
        CheckError: `check/cycle`.
    """
    waits = list(template.waits)
    ready = [entry for entry, count in enumerate(waits) if not count]
    order = []
    while ready:
        entry = heappop(ready)
        order.append(template.actions[template.which[entry]])
        for distance in template.succ[entry]:
            waits[entry + distance] -= 1
            if not waits[entry + distance]:
                heappush(ready, entry + distance)
    stuck = {entry for entry, count in enumerate(waits) if count}
    if stuck:
        names = [
            _name(template.actions[template.which[entry]]) for entry in _cycle(template, stuck)
        ]
        rule = "actions wait for one another (list order within a lane counts as waiting)"
        shown = " waits for ".join([*names, names[0]])
        raise CheckError("check/cycle", f"rank {rank}", names[0], rule, detail=f"  {shown}")
    return order


def _cycle(template: Template, stuck: set[int]) -> list[int]:
    """Some cycle among entries of which each waits for another of them, in waiting order."""
    before = {
        entry + distance: entry for entry in stuck for distance in template.succ[entry]
    }  # every stuck entry has a stuck predecessor, so walking back must close a circle
    path: dict[int, None] = {}
    entry = min(stuck)
    while entry not in path:
        path[entry] = None
        entry = before[entry]
    walked = list(path)
    return walked[walked.index(entry) :]


def _require_memory(
    actions: Sequence[Action], rank: int, limits: float | Mapping[str, float] | None
) -> None:
    account = MemoryAccount(limits)
    for action in actions:
        if isinstance(action, Alloc):
            account.alloc(action, rank)
        elif isinstance(action, Free):
            account.free(action, rank)


# ---- what two ranks do together ----------------------------------------------------------------


@dataclass
class _Meetings:
    """What a list does together with others.

    Attributes:
        messages: (Send or Recv, axis, peer) -> tensor -> actions in order.
        collectives: axis -> actions in order.
    """

    messages: dict[tuple[type[Action], str, int], dict[str, list[Message]]]
    collectives: dict[str, list[Collective]]

    @staticmethod
    def of(actions: Sequence[Action]) -> _Meetings:
        """Sort the actions of a list."""
        meetings = _Meetings({}, {})
        for action in actions:
            if isinstance(action, Send | Recv):
                key = (type(action), action.axis, action.peer)
                by_tensor = meetings.messages.setdefault(key, {})
                by_tensor.setdefault(action.tensor, []).append(action)
            elif isinstance(action, Collective) and not action.members:
                meetings.collectives.setdefault(action.axis, []).append(action)
        return meetings


def _require_matched_messages(program: Program, rank: int, meetings: Sequence[_Meetings]) -> None:
    mesh, of_rank = program.mesh, program.list_of_rank
    mine = meetings[of_rank[rank]].messages
    for axis, at in dict.fromkeys((axis, at) for _, axis, at in mine):
        peer, here = mesh.peer(rank, axis, at), mesh.coordinate(rank, axis)
        theirs = meetings[of_rank[peer]].messages
        if peer == rank:
            rule = f"has a message to itself on axis {axis}"
            raise CheckError("check/send", f"rank {rank}", None, rule)
        _compare_all(rank, peer, mine.get((Send, axis, at), {}), theirs.get((Recv, axis, here), {}))
        _compare_all(peer, rank, theirs.get((Send, axis, here), {}), mine.get((Recv, axis, at), {}))


def _compare_all(
    source: int, target: int, sends: dict[str, list[Message]], recvs: dict[str, list[Message]]
) -> None:
    for tensor in dict.fromkeys([*sends, *recvs]):
        _compare(source, target, sends.get(tensor, []), recvs.get(tensor, []))


def _compare(source: int, target: int, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
    for send, recv in zip_longest(sends, recvs):
        if recv is None:
            rule = f"rank {target} never receives {send.tensor!r} from rank {source}"
            raise CheckError("check/send", f"rank {source}", _name(send), rule)
        if send is None:
            rule = f"rank {source} never sends {recv.tensor!r} to rank {target}"
            raise CheckError("check/send", f"rank {target}", _name(recv), rule)
        if send.payload_bytes != recv.payload_bytes:
            where = f"rank {source}: {_name(send)}"
            rule = f"rank {target} expects {recv.payload_bytes:g} bytes in {_name(recv)}"
            value = f"{send.payload_bytes:g} bytes"
            raise CheckError("check/size", where, value, rule, legal=[f"{recv.payload_bytes:g}"])


def _require_equal_collectives(program: Program, rank: int, meetings: Sequence[_Meetings]) -> None:
    of_rank = program.list_of_rank
    for axis, mine in meetings[of_rank[rank]].collectives.items():
        compared = {of_rank[rank]}
        for other in program.mesh.group(rank, axis):
            if of_rank[other] not in compared:
                compared.add(of_rank[other])
                theirs = meetings[of_rank[other]].collectives.get(axis, [])
                _require_same_order(axis, rank, mine, other, theirs)


def _require_same_order(
    axis: str, rank: int, mine: list[Collective], other: int, theirs: list[Collective]
) -> None:
    for at, (one, two) in enumerate(zip_longest(mine, theirs)):
        if one is None or two is None or _essence(one) != _essence(two):
            lines = [
                f"  rank {who}: "
                + ("... " if at > _SHOWN // 2 else "")
                + " ".join(_marked(list_, each, at) for each in _around(list_, at))
                for who, list_ in ((rank, mine), (other, theirs))
            ]
            raise CheckError(
                "check/collective",
                f"ranks {rank} and {other}",
                f"{_describe(one)} and {_describe(two)}",
                f"disagree on collective {at} of their group on axis {axis}",
                detail="\n".join(lines),
            )


def _essence(action: Collective) -> tuple[str, float]:
    """What members must agree on; an all-to-all may be uneven."""
    uneven = action.collective == "all_to_all"
    return action.collective, 0.0 if uneven else action.payload_bytes


def _describe(action: Collective | None) -> str:
    if action is None:
        return "nothing"
    label = f" {action.label}" if action.label else ""
    return f"{action.collective}{label} ({action.payload_bytes:g} bytes)"


def _around(list_: Sequence[Collective], at: int) -> range:
    return range(max(0, at - _SHOWN // 2), min(len(list_), at + _SHOWN // 2))


def _marked(list_: Sequence[Collective], index: int, at: int) -> str:
    name = list_[index].label or list_[index].collective
    return f"[{name}]" if index == at else name


# ---- everybody ---------------------------------------------------------------------------------


def _require_progress(program: Program, colors: np.ndarray, players: Sequence[int]) -> None:
    mesh: Mesh = program.mesh
    engine = Engine(mesh, TableCost({}, missing_s=0.0), colors=colors, pair_channels=True)
    engine.release(engine.loader.add_program(program, players, step=0))
    engine.run()  # until the step notice
    while engine.events:
        engine.events.clear()
        engine.run()
    error = stuck_error(engine, None)
    if error is not None:
        raise error
