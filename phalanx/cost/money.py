"""Dollars of training and serving, from hours and prices per hour."""

from __future__ import annotations

MILLION = 1e6


def run_usd(hours: float, usd_per_h: float) -> float:
    """What a machine costs for so long."""
    return hours * usd_per_h


def million_tokens_usd(usd_per_h: float, tokens_per_s: float) -> float:
    """What a million tokens cost on a machine that makes so many a second."""
    return usd_per_h / (tokens_per_s * 3600.0) * MILLION


def train_and_serve_usd(
    train_hours: float, train_usd_per_h: float, serve_hours: float, serve_usd_per_h: float
) -> float:
    """A training run and so many hours of serving its result."""
    return run_usd(train_hours, train_usd_per_h) + run_usd(serve_hours, serve_usd_per_h)
