"""Bytes of gradients that are added up: by hand, and as autograd adds them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.cost.step_memory import Unit, units_of
from phalanx.cost.step_sums import Moved, summed_rows, summed_twice, summed_units
from phalanx.cost.step_work import Workload
from phalanx.mesh import Mesh
from phalanx.models.decoder import Decoder
from phalanx.models.lora import inject
from phalanx.models.spec import LoraSpec, small_config
from phalanx.ops.loss import counted_cross_entropy
from phalanx.registry import build

CONFIG = small_config(
    vocab_size=101, hidden_size=12, intermediate_size=20, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=6, dtype="bfloat16",
)  # fmt: skip
TOKENS, PSI = 10, 7.0
LORA = LoraSpec(rank=2, alpha=4.0)


def work(items=1.0, lora=None, **changes):
    given = {
        "tokens": TOKENS * items, "counted": 5.0 * items, "num_items": items, "row_tokens": TOKENS,
        "row_counted": 5, "longest_row": TOKENS, "document_tokens": TOKENS, "num_trained": 1,
        "lora_rank": lora.rank if lora else 0, "lora_targets": lora.targets if lora else (),
    }  # fmt: skip
    return Workload(**(given | changes))


def unit(**changes):
    """Of seven elements, all trained."""
    whole = {"rule": None, "stored": 2 * PSI, "gathered": 0.0, "trained": PSI, "num_trained": PSI}
    return Unit(**(whole | {"grad_itemsize": 2, "updated": PSI} | changes))


def sharded(**options):
    return build("data", {"name": "fsdp", **options}).rules()[-1]


@pytest.mark.parametrize(
    ("changes", "moved"),
    [
        # one rank: two later gradients of bfloat16 are added in place
        ({}, Moved(add=2 * 3 * 2 * PSI)),
        # sharded: three copies in float32, of which two are added to the first
        ({"rule": sharded()}, Moved(add_wide=2 * 3 * 4 * PSI, copy=3 * (2 + 4) * PSI)),
        # reduced after every micro-batch: shards are added up
        (
            {"rule": sharded(reduce_every_item=True), "updated": PSI / 2},
            Moved(add_wide=2 * 3 * 4 * PSI / 2),
        ),
        # replicas: packed into the buffer that is summed as well
        ({"is_summed": True}, Moved(add_wide=2 * 3 * 4 * PSI, copy=(3 + 1) * (2 + 4) * PSI)),
        # adapters in float32, which no reduction widens
        ({"is_summed": True, "grad_itemsize": 4}, Moved(add=2 * 3 * 4 * PSI, copy=8 * PSI)),
    ],
)
def test_gradients_of_three_micro_batches(changes, moved):
    assert summed_units([unit(**changes)], work(3.0), 4) == moved


def test_one_micro_batch_adds_nothing_up_and_copies_nothing_but_to_pack_it():
    alone = [unit(), unit(rule=sharded()), unit(rule=sharded(reduce_every_item=True))]
    assert summed_units(alone, work(1.0), 4) == Moved()
    assert summed_units([unit(is_summed=True)], work(1.0), 4) == Moved(copy=6 * PSI)


def test_a_mean_of_one_and_a_quarter_copies_in_a_quarter_of_the_steps():
    found = summed_units([unit(rule=sharded())], work(1.25), 4)
    assert found == Moved(add_wide=0.25 * 12 * PSI, copy=0.25 * 2 * 6 * PSI)


def test_kinds_are_priced_at_rates_of_their_own():
    rates = {"add": 2.0, "add.wide": 4.0, "copy": 8.0}
    assert Moved(add=1.0, add_wide=2.0, copy=3.0).seconds(rates) == 0.5 + 0.5 + 0.375


def test_only_a_trained_matrix_that_is_embedding_and_head_has_two_gradients():
    twice = summed_twice(CONFIG, work(2.5))
    assert CONFIG.tied_head and twice == Moved(add=2.5 * 3 * 2 * 101 * 12)
    assert summed_twice(CONFIG, work(2.5, LORA)) == Moved()
    assert summed_twice(replace(CONFIG, tied_head=False), work(2.5)) == Moved()


class _Adds(TorchDispatchMode):
    """Counts additions of two tensors by their shape."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        if packet in (torch.ops.aten.add, torch.ops.aten.add_) and len(args) > 1:
            if isinstance(args[1], torch.Tensor) and args[0].shape == args[1].shape:
                self.counts[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def added(config, lora, items=1):
    """Sums that autograd makes in the backward passes of some micro-batches, by shape."""
    torch.manual_seed(0)
    model = Decoder(config)
    model.requires_grad_(True)
    if lora is not None:
        inject(model, lora)
    ids_S, counted, adds = torch.arange(TOKENS), torch.arange(5), _Adds()
    for _ in range(items):
        hidden = model(ids_S)
        loss = counted_cross_entropy(
            hidden, model.head_weight, counted, ids_S[:5], num_counted_global=5
        )
        with adds:
            loss.backward()
    return adds.counts


@pytest.mark.parametrize("lora", [None, LORA, LoraSpec(rank=2, alpha=4.0, targets=("down_proj",))])
def test_autograd_adds_rows_as_often_as_counted(lora):
    rows = added(CONFIG, lora)[TOKENS, CONFIG.hidden_size]
    said = sum(summed_rows(CONFIG, work(lora=lora)).values())
    assert rows > 0 and said == rows * 3 * 2 * TOKENS * CONFIG.hidden_size


def test_autograd_adds_the_tied_matrix_once_more_in_every_micro_batch():
    """Once for both ends of two micro-batches each, and once for the second micro-batch."""
    shape, step = (101, 12), work(2.0)
    alone = units_of(CONFIG, step, [], Mesh(replicate=1), 2)
    said = summed_units(alone, step, 4).plus(summed_twice(CONFIG, step))
    counts = added(CONFIG, None, items=2)
    assert counts[shape] == 3
    weights = sum(u.num_trained for u in alone)
    assert said == Moved(add=3 * 2 * (weights + 2 * 101 * 12))
