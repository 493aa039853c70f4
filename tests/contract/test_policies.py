"""What every registered policy keeps, whatever its shape."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, asdict, fields, is_dataclass

import pytest

from phalanx import registry
from phalanx.registry import Entry
from tests.contract.scenarios import make, name_of

ENTRIES = registry.entries()
every_policy = pytest.mark.parametrize("entry", ENTRIES, ids=name_of)


@every_policy
def test_options_are_frozen_and_named(entry: Entry):
    assert is_dataclass(entry.cls) and "__hash__" in vars(entry.cls)
    policy = make(entry)
    for each in fields(entry.cls):
        assert each.kw_only, f"{each.name} can be given without its name"
        assert each.type, f"{each.name} has no type"
        with pytest.raises(FrozenInstanceError):
            setattr(policy, each.name, getattr(policy, each.name))


@every_policy
def test_equal_options_make_equal_policies(entry: Entry):
    policy = make(entry)
    assert policy == make(entry) and hash(policy) == hash(make(entry))
    assert pickle.loads(pickle.dumps(policy)) == policy, "it travels to the workers of a plan"


@every_policy
def test_a_lockfile_holds_the_policy(entry: Entry):
    policy = make(entry)
    assert registry.build(entry.family, {"name": entry.name} | asdict(policy)) == policy
