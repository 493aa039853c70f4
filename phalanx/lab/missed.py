"""Why targets are missed; the page prints these for those that are."""

from __future__ import annotations

from collections.abc import Mapping

REASONS: Mapping[str, str] = {}
