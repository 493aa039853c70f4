"""Engines bind ops, models and policies to processes."""
