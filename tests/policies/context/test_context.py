"""Context parallelism: how many bytes attention exchanges, and what runs beside it."""

from __future__ import annotations

from collections import Counter

import pytest

from phalanx.action import Collective, Compute, Send
from phalanx.check import check_program
from phalanx.cost import collectives, context_formulas
from phalanx.cost.table import TableCost
from phalanx.drive import drive
from phalanx.errors import PhalanxError
from phalanx.job import load_job
from phalanx.lower import lower
from phalanx.lower.attention_exchange import most_wanted
from phalanx.mesh import Mesh
from phalanx.models.spec import small_config
from phalanx.planner.make import make_plan
from phalanx.planner.work import model_work
from phalanx.registry import build
from phalanx.worlds.sim import SimWorld

LAYERS, HEADS, KV_HEADS, CHANNELS, WIDTH = 3, 8, 4, 6, 10
TOKENS = (24, 16)
SIZE = 2  # bfloat16; sums of gradients are float32
CONFIG = small_config(
    vocab_size=13, hidden_size=WIDTH, intermediate_size=16, num_layers=LAYERS, num_heads=HEADS,
    num_kv_heads=KV_HEADS, head_dim=CHANNELS, full_every=1, dtype="bfloat16",
)  # fmt: skip
NAMES = ("ring", "all_gather", "ulysses")


def program_of(*specs, axes=None, schedule="gpipe", config=CONFIG, tokens=TOKENS, grain="operator"):
    mesh = Mesh(axes or {"cp": 2})
    built = [build(family, options) for family, options in specs]
    program = lower(
        model_work(config, tokens), mesh, build("pipeline", schedule), built, grain=grain
    )
    check_program(program)
    return program


def counted(program, axis="cp", phases="FB"):
    """(kind, phase, bytes) -> how often."""
    return Counter(
        (a.collective, a.phase, a.payload_bytes)
        for a in program.of(0)
        if isinstance(a, Collective) and a.axis == axis and a.phase in phases
    )


def wire_bytes(program, degree, phase):
    """Bytes that a rank sends in all passes of a phase."""
    return sum(
        times * collectives.wire_bytes(kind, payload, degree)
        for (kind, _, payload), times in counted(program, phases=phase).items()
    )


def sizes():
    """What the formulas take: tokens, key and value heads, channels, bytes of an element."""
    return (sum(TOKENS), KV_HEADS, CHANNELS, SIZE)


@pytest.mark.parametrize("degree", [2, 4])
def test_gathered_keys_and_values_are_those_of_the_row_once_a_layer(degree):
    """DOI 10.1145/3695053.3731410, section 4: 2 seq kv_heads dim size (cp - 1)/cp."""
    program = program_of(("context", "all_gather"), axes={"cp": degree})
    expected = Counter()
    for tokens in TOKENS:
        whole = 2 * tokens * KV_HEADS * CHANNELS
        expected["all_gather", "F", whole * SIZE] += LAYERS
        expected["reduce_scatter", "B", whole * 4] += LAYERS
    assert counted(program) == expected
    received = 2 * sum(TOKENS) * KV_HEADS * CHANNELS * SIZE * (degree - 1) / degree
    assert wire_bytes(program, degree, "F") == LAYERS * received


@pytest.mark.parametrize("degree", [2, 4])
def test_a_ring_sends_what_its_formula_says(degree):
    """arXiv 2310.01889: forward (N-1) 2 c g D e; backward the same again, and
    gradients in float32 without the hop that our rank's own part is spared."""
    program = program_of(("context", "ring"), axes={"cp": degree})
    forward = LAYERS * context_formulas.ring_bytes(degree, *sizes())
    assert wire_bytes(program, degree, "F") == forward
    assert wire_bytes(program, degree, "B") == forward * (1 + 4 / SIZE)


@pytest.mark.parametrize("degree", [2, 4])
def test_heads_are_exchanged_for_tokens_and_back(degree):
    program = program_of(("context", "ulysses"), axes={"cp": degree})
    tokens, *rest = sizes()
    expected = LAYERS * context_formulas.ulysses_bytes(degree, tokens, HEADS, *rest)
    for phase in "FB":
        assert wire_bytes(program, degree, phase) == expected
    kinds = Counter((kind, phase) for kind, phase, _ in counted(program).elements())
    assert kinds == {("all_to_all", phase): 2 * LAYERS * len(TOKENS) for phase in "FB"}


