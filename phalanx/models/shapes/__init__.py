"""Sizes of models by name and their published counts: one JSON list per maker."""
