"""Megatron tensor parallelism: what is exchanged, how often, and under which handles."""

from __future__ import annotations

from collections import Counter
from math import ceil

import pytest

from phalanx.action import Alloc, Collective, Compute, Send
from phalanx.check import check_program
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.models.spec import small_config
from phalanx.planner.work import model_work
from phalanx.policies.data.fsdp import Fsdp
from phalanx.policies.tensor.megatron import Megatron
from phalanx.registry import build
from phalanx.workload import toy_work
from phalanx.worlds.sim import SimWorld

WIDTH, ITEM = 6, 8
TOKENS = (5, 3)
SEQUENCE, KEPT = (
    Megatron(sequence_parallel=True),
    Megatron(sequence_parallel=True, gather_twice=False),
)

CONFIG = small_config(
    vocab_size=13, hidden_size=10, intermediate_size=14, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=6,
)  # fmt: skip


def program_of(spec, num_layers=3, axes=None, data=(), schedule="gpipe", **work):
    mesh = Mesh(axes or {"tp": 2})
    toy = toy_work(num_layers, TOKENS, WIDTH, itemsize=ITEM, **work)
    return lower(toy, mesh, build("pipeline", schedule), [spec, *data])


def counted(program, rank=0, axis="tp"):
    """(kind, bytes) -> how often."""
    return Counter(
        (a.collective, a.payload_bytes)
        for a in program.of(rank)
        if isinstance(a, Collective) and a.axis == axis
    )


@pytest.mark.parametrize("degree", [2, 3])
def test_a_layer_takes_four_reductions_of_its_activations(degree):
    expected = {("all_reduce", n * WIDTH * ITEM): 4 * 3 for n in TOKENS}
    assert counted(program_of(Megatron(), axes={"tp": degree})) == expected


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize(("spec", "gathers"), [(SEQUENCE, 6), (KEPT, 4)])
def test_sequence_parallelism_exchanges_padded_tokens(spec, gathers, degree):
    expected = Counter()
    for n in TOKENS:
        padded = ceil(n / degree) * degree * WIDTH * ITEM
        expected["all_gather", padded] += gathers * 3
        expected["reduce_scatter", padded] += 4 * 3
    assert counted(program_of(spec, axes={"tp": degree})) == expected


def test_sequence_parallelism_sends_the_same_bytes_as_reductions():
    """arXiv 2205.05198, section 4.2.2: 4 gathers, 4 scatters, ring volume of 4 all-reduces."""

    def wire_bytes(spec):
        program = lower(toy_work(3, (8,), WIDTH), Mesh(tp=4), build("pipeline", "gpipe"), [spec])
        trace = drive(SimWorld(program.mesh, TableCost({}, missing_s=1.0)), program=program)
        return trace.where(rank=0).column("wire_bytes").sum()

    assert wire_bytes(KEPT) == wire_bytes(Megatron()) == 3 * 8 * 8 * WIDTH * 4 * 3 / 4


def test_split_tokens_divide_messages_and_saved_activations():
    axes = {"pp": 2, "tp": 2}
    whole, split = (program_of(spec, 4, axes, schedule="1f1b") for spec in (Megatron(), SEQUENCE))

    def sizes(program, kind, field):
        return [getattr(a, field) for a in program.of(0) if isinstance(a, kind)]

    assert sizes(whole, Send, "payload_bytes") == [n * WIDTH * ITEM for n in TOKENS]
    assert sizes(split, Send, "payload_bytes") == [ceil(n / 2) * WIDTH * ITEM for n in TOKENS]
    per_token = 2 * 2 * 5 * WIDTH * ITEM  # 2 layers of 2 blocks keep 5 widths
    assert sizes(split, Alloc, "num_bytes") == [ceil(n / 2) * per_token for n in TOKENS]