def test_key_heads_that_are_fewer_than_ranks_are_sent_to_each_that_needs_them():
    few = small_config(
        vocab_size=13, hidden_size=WIDTH, intermediate_size=16, num_layers=1, num_heads=HEADS,
        num_kv_heads=2, head_dim=CHANNELS, full_every=1, dtype="bfloat16",
    )  # fmt: skip
    program = program_of(("context", "ulysses"), axes={"cp": 4}, config=few, tokens=(8,))
    entering = (HEADS + 2 * 4) * 2 * CHANNELS * SIZE  # two tokens of a rank
    leaving = HEADS * 2 * CHANNELS * SIZE
    assert set(counted(program)) == {
        ("all_to_all", phase, size) for phase in "FB" for size in (entering, leaving)
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_computes_its_tokens_only(name):
    alone = lower(model_work(CONFIG, TOKENS), Mesh(cp=1), build("pipeline", "gpipe"))
    shared = program_of(("context", name), axes={"cp": 4})

    def computes(program):
        found = [a for a in program.of(0) if isinstance(a, Compute) and a.op != "optimizer"]
        return [(a.label, a.flops, a.num_tokens) for a in found]

    quarter = [(label, flops / 4, tokens // 4) for label, flops, tokens in computes(alone)]
    assert computes(shared) == quarter


@pytest.mark.parametrize("name", NAMES)
def test_tensor_parallel_ranks_exchange_the_heads_that_they_have(name):
    whole = program_of(("context", name))
    split = program_of(("context", name), ("tensor", "megatron"), axes={"cp": 2, "tp": 2})
    halves = Counter(
        {(kind, phase, size / 2): n for (kind, phase, size), n in counted(whole).items()}
    )
    assert counted(split) == halves
    tokens = {a.payload_bytes for a in split.of(0) if getattr(a, "axis", "") == "tp" and a.phase}
    assert tokens == {count // 2 * WIDTH * SIZE for count in TOKENS}, "of this rank's tokens"


def test_stages_send_one_another_their_own_tokens():
    program = program_of(("context", "ring"), axes={"pp": 2, "cp": 2}, schedule="1f1b")
    sent = [a.payload_bytes for a in program.of(0) if isinstance(a, Send)]
    assert sent == [count // 2 * WIDTH * SIZE for count in TOKENS]


def test_two_axes_share_a_row_by_heads_and_by_places():
    """Ulysses inside a ring (USP): each exchange has its own axis and its own bytes."""
    heads = {"name": "ulysses", "axis": "heads"}
    program = program_of(
        ("context", heads), ("context", "ring"), axes={"cp": 2, "heads": 2}, tokens=(16,)
    )
    own = 4
    inside = counted(program, "heads")
    assert inside == {
        ("all_to_all", phase, count * own * CHANNELS * SIZE): LAYERS
        for phase in "FB"
        for count in (HEADS + 2 * KV_HEADS, HEADS)
    }
    # of twice the tokens, half of the heads
    around = wire_bytes(program, 2, "F")
    assert around == LAYERS * 2 * own * KV_HEADS * CHANNELS * SIZE


@pytest.mark.parametrize("name", ["ring", "all_gather"])
def test_layers_with_a_window_exchange_what_is_seen_of_other_ranks(name):
    """Two chunks of a rank each give window - 1 tokens to the chunk behind them."""
    windowed = small_config(
        vocab_size=13, hidden_size=WIDTH, intermediate_size=16, num_layers=LAYERS, num_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=CHANNELS, window=4, full_every=LAYERS, dtype="bfloat16",
    )  # fmt: skip
    axes, tokens = {"cp": 4}, (64,)
    found = counted(program_of(("context", name), axes=axes, config=windowed, tokens=tokens))
    halo = 2 * (4 - 1) * 2 * KV_HEADS * CHANNELS
    for phase, size in (("F", SIZE), ("B", 4)):
        assert found["all_to_all", phase, halo * size] == LAYERS - 1
    whole = program_of(
        ("context", {"name": name, "halo": False}), axes=axes, config=windowed, tokens=tokens
    )
    assert counted(whole) == counted(program_of(("context", name), axes=axes, tokens=tokens))


@pytest.mark.parametrize(
    ("layout", "tokens"), [("contiguous", 3), ("head_tail", 6), ("striped", 3 * 16)]
)
def test_a_halo_is_as_thin_as_its_layout_lets_it_be(layout, tokens):
    """Of 16 tokens a rank, window 4: the others see some of it at one edge, at two, everywhere."""
    assert most_wanted(layout, 4, 64, 4) == tokens


def step_s(name, exchange_s):
    """Seconds of a step whose computes take 1 s each and whose exchanges take `exchange_s`."""
    program = program_of(("context", name), tokens=(8,))
    kinds = ("all_gather", "reduce_scatter", "all_to_all")
    cost = TableCost(dict.fromkeys(kinds, exchange_s), missing_s=1.0)
    trace = drive(SimWorld(program.mesh, cost), program=program)
    return float((trace.column("start_s") + trace.column("dur_s")).max())


def test_a_ring_hides_behind_attention_what_a_gather_shows():
    computes = step_s("all_gather", 0.0)
    assert step_s("all_gather", 0.25) == computes + 0.25 * 2 * LAYERS
    assert step_s("ring", 0.25) == computes, "a gather and a scatter take half of an attention"
    assert step_s("ring", 0.5) == computes
    # each attention's two exchanges of the backward pass take a second longer than it
    assert step_s("ring", 1.0) == computes + LAYERS


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_layout_is_refused_with_the_nearest(name):
    with pytest.raises(PhalanxError) as caught:
        build("context", {"name": name, "layout": "head_tails"})
    assert caught.value.code == "plan/illegal" and "head_tail" in caught.value.legal


@pytest.mark.parametrize("name", NAMES)
def test_units_show_their_exchanges_as_blocks_do(name):
    fine, coarse = (program_of(("context", name), grain=grain) for grain in ("operator", "unit"))
    assert counted(fine) == counted(coarse)


def test_a_plan_prices_what_goes_over_several_axes_at_once():
    """Gradients are summed over data and context ranks together, on the slowest of their links."""
    flags = {"model.name": "toy", "data.source": "none", "train.item_tokens": [16, 16]}
    flags |= {"plan.mesh": {"shard": 2, "cp": 2}, "plan.data": "fsdp", "plan.context": "ring"}
    planned = make_plan(load_job(None, flags), CONFIG, on="4xh100")
    trace = drive(SimWorld(planned.program.mesh, planned.cost), program=planned.program)
    rows = dict(zip(trace.column("axis").tolist(), trace.column("dur_s").tolist()))
    assert rows["cp"] > 0.0 and rows["shard_cp"] > 0.0 and "shard" not in rows


def test_a_dtype_that_does_not_exist_is_refused_by_name():
    with pytest.raises(PhalanxError) as caught:
        build("context", {"name": "all_gather", "reduce_dtype": "bf16"})
    assert caught.value.code == "job/bad-value" and "bfloat16" in caught.value.legal
