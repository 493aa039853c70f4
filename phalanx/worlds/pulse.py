"""Signs of life of the ranks of one job, and the news of the first failure, over a store.

Every rank writes a heartbeat with what it does; nobody reads heartbeats while all is well. When an
exchange breaks off or does not come, the others look who has stopped beating: an exception alone
does not say who died, because a rank that gives up breaks its own connections too.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from phalanx.errors import CODES, PhalanxError, WorldError

_SILENT_BEATS = 4  # missed in a row
ENDED = "ended its program"


class Pulse:
    """The heartbeat of one rank, from a thread of its own.

    Args:
        store: a torch store that outlives the ranks; cloned, so waits elsewhere do not delay beats.
        name: prefix of the keys.
        rank: this rank.
        doing: what it does now, in words.
        beat_s: between two heartbeats.
    """

    def __init__(
        self, store: Any, name: str, rank: int, doing: Callable[[], str], beat_s: float
    ) -> None:
        self.rank, self.beat_s = rank, beat_s
        self._store, self._own, self._name = store, store.clone(), f"{name}/pulse"
        self._doing = doing
        self._stop = threading.Event()
        self._failure: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the heartbeat; its last words say that nothing is wrong."""
        self._stop.set()
        self._thread.join(2 * self.beat_s + 1.0)
        self._own.set(f"{self._name}/{self.rank}", f"0|{ENDED}")

    def publish(self, error: BaseException) -> None:
        """Tell all ranks of a failure; the first one counts."""
        notice = {"rank": self.rank, "code": "world/failed", "where": f"rank {self.rank}"}
        notice |= {"value": None, "rule": f"raised {type(error).__name__}: {error}", "detail": ""}
        if isinstance(error, PhalanxError):
            value = None if error.value is None else str(error.value)
            notice |= {"code": error.code, "where": error.where, "value": value}
            notice |= {"rule": error.rule, "detail": error.detail}
        self._store.compare_set(f"{self._name}/failure", "", json.dumps(notice))

    def require_all_well(self) -> None:
        """Raise the failure that another rank published, with that rank's words."""
        if self._failure is None or self._failure["rank"] == self.rank:
            return
        notice = self._failure
        assert notice["code"] in CODES
        reporter = f"reported by rank {notice['rank']}; rank {self.rank} was in: {self._doing()}"
        detail = f"{notice['detail']}\n{reporter}".strip()
        rule, value = notice["rule"], notice["value"]
        raise WorldError(notice["code"], notice["where"], value, rule, detail=detail)

    def find_silent(self, ranks: Iterable[int]) -> list[int]:
        """Ranks that do not beat any more; takes a few beats, ends early when another rank has
        published a failure.

        Raises:
            WorldError: that failure.
        """
        suspects = {rank: self._count(rank) for rank in ranks if rank != self.rank}
        end_s = time.monotonic() + _SILENT_BEATS * self.beat_s
        while suspects and time.monotonic() < end_s:
            time.sleep(self.beat_s / 2)
            self.require_all_well()
            suspects = {r: count for r, count in suspects.items() if self._count(r) == count}
        return sorted(rank for rank in suspects if self.last_words(rank) != ENDED)

    def last_words(self, rank: int) -> str:
        """What a rank's newest heartbeat says that it does."""
        return self._read(rank)[1]

    def _count(self, rank: int) -> int:
        return self._read(rank)[0]

    def _read(self, rank: int) -> tuple[int, str]:
        key = f"{self._name}/{rank}"
        if not self._store.check([key]):
            return -1, "no sign of life"
        count, words = self._store.get(key).decode().split("|", 1)
        return int(count), words

    def _beat(self) -> None:
        key, failure, count = f"{self._name}/{self.rank}", f"{self._name}/failure", 0
        try:
            while not self._stop.is_set():
                self._own.set(key, f"{count}|{self._doing()}")
                if self._failure is None and self._own.check([failure]):
                    self._failure = json.loads(self._own.get(failure))
                count += 1
                self._stop.wait(self.beat_s)
        except RuntimeError as error:  # the store is gone: whoever started the ranks has ended
            rule = f"the store of the job does not answer: {error}"
            self._failure = {"rank": -1, "code": "world/dead", "where": "store", "value": None}
            self._failure |= {"rule": rule, "detail": ""}


def wait_for(store: Any, keys: list[str], pulse: Pulse, timeout_s: float) -> list[str]:
    """Wait until a store has all `keys`; those that are missing after `timeout_s`.

    Raises:
        WorldError: the failure that another rank published meanwhile.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        left_s = end_s - time.monotonic()
        try:
            store.wait(keys, timedelta(seconds=min(max(left_s, 0.001), 0.25)))
            return []
        except RuntimeError:  # DistStoreError: not yet
            pulse.require_all_well()
            if left_s <= 0:
                return [key for key in keys if not store.check([key])]
