"""Engines bind ops, models and policies to processes; each process runs the same code."""
