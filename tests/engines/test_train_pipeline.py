"""Training cut into the stages of a pipeline equals training in one process.

Micro-batches have lengths of their own, so every message of a step has another size.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.engines.pipeline_step import PipelineStep
from phalanx.models.decoder import Decoder
from phalanx.models.parameters import initial_values, load_parameters
from phalanx.models.spec import LoraSpec, canonical_tensors, small_config
from phalanx.worlds.comm_log import CommLog
from phalanx.worlds.logged_group import init_logged
from tests.engines.pipeline_cases import (
    StagedCase,
    build_staged,
    joined,
    step_of,
    train_staged,
)
from tests.engines.tensor_cases import (
    MEGATRON,
    REPLICATE,
    SEED,
    SEQUENCE,
    Outcome,
    plain_loss,
    rows_of,
    train_plain,
)
from tests.models.families import tiny_config
from tests.ranks import current_store, run_ranks

TIED = small_config(
    vocab_size=31, hidden_size=18, intermediate_size=20, num_layers=3, num_heads=4, num_kv_heads=2,
    head_dim=6, window=3, full_every=2, dtype="float64", init_std=0.2, logit_soft_cap=4.0,
)  # fmt: skip
DROPPED = LoraSpec(rank=3, alpha=7.0, dropout=0.3)
ZERO = {"family": "data", "name": "zero"}
RING = {"family": "context", "name": "ring"}
FULL = StagedCase(config=TIED)

TWO_RANKS = {
    "1f1b, tied": FULL,
    "gpipe, uneven": replace(FULL, order={"name": "gpipe"}, stages=[[0, 2], [2, 3]], steps=3),
    "embedding and head alone": replace(
        FULL, order={"name": "interleaved"}, stages=[[0, 0], [0, 2], [2, 3], [3, 3]], steps=3
    ),
    "hanayo, both ends on one rank": replace(
        FULL, order={"name": "hanayo", "waves": 1}, stages=[[0, 1], [1, 2], [2, 3], [3, 3]], steps=3
    ),
    "adapters, dropout, layers again": replace(
        FULL, lora=DROPPED, recompute="full", stages=[[0, 1], [1, 3]], steps=3
    ),
    "norms again": replace(FULL, recompute="selective", steps=3),
    "weights apart from inputs, adapters": replace(
        FULL, order={"name": "zero_bubble"}, lora=DROPPED, stages=[[0, 1], [1, 3]], steps=2
    ),
    "weights apart from inputs, layers again": replace(
        FULL, order={"name": "zero_bubble"}, recompute="full", steps=2
    ),
    "a V, both ends on one rank": replace(
        FULL, order={"name": "zbv"}, stages=[[0, 1], [1, 2], [2, 3], [3, 3]], steps=2
    ),
}
FAMILIES = ("llama3", "qwen3", "gemma4")
TWO_RANKS |= {
    family: StagedCase(config=replace(tiny_config(family, "float64"), init_std=0.15), steps=2)
    for family in FAMILIES
}
FOUR_RANKS = {
    "replicate 2 x pp 2": replace(
        FULL, mesh={"replicate": 2, "pp": 2}, specs=(REPLICATE,), steps=3
    ),
    "pp 2 x tp 2, tokens split": replace(FULL, mesh={"pp": 2, "tp": 2}, specs=(SEQUENCE,), steps=3),
    "pp 2 x zero 1 over 2": replace(
        FULL, mesh={"pp": 2, "shard": 2}, specs=(ZERO | {"stage": 1},), steps=3
    ),
    "zero 2 over 2 x pp 2, chunks": replace(
        FULL,
        mesh={"shard": 2, "pp": 2},
        specs=(ZERO | {"stage": 2},),
        order={"name": "interleaved"},
        stages=[[0, 1], [1, 2], [2, 3], [3, 3]],
        steps=3,
    ),
    "pp 2 x cp 2": replace(FULL, mesh={"pp": 2, "cp": 2}, specs=(RING,), steps=3),
    "pp 2 x tp 2, adapters": replace(
        FULL, mesh={"pp": 2, "tp": 2}, specs=(MEGATRON,), lora=DROPPED, steps=3
    ),
    "pp 2 x tp 2, weights apart, layers again": replace(
        FULL,
        mesh={"pp": 2, "tp": 2},
        specs=(SEQUENCE,),
        order={"name": "zero_bubble"},
        recompute="full",
        steps=2,
    ),
    "zero 2 over 2 x pp 2, a V": replace(
        FULL,
        mesh={"shard": 2, "pp": 2},
        specs=(ZERO | {"stage": 2},),
        order={"name": "zbv"},
        stages=[[0, 1], [1, 2], [2, 3], [3, 3]],
        steps=2,
    ),
}
CASES = {2: TWO_RANKS, 4: FOUR_RANKS}


@pytest.fixture(scope="module", params=CASES, ids=lambda size: f"{size} ranks")
def outcomes(request) -> dict[str, list[Outcome]]:
    cases = CASES[request.param]
    by_rank = run_ranks(train_staged, request.param, list(cases.values()), backend=None)
    return {name: list(of_ranks) for name, of_ranks in zip(cases, zip(*by_rank))}


@pytest.mark.dist
def test_stages_train_as_one_process(outcomes):
    for name, of_ranks in outcomes.items():
        plain = train_plain((TWO_RANKS | FOUR_RANKS)[name])
        for found in of_ranks:
            for mine, theirs in ((found.losses, plain.losses), (found.norms, plain.norms)):
                assert mine == pytest.approx(theirs, rel=1e-9), name
        weights = joined(of_ranks)
        assert weights.keys() == plain.weights.keys(), name
        for weight, value in plain.weights.items():
            torch.testing.assert_close(weights[weight], value, rtol=1e-9, atol=1e-11, msg=weight)


# ---- to the bit ----------------------------------------------------------------------------------

UNTIED = replace(TIED, dtype="float32", tied_head=False)
ORDERS: dict[str, dict[str, Any]] = {
    "gpipe": {"name": "gpipe"},
    "1f1b": {"name": "1f1b"},
    "interleaved": {"name": "interleaved", "virtual": 2},
    "hanayo": {"name": "hanayo", "waves": 1},
    "zero_bubble": {"name": "zero_bubble"},
    "zbv": {"name": "zbv"},
    "dualpipe_v": {"name": "dualpipe_v"},
}


def staged_gradients(rank: int, world_size: int, cases: list[StagedCase]) -> list[Any]:
    """Of each case the gradients of two steps without an update, and the losses."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    found = []
    for case in cases:
        model = build_staged(rank, world_size, case)
        pipeline = PipelineStep(model, torch.device("cpu"))
        losses = [pipeline.run(step_of(case, model, step)) for step in range(2)]
        grads = {name: p.grad.clone() for name, p in model.decoder.named_parameters()}
        found.append((grads, losses, model.stages.holds_last))
    return found


