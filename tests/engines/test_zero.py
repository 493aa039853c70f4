"""ZeRO 1 and 2 on real processes: the training of one process, with an update that is cut.

N=31 rows of the embedding, odd widths and 3 ranks make shards uneven, and some empty.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from phalanx.engines.bind import bind_data
from phalanx.engines.local_parts import local_of
from phalanx.engines.optim import MOMENTS, ShardedAdamW
from phalanx.engines.trainer_model import TrainModel
from phalanx.mesh import Mesh
from phalanx.models.spec import LoraSpec, small_config
from phalanx.policies.data.replicate import Replicate
from phalanx.policies.data.zero import Zero
from phalanx.worlds.logged_group import device_mesh, init_logged
from tests.engines.pipeline_cases import StagedCase, train_staged
from tests.engines.tensor_cases import (
    FSDP,
    MEGATRON,
    REPLICATE,
    Case,
    bound_loss,
    build,
    cpu_process,
    rows_of,
    train_cases,
    train_plain,
)
from tests.ranks import current_store, run_ranks

CONFIG = small_config(
    vocab_size=31, hidden_size=18, intermediate_size=22, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=6, window=3, full_every=2, dtype="float64",
)  # fmt: skip
ZERO_1 = {"family": "data", "name": "zero"}
ZERO_2 = ZERO_1 | {"stage": 2}
PLAIN = Case(config=CONFIG, mesh={})
TWO = (
    replace(PLAIN, mesh={"shard": 2}, specs=(ZERO_1,)),
    replace(PLAIN, mesh={"shard": 2}, specs=(ZERO_2,)),
    replace(PLAIN, mesh={"shard": 1, "tp": 2}, specs=(ZERO_2, MEGATRON)),
    replace(PLAIN, mesh={"replicate": 2, "shard": 1}, specs=(ZERO_2, REPLICATE)),
)
FOUR = (
    replace(PLAIN, mesh={"shard": 4}, specs=(ZERO_2,)),
    replace(PLAIN, mesh={"replicate": 2, "shard": 2}, specs=(ZERO_2, REPLICATE)),
    replace(PLAIN, mesh={"shard": 2, "tp": 2}, specs=(ZERO_1, MEGATRON)),
)


def named(case: Case) -> str:
    return f"{dict(case.mesh)}"


@pytest.fixture(scope="module")
def expected():
    return train_plain(PLAIN)


@pytest.mark.dist
@pytest.mark.parametrize(("world_size", "cases"), [(2, TWO), (4, FOUR)], ids=["2", "4"])
def test_a_cut_update_trains_as_one_process(expected, world_size, cases):
    for outcomes in run_ranks(train_cases, world_size, cases, backend=None):
        for case, found in zip(cases, outcomes):
            assert found.losses == pytest.approx(expected.losses, rel=1e-10), named(case)
            assert found.norms == pytest.approx(expected.norms, rel=1e-9), named(case)
            assert found.weights.keys() == expected.weights.keys()
            for name, weight in expected.weights.items():
                torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=1e-9)
            assert not found.misplaced


@pytest.mark.dist
def test_a_cut_update_trains_adapters_as_one_process():
    lora = LoraSpec(rank=3, alpha=6.0)
    cases = [replace(case, lora=lora, steps=4) for case in TWO[:2]]
    expected = train_plain(cases[0])
    for outcomes in run_ranks(train_cases, 2, cases, backend=None):
        for found in outcomes:
            assert found.losses == pytest.approx(expected.losses, rel=1e-10)
            for name, weight in expected.weights.items():
                torch.testing.assert_close(found.weights[name], weight, rtol=0, atol=1e-9)
            assert not (found.changed or found.misplaced)


THREE_LAYERS = (CONFIG.layer_kinds[0], *CONFIG.layer_kinds)
BOTH_ENDS = StagedCase(
    config=replace(CONFIG, tied_head=False, layer_kinds=THREE_LAYERS),
    mesh={"shard": 2, "pp": 2}, specs=(ZERO_2,),
    stages=[[0, 1], [1, 2], [2, 3], [3, 3]], steps=2,
    rows=((5, 6), (7,), (3, 1, 5), (13,), (4,), (8,), (2, 6), (9,)),
)  # fmt: skip
HANAYO = {"name": "hanayo", "waves": 1}
V_SHAPES = [replace(BOTH_ENDS, order=order) for order in ({"name": "zbv"}, HANAYO)]


@pytest.mark.dist
def test_both_ends_of_a_pipeline_on_one_rank_reduce_by_rounds_of_their_own():
    """Embedding and head are one unit there, whose passes do not end together."""
    expected = train_plain(BOTH_ENDS)
    for outcomes in run_ranks(train_staged, 4, V_SHAPES, backend=None):
        for case, found in zip(V_SHAPES, outcomes):
            assert found.losses == pytest.approx(expected.losses, rel=1e-9), case.order
            assert found.norms == pytest.approx(expected.norms, rel=1e-9), case.order
            for name, weight in found.weights.items():
                torch.testing.assert_close(weight, expected.weights[name], rtol=0, atol=1e-9)


# ---- memory --------------------------------------------------------------------------------------

EVEN = small_config(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=4,
    head_dim=4, dtype="bfloat16",
)  # fmt: skip
MIXED = {"master": "float32", "compute": "bfloat16", "reduce": "bfloat16"}
EVERY = FSDP | {"reduce_every_item": True}
# bytes per element at N = 4 with K = 12: arXiv 1910.02054, figure 1
MIXED_CASES = {
    16.0: Case(config=EVEN, mesh={"replicate": 4, "shard": 1}, specs=(ZERO_1, REPLICATE)),
    4 + 12 / 4: Case(config=EVEN, mesh={"shard": 4}, specs=(ZERO_1,)),
    2 + 14 / 4: Case(config=EVEN, mesh={"shard": 4}, specs=(ZERO_2,)),
    16 / 4: Case(config=EVEN, mesh={"shard": 4}, specs=(EVERY,)),
}


def live_bytes(rank: int, world_size: int, cases) -> list[float]:
    """Per element of the model: weights, gradients and optimizer state that this rank keeps when
    two of three micro-batches of the second step have been computed; what is gathered or under way
    is left out."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    return [_bytes_per_element(rank, world_size, case) for case in cases]


