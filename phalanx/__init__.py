"""Phalanx: parallel strategies for large models - plan, simulate, run."""

__version__ = "0.1.0.dev0"
