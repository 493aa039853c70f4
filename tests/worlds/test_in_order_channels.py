"""Lowered lists on links that carry one message at a time, in the order in which both ends ask.

The strictest link there is: a pair of ranks has one channel for both directions; a message passes
when it is at the head on both sides; nothing is reordered. Lists that end here end everywhere.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque

import pytest

from phalanx.registry import build
from phalanx.worlds.pipeline_arrays import play
from phalanx.worlds.torch_pipelining import lowered_lists
from tests.toy_pipeline import toy_plan

_ACTION = re.compile(r"(\d+)(SEND_F|SEND_B|RECV_F|RECV_B|F|B|I|W)(\d+)")
SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
CASES = [
    ("gpipe", {}, 4, 6),
    ("1f1b", {}, 4, 6),
    ("interleaved", {"virtual": 3}, 4, 9),
    ("interleaved", {"virtual": 2, "per_round": 7}, 4, 13),
    ("zero_bubble", {}, 4, 9),
    ("zero_bubble", {"depth": 2}, 3, 9),
    ("zbv", {}, 4, 9),
    ("dualpipe_v", {}, 4, 9),
    ("hanayo", {"waves": 1}, 4, 4),
    ("hanayo", {"waves": 2}, 4, 4),
    ("hanayo", {"waves": 2}, 8, 8),
    ("hanayo", {"waves": 4}, 4, 8),
]


class Channels:
    """Messages between pairs of ranks, each pair in one line."""

    def __init__(self) -> None:
        self._asked: dict[tuple[int, int], deque] = defaultdict(deque)  # (rank, peer) -> asks
        self._free_s: dict[tuple[int, int], float] = defaultdict(float)
        self.arrived_s: dict[str, float] = {}

    def ask(self, rank: int, peer: int, message: str, at_s: float) -> None:
        self._asked[rank, peer].append((message, at_s))
        mine, theirs = self._asked[rank, peer], self._asked[peer, rank]
        pair = (min(rank, peer), max(rank, peer))
        while mine and theirs and mine[0][0] == theirs[0][0]:
            (name, one_s), (_, other_s) = mine.popleft(), theirs.popleft()
            self._free_s[pair] = max(self._free_s[pair], one_s, other_s)
            self.arrived_s[name] = self._free_s[pair]

    def stuck(self) -> dict[tuple[int, int], str]:
        return {pair: asks[0][0] for pair, asks in self._asked.items() if asks}


def replay(lists: list[list[str]], rank_of_stage: tuple[int, ...]) -> tuple[float, dict]:
    """End of the last compute, and the heads of channels that never moved."""
    channels, done_s = Channels(), {}
    at, now_s = [0] * len(lists), [0.0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while at[rank] < len(actions):
                stage, kind, item = _ACTION.fullmatch(actions[at[rank]]).groups()
                if "_" in kind:
                    _transfer(channels, rank, int(stage), kind, item, rank_of_stage, now_s[rank])
                else:
                    ready = _ready_s(channels, int(stage), kind, item, rank_of_stage, done_s)
                    if ready is None:
                        break
                    now_s[rank] = max(now_s[rank], ready) + SECONDS[kind]
                    done_s[int(stage), "B" if kind == "I" else kind, item] = now_s[rank]
                at[rank] += 1
                moved = True
    return max(now_s), channels.stuck()


def _transfer(channels, rank, stage, kind, item, rank_of_stage, at_s) -> None:
    forward, sends = kind.endswith("F"), kind.startswith("SEND")
    into = stage + (1 if forward else -1) if sends else stage
    other = into if sends else stage + (-1 if forward else 1)
    channels.ask(rank, rank_of_stage[other], f"{kind[-1]} into {into} of {item}", at_s)


def _ready_s(channels, stage, kind, item, rank_of_stage, done_s) -> float | None:
    """When the input of a compute is there; None: not yet."""
    if kind == "W":
        return 0.0
    direction = "F" if kind == "F" else "B"
    before = stage - 1 if direction == "F" else stage + 1
    if before == -1:
        return 0.0
    if before == len(rank_of_stage):
        return done_s.get((stage, "F", item))
    if rank_of_stage[before] == rank_of_stage[stage]:
        return done_s.get((before, direction, item))
    return channels.arrived_s.get(f"{direction} into {stage} of {item}")


def lowered(order, p: int, m: int) -> list[list[str]]:
    plan = toy_plan(order.order(p, m), order.rank_of_stage(p), [1] * m)
    return [[a for a in actions if _ACTION.fullmatch(a)] for actions in lowered_lists(plan)]


@pytest.mark.parametrize(("name", "options", "p", "m"), CASES)
def test_every_schedule_ends_in_its_ideal_time(name, options, p, m):
    order = build("pipeline", {"name": name} | options)
    end_s, stuck = replay(lowered(order, p, m), order.rank_of_stage(p))
    assert not stuck
    ideal = play(order.order(p, m), SECONDS["F"], SECONDS["B"], 0.0, SECONDS["W"], SECONDS["I"])
    assert end_s == ideal.step_s[0]


def test_ends_that_ask_in_different_orders_never_meet():
    """The same transfers, but one rank posts its two receives the other way round."""
    order = build("pipeline", "gpipe")
    lists = lowered(order, 2, 2)
    first, second = (lists[1].index(f"1RECV_F{item}") for item in (0, 1))
    lists[1][first], lists[1][second] = lists[1][second], lists[1][first]
    _, stuck = replay(lists, order.rank_of_stage(2))
    assert stuck
