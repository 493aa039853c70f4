"""What steps of a serving engine will cost on this machine, measured in a few seconds and kept.

No torch here: one process of `serve.bench` measures, with weights of the true size and as many
threads as the server will have.
"""

from __future__ import annotations

import json
import platform
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from phalanx.data.cached import cache_folder, cached_file, content_key
from phalanx.doctor.machine import num_cores, processor_name
from phalanx.engines.calibrate import KEPT_S
from phalanx.engines.launch import KERNEL_CACHE, WAITING, launch_local
from phalanx.job.sections import ServeSection
from phalanx.models.config import DecoderConfig, to_huggingface
from phalanx.plan import locked_versions

FORMAT_VERSION = 2
_WORKER = "phalanx.engines.serve.bench"
_TIMEOUT_S = 300.0  # kernels may have to be compiled
_QUIET_FRAC = 0.8  # what was measured with a smaller share of a core is used once and not kept


def calibrate_serving(
    config: DecoderConfig, serve: ServeSection, *, device: str = "cpu", threads: int = 0
) -> dict[str, Any]:
    """Rates of an engine on this machine, from the cache if they were just measured.

    Args:
        config: shapes and dtype of the served model.
        serve: limits of the engine.
        device: "cpu" or "cuda".
        threads: of the engine process (0: as torch decides).

    Returns:
        A table that JSON can hold: "rates", for `ServeRates.from_dict`; "made_of", what it was
        measured for; "measured_s", how long it took; "cores_frac", the share of a core that the
        engine's thread got while measuring (much below 1: other programs compete).

    Raises:
        WorldError: when the measuring process fails.
    """
    made_of = {
        "format_version": FORMAT_VERSION,
        "machine": [platform.node(), processor_name(), num_cores()],
        "versions": locked_versions(),
        "config": to_huggingface(config),
        "limits": {
            "max_tokens": serve.max_tokens,
            "max_running": serve.max_running,
            "max_step_tokens": serve.max_step_tokens,
        },
        "device": device,
        "threads": threads,
    }
    path = cache_folder("calibration") / f"serving-{content_key(made_of)}.json"

    def measure(new: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            task, answer = Path(folder) / "task.json", Path(folder) / "answer.json"
            task.write_text(json.dumps(made_of))
            start_s = perf_counter()
            launch_local(
                _WORKER,
                [str(task), str(answer)],
                1,
                timeout_s=_TIMEOUT_S,
                environment=WAITING | KERNEL_CACHE,
            )
            table = {"made_of": made_of, **json.loads(answer.read_text())}
        table["measured_s"] = perf_counter() - start_s
        new.write_text(json.dumps(table, indent=1) + "\n")

    table = json.loads(cached_file(path, measure, KEPT_S).read_text())
    if table["cores_frac"] < _QUIET_FRAC:
        path.unlink(missing_ok=True)
    return table
