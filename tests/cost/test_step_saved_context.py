"""Keys and values that ranks of a context axis keep of one another: by hand, and what they keep."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from phalanx.cost.step_saved import keys_kept, saved_bytes_per_token
from phalanx.cost.step_work import Workload
from phalanx.layout.context_part import ContextPart
from phalanx.models.spec import small_config
from phalanx.ops.context_gather import GatheredAttention, WantedAttention
from phalanx.registry import build
from tests.ranks import run_ranks

RANKS, OWN, WINDOW = 2, 12, 4
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 6, 4
CONFIG = small_config(
    vocab_size=101, hidden_size=12, intermediate_size=20, num_layers=LAYERS, num_heads=HEADS,
    num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, window=WINDOW, full_every=2, dtype="bfloat16",
)  # fmt: skip
KEYS = 2 * KV_HEADS * HEAD_DIM * 2  # bytes of a token's keys and values


def saved(recompute="none", **kept):
    work = Workload(
        tokens=RANKS * OWN, counted=1.0, num_items=1.0, row_tokens=RANKS * OWN, row_counted=1,
        longest_row=RANKS * OWN, document_tokens=RANKS * OWN, num_trained=1, context_degree=RANKS,
        **kept,
    )  # fmt: skip
    return saved_bytes_per_token(CONFIG, work, recompute)


@pytest.mark.parametrize(
    ("name", "options", "kept"),
    [
        ("all_gather", {"halo": False}, (True, False)),
        ("all_gather", {}, (True, True)),
        ("ring", {}, (False, True)),
        ("ring", {"halo": False}, (False, False)),
        ("ulysses", {}, (False, False)),
    ],
)
def test_rules_say_what_is_kept(name: str, options: Mapping[str, object], kept: tuple[bool, bool]):
    fsdp = build("data", "fsdp")
    assert keys_kept([fsdp, build("context", {"name": name, **options})]) == kept


def test_no_context_axis_keeps_nothing_of_others():
    assert keys_kept([build("data", "fsdp")]) == (False, False)


def test_every_layer_keeps_the_other_ranks_keys_and_windows_what_they_see():
    windows = sum(kind.window is not None for kind in map(CONFIG.attention, range(LAYERS)))
    assert 0 < windows < LAYERS
    others = RANKS - 1
    seen = 2 * (WINDOW - 1) / OWN  # tokens of others for each of its own
    plain = saved()
    assert saved(gathers_keys=True) - plain == LAYERS * others * KEYS
    assert saved(windows_seen=True) - plain == pytest.approx(windows * seen * KEYS)
    both = saved(gathers_keys=True, windows_seen=True) - plain
    assert both == pytest.approx(((LAYERS - windows) * others + windows * seen) * KEYS)


def test_layers_that_are_computed_again_keep_the_keys_of_one():
    plain = saved("full")
    assert saved("full", gathers_keys=True) - plain == (RANKS - 1) * KEYS


def kept_bytes(rank: int, world_size: int, kind: str) -> int:
    """Of what attention keeps, keys and values."""
    part = ContextPart.of_row("head_tail", rank, world_size, (0,), world_size * OWN)
    group = torch.distributed.group.WORLD
    q_cHC = torch.randn(OWN, HEADS, HEAD_DIM, dtype=torch.bfloat16).requires_grad_()
    k_cKC, v_cKC = (
        torch.randn(OWN, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16).requires_grad_()
        for _ in range(2)
    )
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if kind == "gathered":
            GatheredAttention.apply(q_cHC, k_cKC, v_cKC, part, group, 1.0, None, None)
        else:
            WantedAttention.apply(q_cHC, k_cKC, v_cKC, part, group, 1.0, WINDOW)
    return sum(each.nbytes for each in kept if each.dim() == 3 and each.shape[1] == KV_HEADS)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["gathered", "wanted"])
def test_ranks_keep_what_the_formula_counts(kind: str):
    """Own keys are counted with attention; of a window at most as many as its formula says."""
    for found in run_ranks(kept_bytes, RANKS, kind, backend="gloo"):
        others = found - OWN * KEYS
        if kind == "gathered":
            assert others == (RANKS - 1) * OWN * KEYS
        else:
            assert 0 < others <= 2 * (WINDOW - 1) * KEYS
