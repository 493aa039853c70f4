"""Pass 5: sends and receives between stages, derived from all lists at once.

The rule is torch's: walk the lists of all ranks in rounds; when the step at the head of a list has
its input, it is taken over, and if its output goes to another rank, the send is appended to this
rank's list and the receive to the other's at the same moment. Receives are therefore posted as
early as the sender can send, and sends and receives of a pair come in one order on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from phalanx.action import Action, Recv, Send
from phalanx.errors import CheckError
from phalanx.lower.chunk import Chunk, Placed
from phalanx.policy import Step

_DIRECTION = {"F": "F", "B": "B", "I": "B"}  # input gradients travel like full backward passes


def add_transfers(
    lists: list[list[Chunk]], placed: Placed, rank_of_stage: Sequence[int], axis: str
) -> None:
    """Insert transfers into the lists of all pipeline coordinates.

    Raises:
        CheckError: `check/deadlock` when no list can go on, naming the heads.
    """
    if all(a == b for a, b in pairwise(rank_of_stage)):
        return
    queues = [list(reversed(chunks)) for chunks in lists]
    out: list[list[Chunk]] = [[] for _ in lists]
    arrived: set[tuple[str, int, int]] = set()
    last_stage = len(rank_of_stage) - 1
    while any(queues):
        progressed = False
        for rank, queue in enumerate(queues):
            if not queue or not _is_ready(queue[-1].step, arrived, last_stage):
                continue
            chunk = queue.pop()
            out[rank].append(chunk)
            _deliver(chunk, rank, out, arrived, placed, rank_of_stage, axis)
            progressed = True
        if not progressed:
            heads = {r: str(q[-1].step) for r, q in enumerate(queues) if q}
            rule = "every list waits for an input that no list produces before it"
            raise CheckError("check/deadlock", "order", heads, rule)
    lists[:] = [_attach(chunks) for chunks in out]


def wait_for_own_outputs(chunks: Sequence[Chunk], last_stage: int) -> None:
    """Let each step wait for an input that its own rank produces in another lane.

    Two computes of one lane come in order anyway; but what an exchange completes (the output that
    the loss is made of, the output of a stage whose successor is on the same rank) does not.
    """
    complete: dict[tuple[str, int, int], Action] = {}
    for chunk in chunks:
        kind, stage, item = _DIRECTION.get(chunk.step.kind), chunk.step.stage, chunk.step.item
        if kind is None:
            continue
        from_loss = kind == "B" and stage == last_stage
        source = ("F", stage) if from_loss else (kind, stage + (1 if kind == "B" else -1))
        at, before = chunk.first_on_activations(), complete.get((*source, item))
        if before is not None and before.lane != chunk.actions[at].lane:
            chunk.wait(at, before.label)
        complete[kind, stage, item] = chunk.last_on_activations()


def _is_ready(step: Step, arrived: set[tuple[str, int, int]], last_stage: int) -> bool:
    kind = _DIRECTION.get(step.kind)
    if kind is None:  # W needs only what this rank computed before
        return True
    if kind == "F":
        return step.stage == 0 or ("F", step.stage, step.item) in arrived
    if step.stage == last_stage:
        return ("F", last_stage + 1, step.item) in arrived
    return ("B", step.stage, step.item) in arrived


def _deliver(
    chunk: Chunk,
    rank: int,
    out: list[list[Chunk]],
    arrived: set[tuple[str, int, int]],
    placed: Placed,
    rank_of_stage: Sequence[int],
    axis: str,
) -> None:
    """Mark the output as arrived at its consumer, with a transfer when that is another rank."""
    step = chunk.step
    kind = _DIRECTION.get(step.kind)
    if kind is None:
        return
    consumer = step.stage + (1 if kind == "F" else -1)
    arrived.add((kind, consumer, step.item))
    if not 0 <= consumer < len(rank_of_stage) or rank_of_stage[consumer] == rank:
        return
    peer = rank_of_stage[consumer]
    boundary = step.stage if kind == "F" else consumer  # the stage whose output has this shape
    width = placed.stages[boundary][-1].out_bytes_per_token
    payload = placed.tokens_between(step.item) * width
    tensor = f"{'act' if kind == 'F' else 'grad'}:{step.stage}.{step.item}"
    send = Send(
        axis=axis,
        tensor=tensor,
        payload_bytes=payload,
        item=step.item,
        peer=peer,
        label=f"{step.stage}SEND_{kind}{step.item}",
        lane=f"send:{axis}:{peer}",
        after=(chunk.last_label(),),
        stage=step.stage,
    )
    receive = Recv(
        axis=axis,
        tensor=tensor,
        payload_bytes=payload,
        item=step.item,
        peer=rank,
        label=f"{consumer}RECV_{kind}{step.item}",
        lane=f"recv:{axis}:{rank}",
        stage=consumer,
    )
    out[rank].append(Chunk(Step(step.stage, f"SEND_{kind}", step.item), [send], ()))
    out[peer].append(Chunk(Step(consumer, f"RECV_{kind}", step.item), [receive], ()))


def _attach(chunks: list[Chunk]) -> list[Chunk]:
    """Let each step wait for its receive."""
    received = {c.step for c in chunks if c.step.kind.startswith("RECV")}
    for chunk in chunks:
        kind = _DIRECTION.get(chunk.step.kind)
        need = Step(chunk.step.stage, f"RECV_{kind}", chunk.step.item)
        if need in received:
            at = chunk.first_on_activations()
            chunk.wait(at, f"{need.stage}{need.kind}{need.item}")
    return chunks
