"""Lanes as threads: actions of one lane in order, lanes side by side, `after` where one waits.

The executor of a real rank whose peers may vanish: an action whose predecessor failed is not run,
and what waits for a group that is over can be abandoned without ending its thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from phalanx.action import Action
from phalanx.errors import WorldError

Run = Callable[[Action, bool, str], None]
_KEEP_LABELS = 4096  # outcomes that later actions may still name in `after`


class Lanes:
    """Runs actions and remembers how the labelled ones ended.

    Args:
        run: carries out an action, in the lane's thread: called with the action, whether all in
            `after` were done, and the lane. A `WorldError` with a code in `expected` means that
            the action failed, which its successors learn; any other exception ends all work.
        expected: codes of failures that are part of the game.
    """

    def __init__(self, run: Run, expected: Iterable[str] = ()) -> None:
        self._run, self._expected = run, frozenset(expected)
        self._queues: dict[str, SimpleQueue[Action | None]] = {}
        self._outcome: dict[str, bool | None] = {}  # None: not ended
        self._changed = threading.Condition()
        self._open: list[Action] = []  # queued or running, and not abandoned
        self._error: BaseException | None = None

    def put(self, action: Action, lane: str = "") -> None:
        """Queue an action on `lane` (its own unless given: a group's stream may be renewed)."""
        lane = lane or action.lane
        with self._changed:
            self._open.append(action)
            if action.label:
                self._outcome[action.label] = None
                while len(self._outcome) > _KEEP_LABELS:
                    del self._outcome[next(iter(self._outcome))]
        if lane not in self._queues:
            self._queues[lane] = SimpleQueue()
            thread = threading.Thread(target=self._work, args=(lane,), name=lane, daemon=True)
            thread.start()
        self._queues[lane].put(action)

    def abandon(self, labels: Iterable[str]) -> None:
        """What has not ended under these labels has failed, whatever its thread still does."""
        lost = set(labels)
        with self._changed:
            self._open = [action for action in self._open if action.label not in lost]
            for label in lost:
                if self._outcome.get(label, True) is None:
                    self._outcome[label] = False
            self._changed.notify_all()

    def retire(self, lanes: Iterable[str]) -> None:
        """These lanes get no more actions; their threads end after what they have."""
        for lane in lanes:
            queue = self._queues.pop(lane, None)
            if queue is not None:
                queue.put(None)

    @property
    def idle(self) -> bool:
        """Whether everything that was queued has ended or was abandoned."""
        with self._changed:
            return not self._open

    def require_healthy(self) -> None:
        """Raise what a lane raised."""
        if self._error is not None:
            raise self._error

    def _work(self, lane: str) -> None:
        queue = self._queues[lane]
        while (action := queue.get()) is not None:
            try:
                done = self._carry_out(action, lane)
            except Exception as error:  # a thread has nobody to raise to; require_healthy does
                done = False
                self._error = self._error or error
            with self._changed:
                self._open = [each for each in self._open if each is not action]
                if action.label and self._outcome.get(action.label, True) is None:
                    self._outcome[action.label] = done
                self._changed.notify_all()

    def _carry_out(self, action: Action, lane: str) -> bool:
        ready = self._await(action.after)
        try:
            self._run(action, ready, lane)
        except WorldError as error:
            if error.code not in self._expected:
                raise
            return False
        return ready

    def _await(self, labels: tuple[str, ...]) -> bool:
        """Whether all of them were done; a label that was never issued here waits for its issue."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(self._outcome.get(label) is not None for label in labels)
            )
            return all(self._outcome[label] for label in labels)
