"""Phalanx: parallel strategies for large models - plan, simulate, run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.api import train

__version__ = "0.1.0.dev0"
__all__ = ["train"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # only now, so that the command line starts fast
        return getattr(import_module("phalanx.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
