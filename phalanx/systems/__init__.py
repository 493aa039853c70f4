"""The published systems that Phalanx knows: what they do, where they live here, their numbers.

One module per system holds a `SYSTEM`; `published/<slug>.csv` holds the numbers of its paper;
`reproductions/<slug>.py`, where there is one, puts ours beside them. Nothing lists the systems
twice: a new file is a new system.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from phalanx.errors import JobError, PlanError, nearest_names
from phalanx.report import Report
from phalanx.systems._measured import record
from phalanx.systems._page import page
from phalanx.systems._published import Published, published, published_report
from phalanx.systems._system import System

__all__ = [
    "Published",
    "System",
    "all_systems",
    "draw",
    "get",
    "names",
    "page",
    "published",
    "published_report",
    "record",
    "reproduce",
    "reproducible",
    "to_markdown",
]


def names() -> list[str]:
    """Slugs of all systems, sorted; imports none of them."""
    found = iter_modules(__path__)
    return sorted(
        module.name.replace("_", "-")
        for module in found
        if not module.ispkg and not module.name.startswith("_")
    )


def get(slug: str) -> System:
    """The system of that name.

    Raises:
        JobError: `registry/unknown` with the nearest names.
    """
    known = names()
    if slug not in known:
        legal = nearest_names(slug, known)
        raise JobError("registry/unknown", "system", repr(slug), "no such system", legal=legal)
    return import_module(f"phalanx.systems.{slug.replace('-', '_')}").SYSTEM


def all_systems() -> list[System]:
    """Every system, by slug."""
    return [get(slug) for slug in names()]


def reproducible() -> list[str]:
    """Slugs of the systems that have a reproduction."""
    return [system.slug for system in all_systems() if system.has_reproduction]


def reproduce(slug: str) -> Report:
    """Our numbers of a system beside the published ones.

    Raises:
        JobError: `registry/unknown` for a name that is no system.
        PlanError: `system/unreproduced` for a system that has no reproduction yet.
    """
    system = get(slug)
    if not system.has_reproduction:
        rule = f"cannot say: this system is {system.status} and has no reproduction yet"
        legal = reproducible()
        raise PlanError("system/unreproduced", "systems.reproduce", repr(slug), rule, legal=legal)
    module = import_module(f"phalanx.systems.reproductions.{slug.replace('-', '_')}")
    return module.reproduce()


def draw(slug: str, path: str) -> bool:
    """Draw a system's picture (PNG or SVG); False where it has none."""
    module = import_module(f"phalanx.systems.reproductions.{slug.replace('-', '_')}")
    if not hasattr(module, "draw"):
        return False
    module.draw(path)
    return True


def to_markdown() -> str:
    """The documentation page of all systems."""
    systems = all_systems()
    lines = [
        "# Systems",
        "",
        "Written by `phalanx systems list --markdown docs/systems.md`; do not edit.",
        "",
        "A system is *planned* while nothing of it is here, *experimental* when some of its",
        "policies or modules are, *verified* when all are, each of its policies is verified and",
        "its reproduction meets its gates.",
        "",
        "| system | status | policies | reproduction | published numbers |",
        "|---|---|---|---|---|",
    ]
    for system in systems:
        places = ", ".join(f"`{place}`" for place in system.policies + system.modules)
        ours = "yes" if system.has_reproduction else ""
        count = len(published(system.slug))
        cells = (f"[{system.title}](#{system.slug})", system.status, places, ours, str(count))
        lines.append("| " + " | ".join(cells) + " |")
    for system in systems:
        lines += ["", *_section(system)]
    return "\n".join(lines) + "\n"


def _section(system: System) -> list[str]:
    lines = [f'## <a id="{system.slug}"></a>{system.title}', "", system.mechanism, ""]
    lines += [f"- {paper.title}. {paper.id}. {paper.where}." for paper in system.papers]
    if system.code:
        lines.append(f"- Code of the authors: {system.code}.")
    if system.builds_on:
        lines.append("- Builds on " + ", ".join(f"`{policy}`" for policy in system.builds_on) + ".")
    return lines
