"""Strategies: one small file each; they decide and never do."""
