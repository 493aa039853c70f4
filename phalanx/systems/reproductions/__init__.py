"""Ours beside the published numbers: one module per system, each with `reproduce() -> Report`."""
