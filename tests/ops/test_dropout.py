"""Dropout depends on seed, step, name and global token, on nothing else."""

from __future__ import annotations

import pytest
import torch

from phalanx.ops.dropout import DropoutKey, keyed_dropout


def mask(tokens, *, seed=1, step=2, name="m", channels=64, probability=0.3):
    key = DropoutKey(seed, step, torch.as_tensor(tokens))
    return keyed_dropout(torch.ones(len(tokens), channels), probability, key, name)


def test_mask_of_a_token_does_not_depend_on_its_neighbours():
    tokens = torch.arange(100)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    whole, shuffled = mask(tokens), mask(order)
    assert torch.equal(whole[order], shuffled)
    assert torch.equal(whole[37:52], mask(tokens[37:52]))


@pytest.mark.parametrize("other", [{"seed": 2}, {"step": 3}, {"name": "n"}])
def test_mask_changes_with_seed_step_and_name(other):
    tokens = torch.arange(50)
    assert (mask(tokens) != mask(tokens, **other)).float().mean() > 0.2


@pytest.mark.parametrize("probability", [0.05, 0.3, 0.9])
def test_dropped_share_and_mean_are_those_asked_for(probability):
    kept = mask(torch.arange(4000), channels=50, probability=probability)
    dropped = (kept == 0).float()
    # 200,000 draws: three standard deviations are below 0.0035
    assert dropped.mean().item() == pytest.approx(probability, abs=0.0035)
    assert dropped.mean(0).sub(probability).abs().max() < 0.05
    assert dropped.mean(1).sub(probability).abs().max() < 0.35
    assert kept.unique().tolist() == pytest.approx([0.0, 1 / (1 - probability)])


def test_neighbouring_tokens_and_channels_are_uncorrelated():
    dropped = (mask(torch.arange(2000), channels=100, probability=0.5) == 0).double() - 0.5
    for a, b in ((dropped[1:], dropped[:-1]), (dropped[:, 1:], dropped[:, :-1])):
        assert abs((a * b).mean().item()) < 0.002  # 0.25 when equal, 0.0006 by chance


@pytest.mark.parametrize("degree", [2, 3])
def test_ranks_that_split_channels_drop_their_parts_of_one_mask(degree):
    """Inside a tensor-parallel region: masks of ranks differ, and are those of one process."""
    tokens, channels = torch.arange(40), 48 // degree
    key, ones = DropoutKey(1, 2, tokens), torch.ones(40, channels)
    parts = [
        keyed_dropout(ones, 0.3, key, "m", first_channel=rank * channels) for rank in range(degree)
    ]
    assert torch.equal(torch.cat(parts, 1), mask(tokens, channels=48))
    assert all((parts[0] != other).float().mean() > 0.2 for other in parts[1:])


def test_ranks_that_split_tokens_drop_what_belongs_to_their_tokens():
    """Outside of it, with sequence parallelism: each rank has other tokens, in head-tail order."""
    tokens = torch.arange(40)
    heads_tails = [torch.cat([tokens[:10], tokens[30:]]), tokens[10:30]]
    whole = mask(tokens)
    for own in heads_tails:
        assert torch.equal(mask(own), whole[own])
