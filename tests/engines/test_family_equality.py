"""All families, sharded and split, train as in one process, with no layer named by the user.

Float64: weights to 1e-9 after ten steps of AdamW, losses and gradient norms likewise.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from phalanx.models.spec import LoraSpec
from tests.engines.tensor_cases import FSDP, SEQUENCE, Case, Outcome, train_cases, train_plain
from tests.models.families import tiny_config
from tests.ranks import run_ranks

FAMILIES = ("llama3", "qwen3", "gemma3", "gemma4", "gemma4_ple")
MESHES = {"fsdp 2": {"shard": 2}, "tp 2": {"shard": 1, "tp": 2}, "both": {"shard": 2, "tp": 2}}
METHODS = {"full": None, "adapters": LoraSpec(rank=3, alpha=7.0, dropout=0.2)}


def case_of(family: str, mesh: str, method: str) -> Case:
    config = replace(tiny_config(family, "float64"), init_std=0.15)
    rows = ((5, 6), (9,))
    case = Case(config=config, mesh=MESHES[mesh], lora=METHODS[method], rows=rows, lr=3e-3)
    return replace(case, specs=(FSDP,)) if mesh == "fsdp 2" else case


CASES = {each: case_of(*each) for each in product(FAMILIES, MESHES, METHODS)}
for _family in FAMILIES:  # tokens between blocks are split too
    _case = CASES[_family, "tp 2", "full"]
    CASES[_family, "sequence", "full"] = replace(_case, specs=(SEQUENCE,))


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple, list[Outcome]]:
    """By case, of every rank; one launch per world size."""
    found = {}
    for size in (2, 4):
        names = [n for n in CASES if (n[1] == "both") == (size == 4)]
        cases = [CASES[n] for n in names]
        ranks = run_ranks(train_cases, size, cases, backend=None, timeout_s=300.0)
        for at, name in enumerate(names):
            found[name] = [of_rank[at] for of_rank in ranks]
    return found


@cache
def expected_of(family: str, method: str) -> Outcome:
    return train_plain(CASES[family, "tp 2", method])


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES, ids="-".join)
def test_ten_steps_equal_one_process(name, outcomes):
    family, _, method = name
    expected = expected_of(family, method)
    for outcome in outcomes[name]:
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=1e-9, atol=0.0)
        torch.testing.assert_close(outcome.norms, expected.norms, rtol=1e-9, atol=0.0)
        assert outcome.weights.keys() == expected.weights.keys()
        for weight, value in expected.weights.items():
            found = outcome.weights[weight]
            torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-9, msg=weight)
