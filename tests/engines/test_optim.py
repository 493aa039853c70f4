"""The sharded optimizer against torch's own on whole tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard

from phalanx.engines.optim import ShardedAdamW, global_norm
from tests.engines.checkpoint_cases import awkward_run, train_steps
from tests.ranks import run_ranks

SIZES = ((5, 3), (1, 4), (7,))  # uneven and empty shards on 2 and 3 ranks


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(size).double()) for size in SIZES]
        )

    def forward(self, x):
        return sum((weight * x).sin().sum() for weight in self.weights)


def sharded(rank, world_size, clip):
    model = Weights()
    fully_shard(model)
    optimizer = ShardedAdamW(model.named_parameters(), weight_decay=0.1, clip_norm=clip)
    norms = []
    for step in range(3):
        model(torch.tensor(1.5 + step)).backward()
        norms.append(optimizer.step(1e-2).item())
    return norms, [p.full_tensor().detach() for p in model.parameters()], optimizer.state_bytes()


@pytest.mark.dist
@pytest.mark.parametrize(("world_size", "clip"), [(1, 0.5), (2, 0.0), (3, 0.5)])
def test_sharded_adamw_equals_adamw_on_whole_tensors(world_size, clip):
    results = run_ranks(sharded, world_size, clip)
    model = Weights()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    expected = []
    for step in range(3):
        model(torch.tensor(1.5 + step)).backward()
        limit = clip or float("inf")
        expected.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        adamw.step()
        adamw.zero_grad()
    for norms, whole, _ in results:
        assert norms == pytest.approx(expected, rel=1e-12)
        for found, parameter in zip(whole, model.parameters()):
            torch.testing.assert_close(found, parameter.detach(), rtol=1e-12, atol=1e-14)
    moments = sum(state_bytes for *_, state_bytes in results)
    assert moments >= 2 * 8 * sum(p.numel() for p in model.parameters())


def norm_of_mixture(rank, world_size):
    """Sharded and plain parameters together."""
    model = Weights()
    fully_shard(model)
    model(torch.tensor(2.0)).backward()
    plain = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    plain.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    return global_norm([*model.parameters(), plain]).item()


@pytest.mark.dist
def test_norm_counts_every_gradient_once():
    model = Weights()
    model(torch.tensor(2.0)).backward()
    squares = sum(p.grad.square().sum().item() for p in model.parameters())
    assert run_ranks(norm_of_mixture, 2) == pytest.approx([(squares + 25.0) ** 0.5] * 2)


def clipped_to_zero(rank, world_size):
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([float("nan"), 1.0])
    norm = ShardedAdamW([("weight", weight)], clip_norm=1.0).step(0.1)
    return bool(torch.isnan(norm)), dist.get_world_size()


@pytest.mark.dist
def test_nan_gradients_show_in_the_norm():
    assert run_ranks(clipped_to_zero, 1) == [(True, 1)]


def skipping(rank, world_size, dtype):
    """Whole state before a skipped step, after it, and after one more that is not."""
    model = Weights().to(dtype)
    fully_shard(model)
    optimizer = ShardedAdamW(model.named_parameters(), weight_decay=0.1, clip_norm=1.0)
    states = []
    for bad, skip in ((False, 0.0), (True, 1.0), (False, None)):
        model(torch.tensor(1.5)).backward()
        if bad:
            model.weights[0].grad.to_local().fill_(float("nan"))
        optimizer.step(1e-2, skip=skip if skip is None else torch.tensor(skip))
        named = {n: p.full_tensor() for n, p in optimizer.named_parameters.items()}
        named |= {
            f"{kind}.{n}": t.full_tensor() if hasattr(t, "full_tensor") else t
            for kind, tensors in optimizer.state_dict().items()
            for n, t in tensors.items()
        }
        states.append({name: value.detach().clone() for name, value in named.items()})
        assert all(p.grad is None for p in model.parameters())
    return states


def unskipped(dtype):
    model = Weights().to(dtype)
    optimizer = ShardedAdamW(model.named_parameters(), weight_decay=0.1, clip_norm=1.0)
    for _ in range(2):
        model(torch.tensor(1.5)).backward()
        optimizer.step(1e-2)
    return dict(optimizer.named_parameters)


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_skipped_step_changes_nothing_at_all(dtype):
    expected = unskipped(dtype)
    for before, skipped, after in run_ranks(skipping, 3, dtype):  # some ranks hold no row
        assert before.keys() == skipped.keys()
        assert all(torch.equal(skipped[name], before[name]) for name in before)
        steps = [value for name, value in after.items() if name.startswith("step.")]
        assert steps == [2.0] * len(SIZES)
        for name, value in expected.items():
            torch.testing.assert_close(after[name], value.detach(), rtol=1e-6, atol=1e-8)


def norm_under_both_cuts(rank, world_size):
    """Norms of the gradients, and of the same gradients whole; and their kinds of placement."""
    model, optimizer, _ = awkward_run(rank, world_size, {"shard": 2, "tp": 2}, seed=1)
    model.decoder(torch.tensor([3, 17, 30])).backward()
    kinds = {type(each).__name__ for p in optimizer.parameters for each in p.grad.placements}
    whole = [p.grad.full_tensor() for p in optimizer.parameters]
    return optimizer.norm().item(), torch.nn.utils.get_total_norm(whole).item(), kinds


@pytest.mark.dist
def test_norm_counts_what_is_cut_twice_once():
    for norm, whole, kinds in run_ranks(norm_under_both_cuts, 4):
        assert "_StridedShard" in kinds
        assert norm == pytest.approx(whole, rel=1e-12)


@pytest.mark.dist
def test_a_gradient_placed_otherwise_than_its_parameter_is_moved():
    expected = run_ranks(losses_of, 1, {"shard": 1})[0]
    for losses in run_ranks(losses_of, 2, {"tp": 2}):
        assert losses == pytest.approx(expected, rel=1e-9)


def losses_of(rank, world_size, mesh):
    model, optimizer, _ = awkward_run(rank, world_size, mesh, seed=1)
    return train_steps(model, optimizer, range(6))


def test_parameters_without_a_gradient_keep_their_state():
    used, unused = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = ShardedAdamW({"used": used, "unused": unused}.items(), weight_decay=0.5)
    used.grad = torch.ones(2, 2)
    optimizer.step(0.1)
    assert torch.equal(unused, torch.ones(2, 2)) and not torch.equal(used, torch.ones(2, 2))
    steps = optimizer.state_dict()["step"]
    assert (steps["used"], steps["unused"]) == (1.0, 0.0)


def test_a_step_on_cuda_reads_nothing_back():
    with FakeTensorMode():  # reading a fake value raises
        named = {
            "matrix": nn.Parameter(torch.ones(3, 2, device="cuda")),
            "half": nn.Parameter(torch.ones(4, device="cuda", dtype=torch.bfloat16)),
        }
        optimizer = ShardedAdamW(named.items(), weight_decay=0.1, clip_norm=1.0)
        for parameter in named.values():
            parameter.grad = torch.ones_like(parameter)
        norm = optimizer.norm()
        optimizer.step(1e-3, skip=(norm > 3.0).float(), norm=norm)
        kinds = optimizer.state_dict()
        assert kinds["exp_avg"]["half"].dtype == torch.bfloat16
        assert kinds["step"]["matrix"].device.type == norm.device.type == "cuda"
