"""Exchanges of activations over a tensor axis, against published traffic."""

import pytest

from phalanx.cost.exchanges import exchange_counts
from phalanx.models.named import named_model
from phalanx.registry import build

GEMMA = named_model("gemma-4-31b").config
TOKENS = 3072


def test_tensor_exchanges_of_a_published_run():
    """Gemma 4 31B with recomputation: 6 x 60 x s x 5376 x 2 B = 11.9 GB (arXiv 2605.25645)."""
    megatron = build("tensor", {"name": "megatron"})
    counts = exchange_counts(GEMMA, [megatron], "full")
    assert counts == {"all_reduce": 6 * 60 + 2}  # and one each for embedding and head
    assert 360 * TOKENS * 5376 * 2 == pytest.approx(11.9e9, rel=0.01)
    plain = exchange_counts(GEMMA, [megatron], "none")
    assert plain == {"all_reduce": 4 * 60 + 2}  # arXiv 1909.08053, section 3
    options = {"name": "megatron", "sequence_parallel": True, "gather_twice": False}
    splits = exchange_counts(GEMMA, [build("tensor", options)], "none")
    assert (
        splits["reduce_scatter"] == 4 * 60 / 1 + 1
    )  # arXiv 2205.05198: the ring's volume is the same
    assert splits["all_gather"] == 4 * 60 + 2
