"""Every system is complete, and what is said of it follows from what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phalanx import registry, systems
from phalanx.errors import JobError, PlanError
from phalanx.registry import SHAPE_OF_FAMILY, STATUSES, Entry, Source
from phalanx.systems import _published
from phalanx.systems._published import COLUMNS, FOLDER
from phalanx.systems._system import System

NAMES = systems.names()


def test_all_forty_systems_are_known():
    assert len(NAMES) >= 40
    assert {"fsdp", "hanayo", "striped-attention", "x-moe", "xdit"} <= set(NAMES)


@pytest.mark.parametrize("slug", NAMES)
def test_system_is_complete(slug):
    system = systems.get(slug)
    assert system.slug == slug and system.title and system.papers
    assert 2 <= len(re.findall(r"[.!?](?:\s|$)", system.mechanism)) <= 4
    assert system.policies or system.modules, "it has to live somewhere"
    for policy in system.policies + system.builds_on:
        family, _, name = policy.partition("/")
        assert family in SHAPE_OF_FAMILY and name, policy
    for paper in system.papers:
        assert re.match(r"(arXiv \d{4}\.\d{4,5}|DOI 10\.|github\.com/)", paper.id), paper.id


def test_no_two_systems_claim_one_policy():
    claimed = [policy for system in systems.all_systems() for policy in system.policies]
    assert len(claimed) == len(set(claimed))


def test_what_a_system_builds_on_is_a_policy_of_another():
    owner = {policy: s.slug for s in systems.all_systems() for policy in s.policies}
    for system in systems.all_systems():
        for policy in system.builds_on:
            assert owner.get(policy, system.slug) != system.slug, (system.slug, policy)


@pytest.mark.parametrize("slug", NAMES)
def test_published_rows_parse_and_are_kept_whole(slug):
    rows = systems.published(slug)
    header = (FOLDER / f"{slug}.csv").read_text(encoding="utf-8").splitlines()[0]
    assert tuple(header.split(",")) == COLUMNS
    assert rows and all(row.system == slug and row.metric and row.source for row in rows)
    report = systems.published_report(slug, slug)
    assert len({(row.quantity, row.unit) for row in report.rows}) == len(rows)
    assert all(row.source == "published" and row.note for row in report.rows)
    words = [row.note for row in report.rows if row.value is None]
    assert all(note.startswith("printed as") for note in words)


def test_every_published_file_belongs_to_a_system():
    assert sorted(path.stem for path in FOLDER.glob("*.csv")) == NAMES


def test_a_published_row_takes_the_name_and_unit_of_ours():
    row = next(r for r in systems.published("fsdp") if r.experiment == "weak scaling")
    renamed = row.row("T5-11B loss from 8 to 512 ranks", "1", scale=0.01)
    assert (renamed.value, renamed.unit) == (pytest.approx(0.07), "1")
    assert "Fig. 7c" in renamed.note


def test_unknown_system_names_the_nearest():
    with pytest.raises(JobError) as caught:
        systems.get("megatron")
    assert caught.value.code == "registry/unknown" and "megatron-lm" in caught.value.legal


def test_a_system_without_reproduction_cannot_say_and_names_those_that_can():
    without = next(s.slug for s in systems.all_systems() if not s.has_reproduction)
    with pytest.raises(PlanError) as caught:
        systems.reproduce(without)
    assert caught.value.code == "system/unreproduced"
    assert list(caught.value.legal) == systems.reproducible()


def _entry(name: str, status: str) -> Entry:
    return Entry("data", name, object, "unit", Source("t", "arXiv 0000.00000"), status)


@pytest.mark.parametrize(
    ("registered", "modules", "reproduction", "expected"),
    [
        ([], (), True, "planned"),
        ([], ("registry",), True, "experimental"),
        ([("one", "verified")], (), True, "experimental"),
        ([("one", "verified"), ("two", "experimental")], (), True, "experimental"),
        ([("one", "verified"), ("two", "verified")], (), True, "verified"),
        ([("one", "verified"), ("two", "verified")], (), False, "experimental"),
        ([("one", "verified"), ("two", "verified")], ("no/such/module",), True, "experimental"),
        ([("one", "verified"), ("two", "verified")], ("registry",), True, "verified"),
    ],
)
def test_status_follows_from_what_exists(monkeypatch, registered, modules, reproduction, expected):
    found = [_entry(*each) for each in registered]
    monkeypatch.setattr(registry, "entries", lambda family=None: found)
    monkeypatch.setattr(System, "has_reproduction", property(lambda self: reproduction))
    system = System(
        slug="made-up",
        title="t",
        papers=(),
        mechanism="m",
        policies=("data/one", "data/two"),
        modules=modules,
    )
    assert system.status == expected and system.status in STATUSES


def test_verified_systems_meet_their_gates():
    for system in systems.all_systems():
        if system.status == "verified":
            assert systems.reproduce(system.slug).missed == []


def test_documentation_page_is_what_the_catalogue_says():
    page = Path(__file__).parents[2] / "docs" / "systems.md"
    assert page.read_text(encoding="utf-8") == systems.to_markdown(), (
        "write it again with: phalanx systems list --markdown docs/systems.md"
    )


def test_a_table_with_other_columns_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_published, "FOLDER", tmp_path)
    with pytest.raises(PlanError, match=r"published/made-up\.csv: is no table") as missing:
        systems.published("made-up")
    (tmp_path / "made-up.csv").write_text(",".join(reversed(COLUMNS)) + "\n")
    with pytest.raises(
        PlanError, match=r"made-up\.csv: header .* must have these columns"
    ) as other:
        systems.published("made-up")
    assert missing.value.code == other.value.code == "system/published"