def _bytes_per_element(rank: int, world_size: int, case: Case) -> float:
    case = replace(case, dtypes={"master": "float32", "compute": "bfloat16", "reduce": "bfloat16"})
    model = build(case, cpu_process(rank, world_size, case))
    optimizer = ShardedAdamW(model.data.named_held(model.decoder.named_parameters()))
    row, kept_bytes = rows_of(case, 0)[0], 0
    for step, num_items in ((0, 1), (1, 3)):
        for item in range(num_items):
            model.data.begin_item(item, num_items)
            bound_loss(model, case, row, step).backward()
            if (step, item) == (1, 1):
                kept_bytes = _kept_bytes(model, optimizer)
        model.finish_step()
        optimizer.step(1e-3)
        model.data.finish_update()
    return kept_bytes / sum(each.numel() for each in optimizer.parameters)


def _kept_bytes(model: TrainModel, optimizer: ShardedAdamW) -> int:
    """Every storage once; numbers of updates are scalars and left out."""
    kinds = optimizer.state_dict()
    kept = [*optimizer.parameters, *(t for kind in MOMENTS for t in kinds[kind].values())]
    kept += [each.grad for each in optimizer.parameters if each.grad is not None]
    if not any(unit.shard for unit in model.data.units):
        kept += model.decoder.parameters()
    storages = {local_of(t).untyped_storage().data_ptr(): local_of(t) for t in kept}
    return sum(t.untyped_storage().nbytes() for t in storages.values()) + model.data.grad_bytes()


@pytest.mark.dist
def test_live_bytes_are_zeros_figure_1():
    for found in run_ranks(live_bytes, 4, list(MIXED_CASES.values()), backend=None):
        assert found == list(MIXED_CASES)


# ---- sums in a wider dtype -----------------------------------------------------------------------


def added_up(rank: int, world_size: int, specs) -> dict[str, float]:
    """Worst relative error of a bfloat16 gradient of 64 micro-batches, by the reduction's dtype."""
    init_logged("gloo", dist.PrefixStore("logged", current_store()), rank, world_size)
    mesh = device_mesh("cpu", Mesh(shard=1, replicate=1))
    errors = {}
    for dtype in ("bfloat16", "float32"):
        module = torch.nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
        data = bind_data(module, specs, mesh, reduce_dtype=dtype, master_dtype="float32")
        held = data.held(module.weight) if specs == [Replicate()] else None
        rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(3)).bfloat16()
        if held is None:
            held = dict(data.named_held([("weight", module.weight)]))["weight"]
        for item, row in enumerate(rows):
            data.begin_item(item, len(rows))
            module(row).sum().backward()
        data.finish_step()
        grad, exact = local_of(held.grad).double(), rows.double().sum(0)
        errors[dtype] = float(((grad - exact) / exact).abs().max())
    return errors


@pytest.mark.dist
@pytest.mark.parametrize(
    ("spec", "last_rounding"),
    [(Replicate(), 2**-8), (Zero(), 1e-6), (Zero(stage=2), 1e-6)],
    ids=["replicate", "zero 1", "zero 2"],
)
def test_gradients_are_added_up_in_the_dtype_of_the_reduction(spec, last_rounding):
    errors = run_ranks(added_up, 1, [spec], backend=None)[0]
    assert errors["float32"] <= last_rounding < 2**-7 < errors["bfloat16"]
