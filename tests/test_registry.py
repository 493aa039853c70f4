"""Names to policies: found lazily, refused with the nearest names."""

from dataclasses import dataclass
from importlib import import_module

import pytest

from phalanx.errors import JobError, PlanError
from phalanx.policy import Assign, Order, React, Spec
from phalanx.registry import SHAPE_OF_FAMILY, Source, build, entries, lookup, register

SHAPES = {"spec": Spec, "order": Order, "assign": Assign, "react": React}


def test_every_registered_policy_has_the_shape_of_its_family():
    found = entries()
    assert found
    for entry in found:
        assert issubclass(entry.cls, SHAPES[SHAPE_OF_FAMILY[entry.family]]), entry.name
        assert entry.cls.family == entry.family and entry.cls.policy_name == entry.name
        assert entry.source.title and entry.source.id, entry.name


def test_every_registered_policy_documents_costs_source_and_limits():
    for entry in entries():
        module = import_module(entry.cls.__module__)
        text = f"{module.__doc__}\n{entry.cls.__doc__}"
        for part in ("Symbols", "Cost", "Source", "Differences and limits"):
            assert part in text, f"{entry.family}/{entry.name} lacks {part!r}"


def test_unknown_names_come_with_the_nearest():
    with pytest.raises(JobError) as caught:
        lookup("pipeline", "1f1")
    assert caught.value.code == "registry/unknown" and "1f1b" in caught.value.legal
    with pytest.raises(JobError) as caught:
        lookup("pipline", "1f1b")
    assert "pipeline" in caught.value.legal


def test_options_are_built_strictly():
    assert build("tensor", {"name": "megatron", "axis": "model"}).axis == "model"
    with pytest.raises(JobError) as caught:
        build("tensor", {"name": "megatron", "sequence_paralel": True})
    assert caught.value.code == "job/unknown-key" and "sequence_parallel" in caught.value.legal
    with pytest.raises(JobError) as caught:
        build("tensor", {"axis": "tp"})
    assert caught.value.code == "job/missing"


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("pipeline", 3),
        ("pipeline", ["1f1b"]),
        (["pipeline"], "1f1b"),
        ("pipeline", {"name": ["1f1b"]}),
        ("tensor", {"name": "megatron", "axis": None}),
        ("tensor", {"name": "megatron", "sequence_parallel": "no"}),
        ("data", {"name": "fsdp", "prefetch": "x"}),
        ("data", {"name": "fsdp", "prefetch": True}),
        ("serve", {"name": "continuous", "chunk": None}),
        ("sync", {"name": "streaming", "inner_steps": "x"}),
        ("sync", {"name": "streaming", "inner_steps": 4, "outer_lr": float("nan")}),
    ],
)
def test_options_of_another_kind_are_refused(family, options):
    with pytest.raises(JobError) as caught:
        build(family, options)
    assert caught.value.code == "job/bad-value"


def test_fewer_than_no_units_cannot_be_gathered_ahead():
    with pytest.raises(PlanError) as caught:
        build("data", {"name": "fsdp", "prefetch": -1})
    assert caught.value.code == "plan/illegal" and caught.value.legal == (0,)


def test_a_name_is_registered_once():
    source = Source("a test", "none")

    @dataclass(frozen=True)
    class Stranger(Order):
        def order(self, num_ranks, num_items):
            return []

    with pytest.raises(JobError) as caught:
        register("pipeline", "1f1b", grain="stage", source=source)(Stranger)
    assert caught.value.code == "registry/duplicate"
