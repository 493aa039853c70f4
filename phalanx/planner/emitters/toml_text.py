"""Tables as TOML text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def toml_text(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of keys; values are text, numbers, booleans, lists of these, or inline tables."""
    parts = []
    for name, table in tables.items():
        if table:
            lines = [f"{key} = {_value(value)}" for key, value in table.items()]
            parts.append(f"[{name}]\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=True)  # a JSON string is a TOML basic string
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_value(each)}' for key, each in value.items())} }}"
    return repr(value)
