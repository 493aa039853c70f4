"""Metrics sent elsewhere than into `metrics.jsonl`: TensorBoard, Weights & Biases, Trackio.

A sink is a convenience. Its package must be there before the run starts; after that nothing that it
does can stop, slow or change training: it runs on a thread of its own on rank 0, its first failure
is a warning and its last, and at the end of the run it is waited for only so long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from phalanx.engines.callbacks import Callback
from phalanx.engines.sinks.background import BackgroundSink, Patience
from phalanx.errors import JobError, nearest_names

NAMES = ("tensorboard", "wandb", "trackio")


def require_sinks(names: Sequence[str]) -> None:
    """Whether all sinks can be opened here; imports none of their packages.

    Raises:
        JobError: `job/bad-value` for an unknown name, `environment/missing` for a package that is
            not installed, with the command that installs it.
    """
    for name in names:
        if name not in NAMES:
            legal = nearest_names(name, NAMES)
            raise JobError("job/bad-value", "plan.log_to", name, "is no sink", legal=legal)
        if find_spec(name) is None:
            rule = f"the package is not installed; install it with: pip install {name}"
            raise JobError("environment/missing", "plan.log_to", name, rule)


def open_sinks(
    names: Sequence[str],
    folder: str | Path,
    run_name: str,
    warn: Callable[[str], None],
    *,
    wait_s: float = 15.0,
) -> list[Callback]:
    """The sinks of a run, as callbacks for rank 0.

    Each resumes its own record when the folder has one already.

    Args:
        names: of `NAMES`, each once.
        folder: run folder; what sinks write to disk goes below it.
        run_name: as they show it.
        warn: gets a line when a sink fails, once per sink.
        wait_s: how long the end of the run waits for them, all together; the other ranks wait too,
            so it should be less than the silence after which a rank counts as hung.

    Raises:
        JobError: see `require_sinks`.
    """
    require_sinks(names)
    patience = Patience(wait_s)
    return [
        BackgroundSink(name, _writer(name, Path(folder), run_name), warn, patience=patience)
        for name in dict.fromkeys(names)
    ]


def _writer(name: str, folder: Path, run_name: str) -> Callable:
    """What opens the sink, later and on its thread; only then is its package imported."""

    def open_writer(config: dict) -> object:
        module = import_module(f"phalanx.engines.sinks.to_{name}")
        return module.Writer(folder, run_name, config)

    return open_writer
