"""A run over many ranks equals one process that adds in the same order, to the bit.

Losses, norms and weights of several updates, in float32, with clipping.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from phalanx.data.batches import StepBatch
from phalanx.engines.bind import BoundData
from phalanx.engines.bind_tensor import BoundTensor
from phalanx.engines.optim import ShardedAdamW
from phalanx.engines.ordered import OrderedReference, in_order
from phalanx.engines.trainer_model import TrainModel
from phalanx.errors import PlanError
from phalanx.layout.stage_split import split_layers, stage_ranges
from phalanx.models.decoder import Decoder
from phalanx.models.parameters import initial_values, load_parameters
from phalanx.models.spec import canonical_tensors, small_config
from phalanx.policy import Step
from phalanx.registry import build
from tests.engines.pipeline_cases import StagedCase, joined, train_staged
from tests.engines.tensor_cases import (
    CLIP,
    DECAY,
    REPLICATE,
    SEED,
    Outcome,
    num_counted,
    rows_of,
    train_cases,
)
from tests.ranks import run_ranks

TIED = small_config(
    vocab_size=31, hidden_size=18, intermediate_size=20, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=6, window=3, full_every=2, dtype="float32", init_std=0.2, logit_soft_cap=4.0,
)  # fmt: skip
FULL = StagedCase(config=TIED, steps=4, rows=((5, 6), (7,), (3, 1, 5), (13,), (2, 9), (4,)))
BOTH = {"replicate": 2, "pp": 2}
TWO_RANKS = {
    "1f1b, tied": FULL,
    "interleaved, untied": replace(
        FULL, config=replace(TIED, tied_head=False), order={"name": "interleaved", "virtual": 2}
    ),
    "zero bubble": replace(FULL, order={"name": "zero_bubble"}),
    "hanayo, both ends on one rank": replace(FULL, order={"name": "hanayo", "waves": 1}),
}
REPLICAS = replace(FULL, mesh={"replicate": 2}, specs=(REPLICATE,))
FOUR_RANKS = {
    "replicate 2 x pp 2": replace(FULL, mesh=BOTH, specs=(REPLICATE,)),
    "replicate 2 x pp 2, waves": replace(
        FULL, mesh=BOTH, specs=(REPLICATE,), order={"name": "hanayo", "waves": 1}
    ),
}


def reference(case: StagedCase) -> Outcome:
    """One process, no process group."""
    decoder = Decoder(case.config)
    load_parameters(decoder, initial_values(SEED, canonical_tensors(case.config).values()))
    model = TrainModel(decoder.train(), BoundData((), (), ()), BoundTensor("", None, False), None)
    num_ranks = case.mesh.get("pp", 1)
    num_data = case.mesh.get("replicate", 1)
    order = build("pipeline", case.order) if num_ranks > 1 else None
    ranges = stage_ranges([[0, TIED.num_layers]])
    if order is not None:
        ranges = split_layers(case.config, order.num_stages(num_ranks))
    ordered = OrderedReference(model, order, num_ranks, ranges, torch.device("cpu"))
    optimizer = ShardedAdamW(decoder.named_parameters(), weight_decay=DECAY, clip_norm=CLIP)
    losses, norms = [], []
    for step in range(case.steps):
        rows, counted = rows_of(case, step), num_counted(case, step)
        batches = [StepBatch(tuple(rows[at::num_data]), counted, 0, 0) for at in range(num_data)]
        losses.append(float(ordered.gradients(batches)))
        norms.append(float(ordered.norm()))
        optimizer.step(case.lr, norm=ordered.norm())
    return Outcome(losses, norms, {name: p.detach() for name, p in decoder.named_parameters()})


def require_equal(name: str, case: StagedCase, of_ranks: list[Outcome]) -> None:
    expected = reference(case)
    for found in of_ranks:
        assert (found.losses, found.norms) == (expected.losses, expected.norms), name
    weights = joined(of_ranks)
    assert weights.keys() == expected.weights.keys()
    for weight, value in expected.weights.items():
        assert torch.equal(weights[weight], value), (name, weight)


@pytest.mark.dist
@pytest.mark.parametrize("cases", [TWO_RANKS, FOUR_RANKS], ids=["2 ranks", "4 ranks"])
def test_a_pipeline_over_replicas_is_its_reference_to_the_bit(cases):
    num_ranks = prod(next(iter(cases.values())).mesh.values())
    by_rank = run_ranks(train_staged, num_ranks, list(cases.values()), backend=None)
    for (name, case), of_ranks in zip(cases.items(), zip(*by_rank)):
        require_equal(name, case, list(of_ranks))


@pytest.mark.dist
def test_replicas_are_their_reference_to_the_bit():
    expected = reference(REPLICAS)
    for (found,) in run_ranks(train_cases, 2, [REPLICAS], backend=None):
        assert found.norms == expected.norms
        assert found.losses == pytest.approx(expected.losses, rel=1e-6)  # added up in float64
        for weight, value in expected.weights.items():
            assert torch.equal(found.weights[weight], value), weight


def test_the_same_sums_in_another_order_are_other_bits():
    """So that equality to the bit says something."""
    one, other = (reference(replace(FULL, mesh={"replicate": n}, steps=1)) for n in (1, 2))
    assert one.losses[0] == pytest.approx(other.losses[0], rel=1e-6)
    assert any(not torch.equal(one.weights[n], w) for n, w in other.weights.items())


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "hanayo"])
def test_lists_of_many_ranks_are_played_in_an_order_that_each_rank_has(name):
    order = build("pipeline", name)
    lists, num_stages = order.order(3, 6), order.num_stages(3)
    found = list(in_order(lists, num_stages))
    assert len(found) == sum(map(len, lists)) == len(set(found))
    rank_of_stage = order.rank_of_stage(3)
    for rank, steps in enumerate(lists):
        assert [step for step in found if rank_of_stage[step.stage] == rank] == list(steps)
    place = {step: at for at, step in enumerate(found)}
    for stage, kind, item in found:
        if kind == "F" and stage:
            assert place[Step(stage - 1, "F", item)] < place[Step(stage, "F", item)]


def test_three_data_ranks_are_refused():
    with pytest.raises(PlanError, match="order"):
        model = TrainModel(Decoder(TIED), BoundData((), (), ()), BoundTensor("", None, False), None)
        ordered = OrderedReference(
            model, None, 1, stage_ranges([[0, TIED.num_layers]]), torch.device("cpu")
        )
        ordered.gradients([StepBatch((), 1, 0, 0)] * 3)
