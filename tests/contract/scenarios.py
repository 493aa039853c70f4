"""One small story per family, in which each of its policies has something to decide.

The contract tests take every policy from the registry and everything else from here. A new policy
adds nothing to this file; the first policy of a new family adds the family's story.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from phalanx import registry
from phalanx.action import Action, Compute, Program
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.mesh import Mesh
from phalanx.models.spec import small_config
from phalanx.planner.work import model_work
from phalanx.policy import Event, Order, React, Step, View
from phalanx.registry import SHAPE_OF_FAMILY, Entry
from phalanx.trace import Trace
from phalanx.workload import StepWork
from phalanx.worlds.base import World
from phalanx.worlds.faults import Fault, FaultScript
from phalanx.worlds.replay import RECORDING, RecordingWorld
from phalanx.worlds.sim import SimWorld
from phalanx.worlds.sim_serving import SimEngine, SimRequest

# An option without a default gets a small value of its type; rows are a schedule that is written
# down: two ranks, five micro-batches.
_SMALL: dict[str, Any] = {"int": 4, "float": 0.5, "bool": True, "str": "x"}
_SMALL["tuple[str, ...]"] = (
    "0F0,0F1,0B0,0F2,0I1,0W1,0F3,0B2,0F4,0B3,0B4",
    "1F0,1B0,1F1,1I1,1F2,1B2,1W1,1F3,1B3,1F4,1B4",
)

COST = TableCost({}, missing_s=1.0)
ITEM_TOKENS = (5, 3, 8, 1, 6, 2, 7, 4, 9)  # of the micro-batches, as many as are asked for


def of_shape(shape: str) -> list[Entry]:
    """Every registered policy of a shape."""
    return [entry for entry in registry.entries() if SHAPE_OF_FAMILY[entry.family] == shape]


def name_of(entry: Entry) -> str:
    """What tests are called by: "pipeline/1f1b"."""
    return f"{entry.family}/{entry.name}"


def make(entry: Entry, **options: Any) -> Any:
    """The policy with every option at its default, but `options`."""
    for each in fields(entry.cls):  # type: ignore[arg-type]
        if each.default is MISSING and each.default_factory is MISSING:
            options.setdefault(each.name, _SMALL[str(each.type)])
    return registry.build(entry.family, {"name": entry.name} | options)


def decoder_work(num_layers: int, item_tokens: Sequence[int]) -> StepWork:
    """What Specs are lowered with: attention and feed-forward, heads that 2 to 5 ranks share."""
    config = small_config(
        vocab_size=13, hidden_size=8, intermediate_size=60, num_layers=num_layers, num_heads=60,
        num_kv_heads=12, head_dim=2, full_every=1, dtype="float32",
    )  # fmt: skip
    return model_work(config, item_tokens)


@dataclass(frozen=True, kw_only=True)
class OneByOne(Order):
    """Plain accumulation on one rank: what Specs are lowered with. Registered nowhere."""

    def order(self, num_ranks: int, num_items: int) -> list[list[Step]]:
        assert num_ranks == 1, num_ranks
        return [[Step(0, kind, item) for item in range(num_items) for kind in "FB"]]


# ---- reactive families -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Story:
    """What happens around a reactive policy.

    Attributes:
        simulate: a fresh simulated world in which it happens to this policy.
        program, num_steps: as for `drive`.
    """

    simulate: Callable[[React], World]
    program: Callable[[React], Program | None] = lambda policy: None
    num_steps: int = 1


def stories() -> list[tuple[Entry, str]]:
    """Every reactive policy with every story of its family.

    Raises:
        AssertionError: for a family that has no story yet.
    """
    found = of_shape("react")
    untold = {entry.family for entry in found} - {family for family, _ in STORIES}
    assert not untold, f"tests/contract/scenarios.py needs a story for {sorted(untold)}"
    return [(entry, name) for entry in found for family, name in STORIES if family == entry.family]


def mesh_of(policy: Any, size: int = 2) -> Mesh:
    """`size` ranks on the policy's axis; engines have one of their own."""
    return Mesh({getattr(policy, "axis", "engine"): size})


SYNC_STEPS = 11


def sync_facts() -> dict[str, Any]:
    """What islands say of their model; a fresh table, so that who changes it is found."""
    return {"fragment_bytes": (28.0,), "model_bytes": 28.0}


def inner_steps(policy: React, size: int = 2) -> Program:
    """What islands do between exchanges, one op here."""
    return Program.alike(mesh_of(policy, size), [Compute(op="inner", label="inner")])


def _steady_islands(policy: React) -> World:
    return SimWorld(mesh_of(policy), COST, facts=sync_facts())


def _islands_that_come_and_go(policy: React) -> World:
    faults = FaultScript(
        (
            Fault(kind="kill", ranks=(1,), at_step=3),
            Fault(kind="restart", ranks=(1,), at_s=7.5),
        ),
        detect_s=1.0,
    )
    return SimWorld(mesh_of(policy, 3), COST, facts=sync_facts(), faults=faults)


