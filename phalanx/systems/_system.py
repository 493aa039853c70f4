"""The record of one system, and how far Phalanx has come with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import phalanx
from phalanx import registry
from phalanx.registry import Entry, Source

_PACKAGE = Path(phalanx.__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A published system and the places in Phalanx that hold it.

    Attributes:
        slug: its name on the command line ("striped-attention").
        title: its name in a table.
        papers: title, identifier, and authors or venue; the main one first.
        mechanism: what it does, in two or three sentences.
        policies: "family/name" of the policies that it adds to Phalanx, existing or to come.
        builds_on: "family/name" of policies of other systems that it composes.
        modules: files or folders below `phalanx/` that it adds beside policies ("ops/spmm").
        code: reference repository of its authors ("" for none).
        ran: where its parts have been run, and where not, a sentence each.
    """

    slug: str
    title: str
    papers: tuple[Source, ...]
    mechanism: str
    policies: tuple[str, ...] = ()
    builds_on: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    code: str = ""
    ran: tuple[str, ...] = ()

    @property
    def has_reproduction(self) -> bool:
        """Whether `phalanx.systems.reproductions` has a module for it."""
        return _exists(f"systems/reproductions/{self.slug.replace('-', '_')}")

    def entries(self) -> dict[str, Entry | None]:
        """Its own policies as registered; None for one that is still to come."""
        return {policy: _entry(policy) for policy in self.policies}

    def missing(self) -> list[str]:
        """Its policies and modules that do not exist yet."""
        policies = [policy for policy, entry in self.entries().items() if entry is None]
        return policies + [module for module in self.modules if not _exists(module)]

    @property
    def status(self) -> str:
        """Derived, never typed: what exists decides.

        planned: none of its policies is registered and none of its modules exists.
        experimental: some are there.
        verified: all are there, each of its policies is verified, and it has a reproduction (a
            test holds that the reproduction of a verified system meets all its gates).
        """
        missing = self.missing()
        if len(missing) == len(self.policies) + len(self.modules):
            return "planned"
        verified = all(e is not None and e.status == "verified" for e in self.entries().values())
        return "verified" if verified and not missing and self.has_reproduction else "experimental"


def _entry(policy: str) -> Entry | None:
    family, _, name = policy.partition("/")
    return next((entry for entry in registry.entries(family) if entry.name == name), None)


def _exists(module: str) -> bool:
    # By path: looking a module up by name would import its package, and with it torch.
    path = _PACKAGE / module
    return path.is_dir() or path.with_suffix(".py").is_file()
