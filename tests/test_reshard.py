"""Laws of the reshard planner: exact bytes, no bit changed, nothing moved that is there."""

from __future__ import annotations

from collections import Counter
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.layout import Fused, Layout, Only, Shard
from phalanx.mesh import Mesh
from phalanx.reshard import Reshard, allocate_shards, apply_reshard, plan_reshard
from tests.strategies import layouts, meshes, shapes

ITEMSIZE = {"a": 4, "b": 2, "c": 4, "d": 4}


@st.composite
def problems(draw):
    """Two layout tables of four tensors (two alike, one other item size) on any two rank sets."""
    tables, pools = [], []
    shape, odd_shape = draw(shapes()), draw(shapes())
    for _ in range(2):
        mesh = draw(meshes())
        alike = draw(layouts(shape, mesh))
        odd = draw(layouts(odd_shape, mesh))
        tables.append({"a": alike, "b": alike, "c": odd, "d": alike})
        first = draw(st.sampled_from((0, 3, 100)))
        pools.append(draw(st.permutations(range(first, first + mesh.size))))
    host_of = draw(st.sampled_from((None, lambda rank: rank // 2, lambda rank: "one host")))
    return (*tables, *pools, host_of)


def plan(source, target, source_ranks, target_ranks, host_of) -> Reshard:
    return plan_reshard(
        source,
        target,
        ITEMSIZE,
        source_ranks=source_ranks,
        target_ranks=target_ranks,
        host_of=host_of,
    )


def whole_arrays(table: dict[str, Layout]) -> dict[str, np.ndarray]:
    """Random bits, NaNs included: equality below is of bits."""
    rng = np.random.default_rng(5)
    kinds = {2: np.uint16, 4: np.uint32}
    return {
        n: rng.integers(0, 2**16, layout.shape).astype(kinds[ITEMSIZE[n]])
        for n, layout in table.items()
    }


def shards_of(whole, table, ranks):
    return {
        rank: {n: p for n, layout in table.items() if (p := layout.take(whole[n], at)) is not None}
        for at, rank in enumerate(ranks)
    }


def resharded(reshard: Reshard, shards, target, target_ranks, whole):
    into = allocate_shards(
        target, lambda n, shape: np.full(shape, 7, whole[n].dtype), list(target_ranks)
    )
    apply_reshard(reshard, shards, into)
    return into


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for rank, arrays in expected.items():
        assert found[rank].keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[rank][name], array)


@settings(max_examples=80)
@given(problems())
def test_slice_move_slice_equals_slicing_the_original(problem):
    source, target, source_ranks, target_ranks, _ = problem
    whole = whole_arrays(source)
    shards = shards_of(whole, source, source_ranks)
    there = resharded(plan(*problem), shards, target, target_ranks, whole)
    assert_same(there, shards_of(whole, target, target_ranks))
    back = plan(target, source, target_ranks, source_ranks, None)
    assert_same(resharded(back, there, source, source_ranks, whole), shards)


@settings(max_examples=80)
@given(problems())
def test_every_target_element_is_fetched_once_and_only_if_missing(problem):
    source, target, source_ranks, target_ranks, _ = problem
    fetched = {(rank, n): np.zeros(target[n].shape, int) for rank in target_ranks for n in target}
    moved = {key: np.zeros_like(array) for key, array in fetched.items()}
    for t in plan(*problem).transfers():
        fetched[t.target, t.tensor][t.box] += 1
        if t.source != t.target:
            moved[t.target, t.tensor][t.box] += 1
    for (rank, name), count in fetched.items():
        wanted, owned = np.zeros_like(count), np.zeros_like(count)
        for canonical, _ in target[name].boxes(target_ranks.index(rank)):
            wanted[canonical] = 1
        if rank in source_ranks:
            for canonical, _ in source[name].boxes(source_ranks.index(rank)):
                owned[canonical] = 1
        np.testing.assert_array_equal(count, wanted)
        np.testing.assert_array_equal(moved[rank, name], wanted * (1 - owned))


@settings(max_examples=80)
@given(problems())
def test_totals_are_the_sums_of_the_transfers(problem):
    reshard = plan(*problem)
    sent, received, kept, links = Counter(), Counter(), Counter(), Counter()
    for t in reshard.transfers():
        size = prod(s.stop - s.start for s in t.box) * ITEMSIZE[t.tensor]
        assert t.num_bytes == size > 0
        if t.source == t.target:
            kept[t.source] += size
        else:
            sent[t.source] += size
            received[t.target] += size
            links[t.source, t.target] += size
    assert reshard.sent_bytes == sent and reshard.received_bytes == received
    assert reshard.kept_bytes == kept and reshard.link_bytes == links
    assert reshard.network_bytes == links.total() and reshard.local_bytes == kept.total()


@settings(max_examples=40)
@given(problems())
def test_transfers_of_a_rank_are_those_of_the_plan_in_the_same_order(problem):
    reshard = plan(*problem)
    every = list(reshard.transfers())
    for rank in {*problem[2], *problem[3]}:
        assert list(reshard.transfers(rank)) == [t for t in every if rank in (t.source, t.target)]


@settings(max_examples=40)
@given(problems())
def test_the_same_layout_moves_nothing(problem):
    source, _, ranks, _, host_of = problem
    reshard = plan(source, source, ranks, ranks, host_of)
    assert reshard.network_bytes == 0
    sizes = [
        layout.num_bytes(at, ITEMSIZE[n])
        for n, layout in source.items()
        for at in range(len(ranks))
    ]
    assert reshard.local_bytes == sum(sizes)


@settings(max_examples=60)
@given(problems())
def test_a_source_on_the_host_is_preferred(problem):
    source, target, source_ranks, target_ranks, _ = problem

    def host_of(rank: int) -> int:
        return rank // 3

    for t in plan(source, target, source_ranks, target_ranks, host_of).transfers():
        holders = [source_ranks[at] for at in source[t.tensor].owners(t.box)]
        if t.source != t.target:
            assert t.target not in holders
            near = [rank for rank in holders if host_of(rank) == host_of(t.target)]
            assert host_of(t.source) == host_of(t.target) or not near


@pytest.mark.parametrize("num_layers", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("num_receivers", [1, 3, 4, 6])
def test_replicas_send_alike_to_within_one_tensor(num_layers, num_receivers):
    source = Layout((6, 5), Mesh(replicate=4, tp=2), Shard(0, "tp"))
    target = Layout((6, 5), Mesh(dp=num_receivers))
    names = [f"layers.{i}" for i in range(num_layers)]
    reshard = plan_reshard(
        dict.fromkeys(names, source),
        dict.fromkeys(names, target),
        2,
        target_ranks=range(100, 100 + num_receivers),
    )
    sent = [reshard.sent_bytes.get(rank, 0) for rank in range(8)]
    assert sum(sent) == num_layers * num_receivers * 60
    assert max(sent) - min(sent) <= 30


def test_large_pieces_do_not_gather_on_one_replica():
    """Pieces of 2, 1, 2, 1 ... rows: taking turns in their order would send 8 and 4."""
    source = Layout((12,), Mesh(replicate=2))
    target = Layout((12,), Mesh(a=4, b=2), Shard(0, "a"), Shard(0, "b"))
    reshard = plan_reshard(source, target, 1, target_ranks=range(10, 18))
    assert reshard.sent_bytes == {0: 6, 1: 6}


def test_equal_layers_share_one_table():
    mesh = Mesh(shard=4)
    names = [f"layers.{i}" for i in range(126)]
    source = {name: Layout((8, 8), mesh, Shard(0, "shard"), name=name) for name in names}
    target = {name: Layout((8, 8), mesh, Shard(1, "shard"), name=name) for name in names}
    (moves,) = plan_reshard(source, target, 2).moves
    assert moves.tensors == tuple(names) and len(moves.num_bytes) == 16


@pytest.mark.parametrize(
    ("train", "generate", "fraction"),
    [
        ((1, 4, 2), (1, 2), 0.25),
        ((1, 8, 2), (1, 2), 0.375),
        ((2, 4, 2), (1, 2), 0.375),
        ((4, 8, 4), (1, 8), 3 / 32),
        ((2, 8, 1), (1, 4), 0.1875),
    ],
)
def test_hybrid_engine_receives_its_published_bytes_and_keeps_its_training_slice(
    train, generate, fraction
):
    """(d_g - 1) / (t p) of the weights per rank: HybridFlow, arXiv 2409.19256, Table 2."""
    (p, t, d), (p_g, t_g) = train, generate
    mesh = Mesh(dp=d, gen_pp=p_g, micro_pp=p // p_g, gen_tp=t_g, micro_tp=t // t_g)
    shape, num_layers = (32, 3), 8
    training, generation = {}, {}
    for layer in range(num_layers):
        stage = layer * p // num_layers
        at_stage = Only("gen_pp", stage // (p // p_g))
        training[f"layers.{layer}"] = Layout(
            shape,
            mesh,
            at_stage,
            Only("micro_pp", stage % (p // p_g)),
            Shard(0, "gen_tp", "micro_tp"),
        )
        generation[f"layers.{layer}"] = Layout(shape, mesh, at_stage, Shard(0, "gen_tp"))
    reshard = plan_reshard(training, generation, 2)
    model_bytes = num_layers * prod(shape) * 2
    assert set(reshard.received_bytes.values()) == {fraction * model_bytes}
    assert set(reshard.kept_bytes.values()) == {model_bytes / (p * t)}
    assert len(reshard.received_bytes) == len(reshard.kept_bytes) == mesh.size


def test_fused_serving_weights_are_written_in_place():
    """FSDP x TP training to TP serving with repeated key-value heads, qkv grouped, gate_up torn."""
    train, serve = Mesh(shard=3, tp=2), Mesh(tp=4)
    rows = {"q": 24, "k": 6, "v": 6, "gate": 20, "up": 20}
    units = {"q": 8, "k": 2, "v": 2, "gate": 20, "up": 20}
    source, target = (
        {
            n: Layout((size, 5), mesh, Shard(0, "tp", units=units[n], rule="repeat"), *more)
            for n, size in rows.items()
        }
        for mesh, more in ((train, (Shard(0, "shard"),)), (serve, ()))
    )
    whole = {n: np.random.default_rng(len(n)).normal(size=(size, 5)) for n, size in rows.items()}
    qkv = Fused({n: target[n] for n in ("q", "k", "v")}, granules=(6, 3, 3))
    gate_up = Fused({n: target[n] for n in ("gate", "up")}, granules=(1, 1))
    memory = {
        rank: [np.full(fused.local_shape(rank), np.nan) for fused in (qkv, gate_up)]
        for rank in range(4)
    }
    into = {rank: qkv.views(rank, a) | gate_up.views(rank, b) for rank, (a, b) in memory.items()}
    reshard = plan_reshard(source, target, 8)
    apply_reshard(reshard, shards_of(whole, source, range(6)), into)
    for rank, arrays in memory.items():
        for fused, array in zip((qkv, gate_up), arrays):
            assert not np.isnan(array).any()
            for tensor, canonical, local in fused.boxes(rank):
                np.testing.assert_array_equal(array[local], whole[tensor][canonical])


def test_torch_tensors_move_bit_exactly_into_fused_views():
    torch = pytest.importorskip("torch")
    bits = torch.arange(-90, 90, dtype=torch.int16).view(12, 15).view(torch.bfloat16)
    source = {n: Layout((12, 15), Mesh(shard=5), Shard(0, "shard")) for n in ("gate", "up")}
    target = {n: Layout((12, 15), Mesh(tp=2), Shard(0, "tp")) for n in ("gate", "up")}
    fused = Fused(target, granules=(3, 3))
    arrays = {rank: torch.zeros(fused.local_shape(rank), dtype=torch.bfloat16) for rank in (0, 1)}
    views = {rank: fused.views(rank, array) for rank, array in arrays.items()}
    reshard = plan_reshard(source, target, 2)
    apply_reshard(reshard, shards_of(dict.fromkeys(source, bits), source, range(5)), views)
    for rank, array in arrays.items():
        for _, canonical, local in fused.boxes(rank):
            assert torch.equal(array[local].view(torch.int16), bits[canonical].view(torch.int16))


def test_prefill_to_decode_moves_each_missing_kv_head_once():
    """KV [token, kv_head, channel], TP 2 with 4 heads each to TP 16 with every head twice."""
    shape = (37, 8, 16)
    heads = Shard(1, "tp", units=8, rule="repeat")
    prefill, decode = Layout(shape, Mesh(tp=2), heads), Layout(shape, Mesh(tp=16), heads)
    reshard = plan_reshard(prefill, decode, 2, target_ranks=range(2, 18))
    assert reshard.received_bytes == dict.fromkeys(range(2, 18), 37 * 16 * 2)
    assert reshard.sent_bytes == dict.fromkeys(range(2), 8 * 37 * 16 * 2)


def test_tables_that_do_not_match_are_refused():
    layout = Layout((4, 4), Mesh(tp=2), Shard(0, "tp"))
    with pytest.raises(PlanError, match="no such tensor; nearest legal values: k_proj"):
        plan_reshard({"k_proj": layout}, {"v_proj": layout}, 2)
    with pytest.raises(PlanError, match=r"q = \(4, 5\): the source has another shape"):
        plan_reshard({"q": layout}, {"q": Layout((4, 5), Mesh())}, 2)
    with pytest.raises(PlanError, match=r"source_ranks = 2: .* the pool has 3 ranks"):
        plan_reshard(layout, layout, 2, source_ranks=range(3))
    for ranks in ([5, 5], [-1, 0]):
        with pytest.raises(PlanError, match="must name each rank once"):
            plan_reshard(layout, layout, 2, target_ranks=ranks)
    with pytest.raises(PlanError, match="q: has no item size"):
        plan_reshard({"q": layout}, {"q": layout}, {"k": 2})


def test_nothing_to_move_is_a_plan_too():
    reshard = plan_reshard({}, {}, 2)
    assert reshard.network_bytes == reshard.local_bytes == 0 and not list(reshard.transfers())