# A member of two is killed before step 3 and is back while the other does step 5.
RECOVER_STEPS = 8
LOSS_AND_RETURN = FaultScript(
    (Fault(kind="kill", ranks=(1,), at_step=2), Fault(kind="restart", ranks=(1,), at_step=4)),
    detect_s=1.0,
)
RECOVER_FACTS = {"grad_bytes": 12, "state_bytes": 36, "num_steps": RECOVER_STEPS}


def lossy_replicas(policy: React, facts: dict[str, Any] | None = None) -> World:
    """Two replicas of which one leaves and returns; `facts` as a real replica states them."""
    facts = dict(facts or RECOVER_FACTS)
    return SimWorld(mesh_of(policy), COST, facts=facts, faults=LOSS_AND_RETURN)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that arrives once so many engine steps have ended, and runs to its limit."""

    id: int
    prompt_len: int
    max_new: int
    after_steps: int = 0


# 3 blocks of 16 tokens: the first two do not fit together to their ends.
ASKED = (
    Asked(id=0, prompt_len=30, max_new=4),
    Asked(id=1, prompt_len=14, max_new=5),
    Asked(id=2, prompt_len=5, max_new=3, after_steps=4),
)
SERVE_LIMITS = {"max_running": 3, "max_step_tokens": 16}
NUM_BLOCKS = 3


class Arrivals:
    """A world in which requests arrive by the number of ended engine steps, so that every world
    tells the same whatever its clock."""

    def __init__(self, world: Any, asked: Sequence[Asked] = ASKED) -> None:
        self.world, self.mesh, self.ranks = world, world.mesh, world.ranks
        self._waiting, self._num_steps = list(asked), 0

    def view(self, scope: str) -> View:
        return self.world.view(scope)

    def load(self, program: Program) -> None:
        self.world.load(program)

    def issue(self, actions: Sequence[Action]) -> None:
        self.world.issue(actions)

    def agree(self, scope: str, decide: Callable[[], list[Action]]) -> list[Action]:
        return self.world.agree(scope, decide)

    def next_events(self) -> list[Event]:
        events = self.world.next_events()
        self._num_steps += sum(event.kind == "step" for event in events)
        at = self._num_steps
        if not events and self._waiting:  # nothing to do: the next one comes now
            at = min(each.after_steps for each in self._waiting)
        due = [each for each in self._waiting if each.after_steps <= at]
        self._waiting = [each for each in self._waiting if each.after_steps > at]
        return events + [_arrival(each) for each in due]

    def close(self) -> Trace:
        return self.world.close()


def _arrival(asked: Asked) -> Event:
    data = {"prompt_len": asked.prompt_len, "max_new": asked.max_new}
    return Event(kind="arrive", time_s=0.0, item=asked.id, data=data)


def lengths_engine() -> SimEngine:
    """An engine that counts tokens and blocks and computes nothing."""
    requests = [
        SimRequest(
            id=each.id,
            arrive_s=0.0,
            prompt_len=each.prompt_len,
            max_new=each.max_new,
            num_new=each.max_new,
        )
        for each in ASKED
    ]
    return SimEngine(requests, num_blocks=NUM_BLOCKS, **SERVE_LIMITS)


def _engine_with_requests(policy: React) -> World:
    engine = lengths_engine()
    sim = SimWorld(mesh_of(policy, 1), COST, facts=engine.facts, outcomes=engine.outcomes)
    return Arrivals(sim)


STORIES: dict[tuple[str, str], Story] = {
    ("sync", "steady"): Story(simulate=_steady_islands, program=inner_steps, num_steps=SYNC_STEPS),
    ("sync", "come-and-go"): Story(
        simulate=_islands_that_come_and_go,
        program=lambda policy: inner_steps(policy, 3),
        num_steps=SYNC_STEPS,
    ),
    ("recover", "loss-and-return"): Story(simulate=lossy_replicas),
    ("serve", "three-requests"): Story(simulate=_engine_with_requests),
}


def simulate(entry: Entry, story: str) -> Trace:
    """A policy's run of a story in virtual time, recorded."""
    policy, told = make(entry), STORIES[entry.family, story]
    world = RecordingWorld(told.simulate(policy))
    return drive(world, program=told.program(policy), num_steps=told.num_steps, reacts=[policy])


def decided(trace: Trace) -> list[dict[str, Any]]:
    """All decided actions of a recorded trace in order, whatever events they came with."""
    batches = trace.notes[RECORDING]["batches"]
    return [a for batch in batches for each in batch["decided"] for a in each["actions"]]


def heard(trace: Trace, *kinds: str) -> list[tuple[str, int]]:
    """(kind, rank) of the events of these kinds in a recorded trace."""
    events = [event for batch in trace.notes[RECORDING]["batches"] for event in batch["events"]]
    return [(event["kind"], event["rank"]) for event in events if event["kind"] in kinds]
