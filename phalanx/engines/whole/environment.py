"""Where a run happened: machine, system and libraries, without names of hosts or users."""

from __future__ import annotations

import platform
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version

from phalanx.doctor.machine import compiler_version, memory_bytes, num_cores, processor_name
from phalanx.pages.shown import shown
from phalanx.plan import locked_versions
from phalanx.planner.here import gpus_here

# Libraries that can change a result, or that a page names.
_LIBRARIES = (
    *("numpy", "safetensors", "tokenizers", "transformers", "peft", "fastapi", "uvicorn"),
    *("matplotlib", "vllm"),
)


def environment(device: str) -> dict[str, str]:
    """Name -> fact or version; libraries that are not installed are left out.

    Args:
        device: what training ran on, "cpu" or "cuda".
    """
    found = {"date": datetime.now().astimezone().strftime("%d %B %Y, %H:%M %Z")}
    found |= {"device": device, "processor": processor_name(), "cores": str(num_cores())}
    found["memory"] = str(shown(memory_bytes()[0], "bytes"))
    if gpus_here():
        found["GPUs"] = "; ".join(gpus_here())
    found["system"] = f"{platform.system()} {platform.release()}, {platform.machine()}"
    found["compiler"] = compiler_version() or "none"
    found |= locked_versions()
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found
