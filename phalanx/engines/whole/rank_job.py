"""A training run whose ranks an outer launcher has started: torchrun, or Slurm's srun.

    torchrun --nproc-per-node 2 -m phalanx train --model M --data D --folder RUN

Rank 0 prepares and plans; the others wait, without a collective, until its lockfile lies in the
run folder, which all share. Only rank 0 speaks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

from phalanx.engines.placed import Placed
from phalanx.engines.process import open_store
from phalanx.engines.run_folder import holds_checkpoint
from phalanx.engines.signs import forget_signs
from phalanx.engines.train import run_rank
from phalanx.engines.whole.live import Progress
from phalanx.engines.whole.train_job import (
    Asked,
    Trained,
    begun,
    interrupted,
    make_ready,
    trained,
)
from phalanx.errors import PhalanxError

_KEY = "phalanx/run"
_PLAN_TIME = timedelta(hours=12)  # of rank 0: a model may have to be fetched, data tokenised


class RankZeroFailed(Exception):
    """Rank 0 has refused the job and said why.

    Attributes:
        exit_code: of rank 0.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"rank 0 ended with exit code {exit_code}")
        self.exit_code = exit_code


def train_as_rank(
    place: Placed, ask: Callable[[], Asked], say: Callable[[str], None], *, live: bool
) -> Trained | None:
    """Take part in a run.

    Args:
        place: of this process.
        ask: what rank 0 was asked for; the others are told.
        say: gets the progress, on rank 0.
        live: as `train_job.train_ready`.

    Returns:
        The finished run on rank 0; None on the others.

    Raises:
        RankZeroFailed: on the others, when rank 0 has found an error before the start.
        KeyboardInterrupt: when the run was asked to stop, and has saved.
    """
    store = open_store()
    if place.rank:
        _follow(json.loads(_awaited(store)))
        return None
    with ExitStack() as stack:
        try:
            asked = _placed(ask(), place)
            ready = make_ready(asked, say)
            stack.enter_context(begun(ready, say))
            forget_signs(asked.folder)
        except PhalanxError as error:
            store.set(_KEY, json.dumps({"exit_code": error.exit_code}))
            raise
        told = {"folder": str(asked.folder.absolute()), "resume": asked.resume}
        store.set(_KEY, json.dumps(told))
        with Progress(say, live) as progress:
            result = run_rank(asked.folder, progress.hear, resume=asked.resume)
        if progress.interrupted:
            raise interrupted(progress, asked, say)
        return trained(ready, result)


def _placed(asked: Asked, place: Placed) -> Asked:
    """What was asked, here: an attempt after a failure goes on from its newest checkpoint."""
    asked = replace(asked, num_local_ranks=place.num_local_ranks)
    if not place.restarts:
        return asked
    return replace(asked, is_retry=True, resume=holds_checkpoint(asked.folder))


def _awaited(store) -> bytes:
    store.wait([_KEY], _PLAN_TIME)
    return store.get(_KEY)


def _follow(told: dict) -> None:
    if "exit_code" in told:
        raise RankZeroFailed(told["exit_code"])
    run_rank(told["folder"], resume=told["resume"])
