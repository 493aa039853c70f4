"""Sizes of well-known models: one JSON file each, with its names and its source."""