def test_the_first_gather_turns_what_enters_a_stage_into_what_leaves_it():
    program = program_of(SEQUENCE, 4, {"pp": 2, "tp": 2}, schedule="1f1b", blocks_per_layer=1)
    gathers = {a.label: a for a in program.of(2) if a.operator == "all_gather"}

    def handles(label):
        return gathers[label].tensor, gathers[label].into

    assert handles("1F0/layers.2.0.mlp@tp<") == ("act:0.0", "act:1.0")
    assert handles("1F0/layers.3.0.mlp@tp<") == ("act:1.0", "")
    # the last block's backward pass starts from the output; then the gradient flows in place
    assert handles("1B0/layers.3.0.mlp@tp<") == ("act:1.0", "grad:1.0")
    assert handles("1B0/layers.2.0.mlp@tp<") == ("grad:1.0", "")
    kept = "input:layers.2.0.mlp.0"
    assert handles("1B0/layers.2.0.mlp@tp<1") == (kept, f"{kept}/whole")


def test_the_loss_waits_for_the_sum_of_the_output():
    program = program_of(Megatron(), 2, blocks_per_layer=1)
    first = next(a for a in program.of(0) if a.label == "0B1/layers.1.0.mlp")
    assert "0F1/layers.1.0.mlp@tp" in first.after


def test_a_gradient_buffer_is_not_touched_while_it_is_reduced():
    data = Fsdp(reduce_every_item=True)
    program = program_of(Megatron(), 2, {"shard": 2, "tp": 2}, [data], blocks_per_layer=1)
    again = next(a for a in program.of(0) if a.label == "0B1/layers.1.0.mlp")
    assert "reduce:layers.1:0" in again.after


@pytest.mark.parametrize(
    "spec", [Megatron(), SEQUENCE, Megatron(sequence_parallel=True, vocabulary_parallel=False)]
)
def test_partial_gradients_of_a_decoder_are_summed_once_a_step(spec):
    config = CONFIG
    work = model_work(config, TOKENS)
    mesh = Mesh(shard=2, tp=2)
    program = lower(work, mesh, build("pipeline", "gpipe"), [Fsdp(units="model.layers.*"), spec])
    check_program(program)
    *_, last = [a for a in program.of(0) if isinstance(a, Collective)]
    assert last.label == "reduce:partial@tp" and last.collective == "all_reduce"
    reductions = {a.label for a in program.of(0) if a.label.startswith("reduce:")}
    assert set(last.after) == reductions - {last.label}
    optimizer = program.of(0)[-1]
    assert isinstance(optimizer, Compute) and last.label in optimizer.after
    heads = sum(2 * ceil(config.attention(at).head_dim / 2) for at in range(config.num_layers))
    if not spec.sequence_parallel:
        assert last.payload_bytes == heads * work.grad_bytes
    else:  # everything that is not cut: norms, and the embedding where it is whole
        norms = (4 * config.num_layers + 1) * ceil(config.hidden_size / 2)
        table = ceil(config.vocab_size / 2) * config.hidden_size
        whole = 0 if spec.vocabulary_parallel else table
        assert last.payload_bytes == (heads + norms + whole) * work.grad_bytes


@pytest.mark.parametrize(
    ("spec", "forward", "backward"),
    [
        (Megatron(), ["all_reduce"], ["all_reduce"]),
        (KEPT, ["reduce_scatter", "all_gather"], ["all_reduce", "all_gather"]),
        (Megatron(vocabulary_parallel=False), [], []),
    ],
)
def test_a_split_vocabulary_exchanges_rows_at_both_ends(spec, forward, backward):
    """Forward: the embedding's output, the head's input; backward: their gradients."""
    program = lower(model_work(CONFIG, (6,)), Mesh(tp=2), build("pipeline", "gpipe"), [spec])
    ends = ("model.embed_tokens", "model.norm")
    for phase, kinds in (("F", forward), ("B", backward)):
        found = [
            a for a in program.of(0)
            if isinstance(a, Collective) and a.layer in ends and a.phase == phase
        ]  # fmt: skip
        assert [a.collective for a in found] == kinds
        assert {a.payload_bytes for a in found} <= {6 * CONFIG.hidden_size * 2}


def test_a_split_vocabulary_divides_the_products_of_the_head():
    def head_flops(spec):
        program = lower(model_work(CONFIG, (6,)), Mesh(tp=2), build("pipeline", "gpipe"), [spec])
        of_head = (a for a in program.of(0) if isinstance(a, Compute) and a.layer == "model.norm")
        return next(of_head).flops

    assert head_flops(Megatron()) == head_flops(Megatron(vocabulary_parallel=False)) / 2
