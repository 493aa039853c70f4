"""Every registered reactive policy: what it may depend on and what it may change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest

from phalanx.action import Action
from phalanx.drive import drive
from phalanx.mesh import Mesh
from phalanx.policy import Event, React, View
from phalanx.registry import Entry
from phalanx.trace import Trace
from phalanx.worlds.action_json import actions_from_json, actions_to_json
from phalanx.worlds.replay import EventReplay
from tests.contract.scenarios import STORIES, decided, make, name_of, simulate, stories

TOLD = stories()
every_story = pytest.mark.parametrize(
    ("entry", "story"), TOLD, ids=[f"{name_of(entry)}-{story}" for entry, story in TOLD]
)


@every_story
def test_decisions_follow_from_events_and_view(entry: Entry, story: str, tmp_path):
    recorded = simulate(entry, story)
    assert decided(recorded), "the story gives it something to decide"
    recorded.save(tmp_path / "trace.npz")
    policy = make(entry)
    mesh = STORIES[entry.family, story].simulate(policy).mesh
    drive(EventReplay(mesh, Trace.load(tmp_path / "trace.npz")), reacts=[policy])


@every_story
def test_two_runs_are_one(entry: Entry, story: str):
    first, second = simulate(entry, story), simulate(entry, story)
    assert list(first.rows()) == list(second.rows()) and first.notes == second.notes


class Watched(React):
    """A policy, and a look after each decision at all that it was handed or has handed over."""

    def __init__(self, inner: React) -> None:
        self.inner, self.scope = inner, inner.scope
        self._issued: list[Action] = []
        self._as_issued: list[Action] = []
        self.num_calls = 0

    def start(self, view: View) -> Any:
        before = deepcopy(view)
        state = self.inner.start(view)
        assert view == before, "start changed the view"
        return state

    def on(self, state: Any, events: Sequence[Event], view: View) -> list[Action]:
        self.num_calls += 1
        before = deepcopy((events, view, self.inner))
        actions = self.inner.on(state, events, view)
        assert (events, view, self.inner) == before, "on changed more than its state"
        assert self._issued == self._as_issued, "on changed actions that it had handed over"
        self._issued += actions
        self._as_issued += deepcopy(actions)
        return actions


@every_story
def test_a_decision_changes_its_state_and_nothing_else(entry: Entry, story: str):
    policy = Watched(make(entry))
    told = STORIES[entry.family, story]
    program = told.program(policy.inner)
    drive(told.simulate(policy.inner), program=program, num_steps=told.num_steps, reacts=[policy])
    assert policy.num_calls > 3


@every_story
def test_decisions_travel_as_json(entry: Entry, story: str):
    rows = decided(simulate(entry, story))
    text = json.dumps(rows)
    again = actions_to_json(actions_from_json(json.loads(text)))
    assert json.loads(json.dumps(again)) == rows


class Meddling(React):
    """Keeps its steps where it must not."""

    def start(self, view: View) -> None:
        return None

    def on(self, state: None, events: Sequence[Event], view: View) -> list[Action]:
        view.step += 1
        return []


def test_a_policy_that_changes_its_view_is_found():
    with pytest.raises(AssertionError, match="more than its state"):
        Watched(Meddling()).on(None, [], View(mesh=Mesh(dp=1)))
