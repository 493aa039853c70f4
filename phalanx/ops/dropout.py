"""Dropout whose mask depends on what is dropped, not on who computes it.

Legend: S rows, D channels.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

_MIX = 0x2545F4914F6CDD1D


@dataclass(frozen=True)
class DropoutKey:
    """What a dropout mask depends on, besides the name of its module.

    Args:
        seed: of the run.
        step: optimizer step.
        tokens_S: index of each row in the global batch of this step, int64.
    """

    seed: int
    step: int
    tokens_S: Tensor


def keyed_dropout(
    x_SD: Tensor, probability: float, key: DropoutKey, name: str, *, first_channel: int = 0
) -> Tensor:
    """x with elements zeroed at `probability` and the rest scaled by 1 / (1 - probability).

    The mask is a function of (seed, step, name, global token, channel): the same under every
    sharding, order of micro-batches and recomputation. `first_channel`: of the whole tensor, where
    `x_SD` is the part of it that a rank holds.
    """
    digest = hashlib.sha256(f"{key.seed}/{key.step}/{name}".encode()).digest()
    base = int.from_bytes(digest[:7], "little")
    channels = torch.arange(first_channel, first_channel + x_SD.shape[-1], device=x_SD.device)
    rows = mixed(key.tokens_S.to(x_SD.device) + base)
    uniform = (mixed(rows[:, None] + channels * _MIX) >> 11) & ((1 << 52) - 1)
    kept = uniform >= int(probability * (1 << 52))
    return x_SD * kept.to(x_SD.dtype) / (1.0 - probability)


def mixed(x: Tensor) -> Tensor:
    """A 64-bit finaliser (xor-shift, multiply), wrapping like unsigned arithmetic."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & ((1 << 33) - 1))
