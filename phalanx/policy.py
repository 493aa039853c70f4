"""The four shapes of a policy. A policy decides and never does.

All are frozen, keyword-only dataclasses: fields are options, the docstring is the documentation
page. They speak of handles and numbers, never of tensors; time and randomness come from outside.

| shape  | families                                          | answers                             |
|--------|---------------------------------------------------|-------------------------------------|
| Spec   | data, tensor, context, expert                     | what wraps each module, and how     |
| Order  | pipeline, tiles, denoise                          | which compute comes when, per rank  |
| Assign | balance, place                                    | which bin takes each item           |
| React  | sync, recover, serve, cluster, speculate, rollout | what to do about these events       |
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple

from phalanx.action import Action
from phalanx.mesh import Mesh

# What options for a dtype take; "" leaves it as it is.
DTYPES = ("", "bfloat16", "float32", "float64")


class Policy:
    """What all shapes share; `registry.register` fills both names in."""

    family: ClassVar[str] = ""
    policy_name: ClassVar[str] = ""


# ---- Spec ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One collective that a wrapped module causes, for the expander.

    Attributes:
        collective: kind, as in `action.COLLECTIVES`.
        phase: "F" or "B": the pass in which it happens; "O": the update of the weights.
        at: "before" or "after" the module's compute of that phase.
        of: what travels: "params" (the module's, gathered), "grads" (the module's, reduced),
            "activations" (tokens x width of the module's input or output), "inputs" (what it kept
            of its input in the forward pass, for the backward pass), and of attention "keys_values"
            (keys and values, or their gradients), "queries" (queries, outputs, or their gradients)
            or "heads" (queries, keys and values).
        when: "always"; "sharded" (only if the module is not gathered already); "last" (only with
            the last item of the step); "round" (with the last item of a row that a stage takes
            before another one has its turn; always where a rank has one stage).
    """

    collective: str
    phase: str
    at: str
    of: str
    when: str = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a Spec does to the modules that `pattern` names; the first matching rule wins.

    Attributes:
        pattern: shell pattern over canonical module names ("layers.*", "layers.*.mlp.down_proj").
        placement: word of the binder: "shard", "replicate" (data); "column", "row", "vocab",
            "block", "partial" (tensor); "ring", "all_gather", "all_to_all" (context, expert),
            "wanted" or a layout of tokens (context; the latter of the rows, pattern "").
        dim: tensor dim that is split, where the placement needs one.
        exchanges: collectives per pass, in order.
        reshard: give the gathered parameters back after the forward pass.
        prefetch: units gathered ahead.
        overlap: a block's backward exchange runs beside the gradients of its weights.
        param_dtype, reduce_dtype: names as torch prints them, without "torch."; "" keeps them.
    """

    pattern: str
    placement: str
    dim: int = 0
    exchanges: tuple[Exchange, ...] = ()
    reshard: bool = False
    prefetch: int = 0
    overlap: bool = False
    param_dtype: str = ""
    reduce_dtype: str = ""


class Spec(Policy, ABC):
    """Rules per module pattern along one mesh axis: one binder applies, one expander prices."""

    axis: str

    @abstractmethod
    def rules(self) -> tuple[Rule, ...]:
        """The rules, most specific first."""

    def rule_for(self, module: str) -> Rule | None:
        """The first rule whose pattern matches, or None: the module is left alone."""
        return next((rule for rule in self.rules() if fnmatchcase(module, rule.pattern)), None)


# ---- Order -----------------------------------------------------------------------------------


_STEP = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")


class Step(NamedTuple):
    """One compute of a schedule: stage, kind ("F", "B", "I", "W"), micro-batch. Prints as 2F0."""

    stage: int
    kind: str
    item: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.item}"

    @classmethod
    def parse(cls, text: str) -> Step | None:
        """The step that prints as this text; None where there is none."""
        found = _STEP.fullmatch(text)
        return None if found is None else cls(int(found[1]), found[2], int(found[3]))


class Order(Policy, ABC):
    """A schedule: compute-only lists per rank. Transfers are derived from them (`lower`)."""

    def num_stages(self, num_ranks: int) -> int:
        """Stages that the model is cut into; as many as ranks unless a policy says otherwise."""
        return num_ranks

    def rank_of_stage(self, num_ranks: int) -> tuple[int, ...]:
        """Coordinate on the pipeline axis that holds each stage: round robin by default."""
        return tuple(stage % num_ranks for stage in range(self.num_stages(num_ranks)))

    def least_items(self, num_ranks: int) -> int:
        """Fewest micro-batches of a step for which this schedule exists."""
        return 1

    def wanted_items(self, num_ranks: int) -> int:
        """Fewest micro-batches of a step that a plan may ask of it: one for each rank, so that
        ranks take turns; with fewer the schedule exists, and idles more than it computes."""
        return max(num_ranks, self.least_items(num_ranks))

    def most_items(self, num_ranks: int) -> int | None:
        """Most micro-batches of a step for which this schedule exists; None: any number."""
        return None

    @abstractmethod
    def order(self, num_ranks: int, num_items: int) -> list[list[Step]]:
        """The list of each rank.

        Raises:
            PlanError: `order/illegal` when these sizes admit no such schedule.
        """


# ---- Assign ----------------------------------------------------------------------------------


class WorkItem(NamedTuple):
    """Something to place: an id, its length (tokens, rows), FLOPs and bytes."""

    id: int
    length: int
    flops: float = 0.0
    num_bytes: float = 0.0


class Assign(Policy, ABC):
    """Which bin takes each item, given what came before."""

    @abstractmethod
    def assign(self, state: Any, items: Sequence[WorkItem], num_bins: int) -> tuple[Any, list[int]]:
        """New state, and the bin of each item in the order of `items`."""


# ---- React -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened.

    Attributes:
        kind: "start", "done" (an action with a label ended), "timer", "arrive" (a request),
            "finish" (a request), "step" (an engine step ended), "leave", "join" (membership).
        time_s: when.
        rank: where, by global rank (-1: in the scope as a whole).
        label: of the action or timer.
        item: request, member or step.
        data: what the family adds, by name (lengths, accepted counts, bytes).
    """

    kind: str
    time_s: float
    rank: int = -1
    label: str = ""
    item: int = -1
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class View:
    """What a React policy may look at: live, never a copy, never to be changed by it.

    Attributes:
        mesh: the scope's grid.
        members: global ranks (or member ids) of the scope that are alive, in order.
        epoch: membership epoch.
        step: steps committed by the scope.
        now_s: the world's clock.
        facts: what the family adds (free KV blocks, fragment sizes), by name.
    """

    mesh: Mesh
    members: tuple[int, ...] = ()
    epoch: int = 0
    step: int = 0
    now_s: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)


class React(Policy, ABC):
    """Decides while things happen; called once per engine step with all events since.

    One leader per scope calls it and broadcasts the actions with (epoch, seq); followers execute.
    It must depend on its events and view only: replaying them gives the same actions. Budget:
    200 us at 256 running and 2,000 queued requests.
    """

    scope: ClassVar[str] = "job"  # or "island", "engine"

    @abstractmethod
    def start(self, view: View) -> Any:
        """The state before the first event. Mutable; only `on` changes it."""

    @abstractmethod
    def on(self, state: Any, events: Sequence[Event], view: View) -> list[Action]:
        """Actions to issue now, in order."""