def plain_decoder(case: StagedCase) -> Decoder:
    decoder = Decoder(case.config)
    load_parameters(decoder, initial_values(SEED, canonical_tensors(case.config).values()))
    return decoder.train()


def plain_gradients(case: StagedCase) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    decoder, losses = plain_decoder(case), []
    for step in range(2):
        total = torch.zeros(())
        for row in rows_of(case, step):
            loss = plain_loss(decoder, case, row, step)
            loss.backward()
            total = total + loss.detach()
        losses.append(total)
    return {name: p.grad for name, p in decoder.named_parameters()}, losses


@pytest.mark.dist
def test_gradients_are_those_of_the_same_micro_batches_to_the_bit():
    cases = [StagedCase(config=UNTIED, order=order) for order in ORDERS.values()]
    grads, losses = plain_gradients(cases[0])
    for of_rank in run_ranks(staged_gradients, 2, cases, backend=None):
        for name, (found, found_losses, holds_last) in zip(ORDERS, of_rank):
            assert found
            for parameter, grad in found.items():
                assert torch.equal(grad, grads[parameter]), (name, parameter)
            assert not holds_last or found_losses == losses


# ---- exchanges -----------------------------------------------------------------------------------

SPLIT = replace(FULL, mesh={"pp": 2, "tp": 2}, specs=(SEQUENCE,))
APART = {"name": "zero_bubble"}


def exchanges(rank: int, world_size: int, cases: list[StagedCase]) -> list[Counter[str]]:
    """Of each case the exchanges of a step on the model axis."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    found = []
    for case in cases:
        model, log = build_staged(rank, world_size, case), CommLog(rank)
        pipeline = PipelineStep(model, torch.device("cpu"))
        with log.step(0):
            pipeline.run(step_of(case, model, 0))
        found.append(Counter(row.kind for row in log.rows if row.axis == "tp"))
    return found


@pytest.mark.dist
def test_weight_gradients_exchange_nothing_but_what_makes_their_inputs_again():
    """A layer that is computed again in the weight pass of a later stage exchanges again, once."""
    cases = [SPLIT, replace(SPLIT, order=APART)]
    cases += [replace(case, recompute="full") for case in cases]
    for rank, (whole, apart, again, both) in enumerate(
        run_ranks(exchanges, 4, cases, backend=None)
    ):
        assert whole == apart and whole.total() > 0
        is_first = rank // 2 == 0  # of the stages: its input gradient is nobody's
        assert both - again == (Counter() if is_first else again - whole)
        assert again.total() > whole.total()
