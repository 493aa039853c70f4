"""The engine as a world: arrivals and ended steps are its events, batch plans its actions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx.action import Action, Compute, Program
from phalanx.engines.serve.engine import ServeEngine
from phalanx.engines.serve.settings import Request
from phalanx.engines.serve.step import StepResult
from phalanx.errors import PhalanxError, PlanError
from phalanx.mesh import Mesh
from phalanx.policy import Event, View
from phalanx.trace import Trace, TraceBuilder

ENGINE_STEP = "engine.step"
_TRACE_STEPS = 10_000  # an engine that serves for weeks keeps the last ones


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client of a request is gone."""

    request: int


class Inbox(Protocol):
    """Where requests come from and results go to."""

    def receive(self, wait: bool) -> list[Request | Cancel] | None:
        """What came in since, with `wait` at least one; None when nothing ever will."""
        ...

    def deliver(self, result: StepResult) -> None:
        """A step ended."""
        ...

    def refuse(self, request: int, error: PhalanxError) -> None:
        """The engine did not accept a request: its sender hears why, others notice nothing."""
        ...


class EngineWorld:
    """One engine on one device, played by this process.

    Args:
        engine: carries out the batch plans.
        inbox: its other side.
        job: name for the trace.
    """

    def __init__(self, engine: ServeEngine, inbox: Inbox, *, job: str = "serve") -> None:
        self.mesh, self.ranks = Mesh(engine=1), (0,)
        self._engine, self._inbox, self._job = engine, inbox, job
        self._view = View(mesh=self.mesh, members=(0,), facts=engine.facts)
        self._start_s = time.perf_counter()
        self._pending: Compute | None = None
        self._spans: deque[tuple[str, float, float]] = deque(maxlen=_TRACE_STEPS)

    def view(self, scope: str) -> View:
        """The live view of the engine, the only scope that it has."""
        return self._view

    def load(self, program: Program) -> None:
        """An engine decides while it runs.

        Raises:
            PlanError: `plan/illegal` always.
        """
        raise PlanError("plan/illegal", "program", None, "an engine takes decisions, not programs")

    def agree(self, scope: str, decide: Callable[[], list[Action]]) -> list[Action]:
        """The decision: this process is the leader."""
        return decide()

    def issue(self, actions: Sequence[Action]) -> None:
        """Take the next step.

        Raises:
            PlanError: `plan/illegal` for anything but one engine step at a time.
        """
        for action in actions:
            if not isinstance(action, Compute) or action.op != ENGINE_STEP:
                rule = "an engine carries out nothing else"
                raise PlanError(
                    "plan/illegal", "action", action.operator, rule, legal=[ENGINE_STEP]
                )
            if self._pending is not None:
                rule = "an engine takes one step at a time"
                raise PlanError("plan/illegal", "action", action.label, rule)
            self._pending = action

    def next_events(self) -> list[Event]:
        """Carry out the step, or wait for a request; [] when the inbox is closed."""
        action, self._pending = self._pending, None
        events = [] if action is None else self._carry_out(action)
        while True:
            messages = self._inbox.receive(wait=not events)
            if messages is None:
                return []
            self._view.now_s = self._now_s()
            events += [event for each in messages for event in self._accept(each)]
            if events:
                return events

    def close(self) -> Trace:
        """The last steps, one row each."""
        builder = TraceBuilder("measured", self._job)
        first = self._view.step - len(self._spans) + 1
        for step, (label, start_s, end_s) in enumerate(self._spans, first):
            builder.add(
                role="serve",
                step=step,
                action_id=label,
                operator=ENGINE_STEP,
                lane="compute",
                start_s=start_s,
                dur_s=end_s - start_s,
            )
        return builder.build()

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s

    def _carry_out(self, action: Compute) -> list[Event]:
        start_s = self._now_s()
        result = self._engine.step(action.batch)
        now_s = self._view.now_s = self._now_s()
        self._view.step += 1
        self._spans.append((action.label, start_s, now_s))
        self._inbox.deliver(result)
        data = {"requests": result.requests, "accepted": result.accepted}
        ended = [each for each in result.outputs if each.reason]
        return [
            Event(kind="step", time_s=now_s, label=action.label, item=self._view.step, data=data),
            *(
                Event(kind="finish", time_s=now_s, item=each.request, data={"reason": each.reason})
                for each in ended
            ),
        ]

    def _accept(self, message: Request | Cancel) -> list[Event]:
        now_s = self._view.now_s
        if isinstance(message, Cancel):
            known = self._engine.cancel(message.request)
            return [Event(kind="cancel", time_s=now_s, item=message.request)] if known else []
        try:
            self._engine.add(message)
        except PhalanxError as error:
            self._inbox.refuse(message.id, error)
            return []
        data = {
            "prompt_len": len(message.tokens),
            "max_new": message.sampling.max_new,
            "adapter": self._engine.adapter_slot(message.id),
        }
        return [Event(kind="arrive", time_s=now_s, item=message.id, data=data)]
