"""Training split over a tensor axis equals training in one process.

What a mesh or an option may change, on one small model in float64; all families take ten steps in
`test_family_equality`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from phalanx.models.spec import DecoderConfig, LoraSpec, small_config
from tests.engines.tensor_cases import (
    FSDP,
    MEGATRON,
    REPLICATE,
    SEQUENCE,
    Case,
    Outcome,
    train_cases,
    train_plain,
)
from tests.ranks import close_pool, run_ranks

CONFIG = small_config(
    vocab_size=31, hidden_size=18, intermediate_size=20, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=6, window=3, full_every=2, dtype="float64", init_std=0.2, logit_soft_cap=4.0,
)  # fmt: skip
# ranks whose query heads fall unevenly on the key and value heads: 3 | 1 2 | 2 1 | 3
THREES = small_config(
    vocab_size=33, hidden_size=18, intermediate_size=20, num_layers=2, num_heads=12, num_kv_heads=3,
    head_dim=4, window=3, full_every=2, dtype="float64", init_std=0.2,
)  # fmt: skip
LORA = LoraSpec(rank=3, alpha=7.0)
DROPPED = LoraSpec(rank=3, alpha=7.0, dropout=0.3)
TWICE = MEGATRON | {"sequence_parallel": True}  # inputs of blocks are gathered again
BESIDE = {"overlap": True}
WHOLE_HEAD = MEGATRON | {"vocabulary_parallel": False}
STEPS = 4
FULL = Case(config=CONFIG, steps=STEPS)
ADAPTED = replace(FULL, lora=LORA)
BOTH = {"shard": 2, "tp": 2}
MESHES = {"fsdp 2": {"shard": 2, "tp": 1}, "tp 2": {"shard": 1, "tp": 2}}

# ---- accumulation and mixed dtypes, in float32 and bfloat16
SINGLE = replace(CONFIG, dtype="float32")
DOCUMENTS = ((5, 3, 9, 4, 6, 2, 7, 8), (6, 2, 7, 8, 5, 3, 9, 4))
SPLITS = {
    (mesh, by_document): Case(
        config=SINGLE, mesh=MESHES[mesh], rows=DOCUMENTS, by_document=by_document, steps=3, lr=1e-3
    )
    for mesh in MESHES
    for by_document in (False, True)
}
MIXED = Case(
    config=replace(CONFIG, dtype="bfloat16"),
    lora=LORA,
    dtypes={"master": "float32"},
    steps=STEPS,
    lr=1e-3,
)

CASES = {
    "tp 2": FULL,
    "tp 2, no data axis": replace(FULL, mesh={"tp": 2}, specs=(MEGATRON,)),
    "tp 2, whole vocabulary": replace(FULL, specs=(WHOLE_HEAD,)),
    "tp 2, tokens split": replace(FULL, specs=(SEQUENCE,)),
    "tp 2, tokens split, gathered twice": replace(FULL, specs=(TWICE,)),
    "tp 2, gathered twice, norms again": replace(FULL, recompute="selective", specs=(TWICE,)),
    "tp 2, gathered twice, layers again": replace(FULL, recompute="full", specs=(TWICE,)),
    "tp 2, gathered twice, dropout": replace(ADAPTED, lora=DROPPED, specs=(TWICE,)),
    "tp 2, beside products": replace(FULL, specs=(MEGATRON | BESIDE,)),
    "tp 2, tokens split, beside products": replace(FULL, specs=(TWICE | BESIDE,)),
    "tp 2, beside products, layers again": replace(
        FULL, recompute="full", specs=(MEGATRON | BESIDE,)
    ),
    "fsdp 2 x tp 2, beside products": replace(FULL, mesh=BOTH, specs=(FSDP, MEGATRON | BESIDE)),
    "tp 4 of 2 kv heads, beside products": replace(
        FULL, mesh={"shard": 1, "tp": 4}, specs=(FSDP, MEGATRON | BESIDE)
    ),
    "tp 2, adapters": ADAPTED,
    "tp 2, adapters, tokens split": replace(ADAPTED, specs=(SEQUENCE,)),
    "tp 2, dropout": replace(ADAPTED, lora=DROPPED),
    "tp 2, dropout, tokens split": replace(ADAPTED, lora=DROPPED, specs=(SEQUENCE,)),
    "tp 2, layers again": replace(FULL, recompute="full"),
    "tp 2, norms again, tokens split": replace(FULL, recompute="selective", specs=(SEQUENCE,)),
    "fsdp 2 x tp 2": replace(FULL, mesh=BOTH),
    "tp 2 x fsdp 2": replace(FULL, mesh={"tp": 2, "shard": 2}),
    "fsdp 2 x tp 2, tokens split": replace(FULL, mesh=BOTH, specs=(FSDP, SEQUENCE)),
    "fsdp 2 x tp 2, adapters": replace(ADAPTED, mesh=BOTH),
    "replicate 2 x tp 2": replace(
        FULL, mesh={"replicate": 2, "tp": 2}, specs=(REPLICATE, MEGATRON)
    ),
    "tp 4 of 2 kv heads": replace(FULL, mesh={"shard": 1, "tp": 4}),
    "tp 4, 12 heads of 3": replace(FULL, mesh={"shard": 1, "tp": 4}, config=THREES),
    "tp 4 of 2 kv heads, adapters": replace(ADAPTED, mesh={"shard": 1, "tp": 4}),
    "tp 4 of 2 kv heads, tokens split": replace(
        FULL, mesh={"shard": 1, "tp": 4}, specs=(SEQUENCE,)
    ),
}


def size_of(case: Case) -> int:
    size = 1
    for degree in case.mesh.values():
        size *= degree
    return size


@pytest.fixture(scope="module")
def outcomes() -> dict[Any, list[Outcome]]:
    """By case, of every rank; one launch per world size.

    In processes of its own: after other tests, workers that were used on other meshes gathered
    unevenly cut vocabularies wrongly. What torch keeps there was not found; a training process has
    one mesh in its life.
    """
    close_pool()
    found: dict[Any, list[Outcome]] = {}
    cases = CASES | SPLITS | {"mixed": MIXED}
    for size in {size_of(case) for case in cases.values()}:
        names = [name for name, case in cases.items() if size_of(case) == size]
        ranks = run_ranks(
            train_cases, size, [cases[n] for n in names], backend=None, timeout_s=300.0
        )
        for at, name in enumerate(names):
            found[name] = [of_rank[at] for of_rank in ranks]
    return found


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_moments_lie_where_their_parameters_do_and_frozen_weights_stay(name, outcomes):
    for outcome in outcomes[name]:
        assert not outcome.misplaced and not outcome.changed


@cache
def reference(config: DecoderConfig, lora: LoraSpec | None) -> Outcome:
    return train_plain(replace(FULL, config=config, lora=lora))


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_steps_equal_one_process(name, outcomes):
    expected = reference(CASES[name].config, CASES[name].lora)
    for outcome in outcomes[name]:
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=1e-9, atol=0.0)
        torch.testing.assert_close(outcome.norms, expected.norms, rtol=1e-9, atol=0.0)
        assert outcome.weights.keys() == expected.weights.keys()
        for weight, value in expected.weights.items():
            found = outcome.weights[weight]
            torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-9, msg=weight)


@pytest.mark.dist
@pytest.mark.parametrize("mesh", MESHES)
def test_accumulation_does_not_depend_on_the_split(mesh, outcomes):
    """Eight documents of each row in one micro-batch, or each in its own: float32."""
    whole, split = (outcomes[mesh, by_document][0] for by_document in (False, True))
    torch.testing.assert_close(split.losses, whole.losses, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(split.norms, whole.norms, rtol=1e-5, atol=0.0)


@pytest.mark.dist
def test_float32_adapters_on_a_bfloat16_base_train_as_in_one_process(outcomes):
    """A product of a row is rounded to bfloat16 (2^-9) on each rank before it is summed, so losses
    agree to a few roundings, not to float32's."""
    expected = train_plain(MIXED)
    for outcome in outcomes["mixed"]:
        assert not outcome.changed
        assert {value.dtype for value in outcome.weights.values()} == {torch.float32}
        torch.testing.assert_close(outcome.losses, expected.losses, rtol=2**-8, atol=0.0)
        torch.testing.assert_close(outcome.norms, expected.norms, rtol=2**-5, atol=0.0)
