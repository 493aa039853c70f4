"""Laws of layouts: who holds what, against cuts made one element at a time."""

from __future__ import annotations

import json
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import JobError, PlanError
from phalanx.layout import Fused, Layout, Only, Shard
from phalanx.mesh import Mesh
from tests.strategies import layouts, meshes, shapes


@st.composite
def any_layout(draw) -> Layout:
    return draw(layouts(draw(shapes()), draw(meshes())))


def rows_by_hand(layout: Layout, rank: int, dim: int) -> list[int]:
    """Rows that a rank holds, by cutting a list of rows, one placement after the other."""
    rows = list(range(layout.shape[dim]))
    for shard in layout.placements:
        if not isinstance(shard, Shard) or shard.dim != dim:
            continue
        unit = 1 if shard.units is None else max(1, layout.shape[dim] // shard.units)
        units = [rows[i : i + unit] for i in range(0, len(rows), unit)]
        at, degree = 0, 1
        for axis in shard.axes:
            at = at * layout.mesh.degree(axis) + layout.mesh.coordinate(rank, axis)
            degree *= layout.mesh.degree(axis)
        if shard.rule == "repeat" and len(units) and degree > len(units):
            at, degree = at * len(units) // degree, len(units)
        width = (len(units) + degree - 1) // degree
        rows = [row for unit in units[at * width : (at + 1) * width] for row in unit]
    return rows


def is_held(layout: Layout, rank: int) -> bool:
    onlys = [p for p in layout.placements if isinstance(p, Only)]
    return all(layout.mesh.coordinate(rank, only.axis) in only.at for only in onlys)


@given(any_layout())
def test_box_equals_cutting_row_by_row(layout):
    for rank in range(layout.mesh.size):
        if not is_held(layout, rank):
            assert layout.box(rank) is None and layout.local_shape(rank) is None
            assert layout.boxes(rank) == () and layout.num_bytes(rank, 2) == 0
            continue
        by_hand = [rows_by_hand(layout, rank, dim) for dim in range(len(layout.shape))]
        assert [list(range(*s.indices(10**6))) for s in layout.box(rank)] == by_hand
        assert layout.local_shape(rank) == tuple(map(len, by_hand))
        assert layout.num_bytes(rank, 2) == 2 * prod(map(len, by_hand))


@given(any_layout())
def test_every_element_is_held_by_exactly_its_replicas(layout):
    held = np.zeros(layout.shape, dtype=int)
    for rank in range(layout.mesh.size):
        for canonical, local in layout.boxes(rank):
            held[canonical] += 1
            assert tuple(s.stop for s in local) == layout.local_shape(rank)
    for element in np.ndindex(*layout.shape):
        box = tuple(slice(i, i + 1) for i in element)
        assert held[element] == len(layout.owners(box)) > 0


@given(any_layout())
def test_replicas_are_the_axes_that_do_not_cut(layout):
    copies = layout.mesh.size
    for placement in layout.placements:
        if isinstance(placement, Only):
            copies = copies // layout.mesh.degree(placement.axis) * len(placement.at)
        elif placement.rule == "repeat":
            return  # how often depends on what earlier cuts left: the test above counts
        else:
            copies //= prod(map(layout.mesh.degree, placement.axes))
    held = np.zeros(layout.shape, dtype=int)
    for rank in range(layout.mesh.size):
        for canonical, _ in layout.boxes(rank):
            held[canonical] += 1
    assert (held == copies).all()


@given(any_layout())
def test_layout_survives_json_and_equal_layouts_hash_alike(layout):
    again = Layout.from_dict(json.loads(json.dumps(layout.to_dict())), name="another")
    assert again == layout and hash(again) == hash(layout) and repr(again) == repr(layout)


@given(any_layout())
def test_padded_shape_holds_every_local_shape(layout):
    for rank in range(layout.mesh.size):
        shape = layout.local_shape(rank) or (0,) * len(layout.shape)
        assert all(small <= large for small, large in zip(shape, layout.padded_shape))


def starts_and_stops(layout: Layout, dim: int = 0) -> list[tuple[int, int]]:
    boxes = [layout.box(rank) for rank in range(layout.mesh.size)]
    return [(box[dim].start, box[dim].stop) for box in boxes if box is not None]


def test_fsdp_cuts_ceil_rows_with_a_short_and_empty_end():
    assert starts_and_stops(Layout((5,), Mesh(shard=4), Shard(0, "shard"))) == [
        (0, 2),
        (2, 4),
        (4, 5),
        (5, 5),
    ]


def test_fsdp_cuts_the_slices_that_tp_cut_first():
    layout = Layout((10,), Mesh(shard=2, tp=2), Shard(0, "tp"), Shard(0, "shard"))
    assert starts_and_stops(layout) == [(0, 3), (5, 8), (3, 5), (8, 10)]


def test_joint_axes_cut_as_one_axis():
    layout = Layout((9,), Mesh(shard=2, cp=2), Shard(0, "shard", "cp"))
    assert starts_and_stops(layout) == [(0, 3), (3, 6), (6, 9), (9, 9)]
    in_turn = Layout((9,), Mesh(shard=2, cp=2), Shard(0, "shard"), Shard(0, "cp"))
    assert starts_and_stops(in_turn) == [(0, 3), (3, 5), (5, 7), (7, 9)]


def test_kv_heads_repeat_on_neighbours_when_there_are_more_ranks():
    layout = Layout((6, 7), Mesh(tp=6), Shard(0, "tp", units=3, rule="repeat"))
    assert starts_and_stops(layout) == [(0, 2), (0, 2), (2, 4), (2, 4), (4, 6), (4, 6)]
    assert list(layout.owners((slice(2, 3), slice(0, 1)))) == [2, 3]


def test_a_world_of_one_holds_everything():
    assert Layout((3, 0, 2), Mesh()).local_shape(0) == (3, 0, 2)
    assert Layout((), Mesh()).num_bytes(0, 4) == 4


@pytest.mark.parametrize(
    ("make", "code", "legal"),
    [
        (lambda: Layout((32,), Mesh(tp=3), Shard(0, "tp", rule="even")), "divide", [2, 4]),
        (lambda: Layout((48,), Mesh(tp=7), Shard(0, "tp", units=6, rule="repeat")), "divide", [6]),
        (lambda: Layout((32,), Mesh(tp=2), Shard(0, "tp", units=5)), "divide", [4]),
        (
            lambda: Layout((9,), Mesh(a=2, b=2), Shard(0, "a"), Shard(0, "b", units=3)),
            "divide",
            [],
        ),
        (lambda: Layout((32,), Mesh(tp=2), Shard(1, "tp")), "rank", [0]),
        (lambda: Layout((32,), Mesh(tp=2), Shard(0, "tp"), Only("tp", 0)), "axis", []),
        (lambda: Only("pp"), "axis", []),
        (lambda: Shard(0, "tp", rule="evenly"), "rule", ["even"]),
    ],
)
def test_illegal_layouts_name_the_nearest_legal_values(make, code, legal):
    with pytest.raises(PlanError) as caught:
        make()
    assert caught.value.code == f"layout/{code}"
    assert list(caught.value.legal)[: len(legal)] == legal


def test_unknown_axes_and_coordinates_are_refused():
    with pytest.raises(JobError, match="nearest legal values: shard"):
        Layout((4,), Mesh(shard=2), Shard(0, "shards"))
    with pytest.raises(JobError, match="coordinate pp = 2"):
        Layout((4,), Mesh(pp=2), Only("pp", 2))
    with pytest.raises(JobError, match="rank = 2"):
        Layout((4,), Mesh(pp=2)).box(2)


def test_error_names_the_tensor():
    with pytest.raises(PlanError, match=r"k_proj dim 0 over tp\+cp = 4: 2 units"):
        Layout((8,), Mesh(tp=2, cp=2), Shard(0, "tp", "cp", units=2, rule="even"), name="k_proj")


def test_projections_follow_the_tensor_they_accompany():
    mesh = Mesh(shard=3, tp=2, pp=2)
    rows = Shard(0, "tp", units=5 * 2, rule="even")
    weight = Layout((40, 24), mesh, rows, Shard(1, "shard"), Only("pp", 1))
    bias = weight.project((40,), (0,))
    factor_a, factor_b = weight.project((4, 24), (None, 1)), weight.project((40, 4), (0, None))
    scales = weight.project((10, 24), (0, 1))  # one per unit of 4 rows
    for rank in range(mesh.size):
        box = weight.box(rank)
        if box is None:
            assert bias.box(rank) is None and factor_a.box(rank) is None
            continue
        assert bias.box(rank) == (box[0],)
        assert factor_a.box(rank) == (slice(0, 4), box[1])
        assert factor_b.box(rank) == (box[0], slice(0, 4))
        assert scales.box(rank)[0] == slice(box[0].start // 4, box[0].stop // 4)
    with pytest.raises(PlanError, match="has to be the 24 of dim 1"):
        weight.project((40, 3), (0, 1))


def fused_qkv(mesh: Mesh, num_kv_heads: int = 2) -> tuple[dict[str, np.ndarray], Fused]:
    """4 query heads of 3 channels, D = 5, grouped by key-value head as Megatron stores them."""
    num_rows = {"q": 12, "k": 3 * num_kv_heads, "v": 3 * num_kv_heads}
    whole = {n: np.random.default_rng(7).normal(size=(r, 5)) for n, r in num_rows.items()}
    kv = Shard(0, "tp", units=num_kv_heads, rule="repeat")
    parts = {
        "q": Layout((12, 5), mesh, Shard(0, "tp", units=4, rule="even")),
        "k": Layout((3 * num_kv_heads, 5), mesh, kv),
        "v": Layout((3 * num_kv_heads, 5), mesh, kv),
    }
    return whole, Fused(parts)


def test_concatenated_qkv_equals_concatenation_of_slices():
    whole, fused = fused_qkv(Mesh(tp=4))
    for rank in range(4):
        expected = np.concatenate([layout.take(whole[n], rank) for n, layout in fused.parts])
        array = np.full(fused.local_shape(rank), np.nan)
        for name, view in fused.views(rank, array).items():
            view[:] = dict(fused.parts)[name].take(whole[name], rank)
        np.testing.assert_array_equal(array, expected)


def fill(fused: Fused, rank: int, whole: dict[str, np.ndarray]) -> np.ndarray:
    array = np.full(fused.local_shape(rank), np.nan)
    for tensor, canonical, local in fused.boxes(rank):
        array[local] = whole[tensor][canonical]
    return array


def test_grouped_qkv_equals_reshaped_groups_and_views_read_and_write_it():
    mesh = Mesh(tp=1)
    whole, fused = fused_qkv(mesh)
    grouped = Fused(dict(fused.parts), granules=(6, 3, 3))
    groups = [whole[n].reshape(2, -1, 5) for n in ("q", "k", "v")]
    expected = np.concatenate(groups, axis=1).reshape(-1, 5)
    np.testing.assert_array_equal(fill(grouped, 0, whole), expected)
    array = np.zeros_like(expected)
    for name, view in grouped.views(0, array).items():
        view[1:, 0:2] = whole[name][1:, 0:2]
        np.testing.assert_array_equal(view[2:4, :2], whole[name][2:4, :2])


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_interleaved_gate_up_alternates_rows(tp):
    mesh = Mesh(tp=tp)
    whole = {n: np.random.default_rng(i).normal(size=(6, 4)) for i, n in enumerate(("gate", "up"))}
    fused = Fused({n: Layout((6, 4), mesh, Shard(0, "tp")) for n in whole}, granules=(1, 1))
    for rank in range(tp):
        array = fill(fused, rank, whole)
        views = fused.views(rank, array)
        for at, name in enumerate(whole):
            part = dict(fused.parts)[name].take(whole[name], rank)
            np.testing.assert_array_equal(array[at::2], part)
            assert np.shares_memory(views[name], array)


def test_stacked_experts_hold_those_of_their_coordinate():
    mesh = Mesh(ep=2, tp=2)
    whole = {f"experts.{e}": np.full((4, 3), float(e)) for e in range(4)}
    parts = {
        name: Layout((4, 3), mesh, Only("ep", e // 2), Shard(0, "tp"))
        for e, name in enumerate(whole)
    }
    fused = Fused(parts, dim=None)
    assert fused.local_shape(2) == (2, 2, 3)
    np.testing.assert_array_equal(fill(fused, 2, whole)[:, 0, 0], [2.0, 3.0])
    assert set(fused.views(3, np.zeros((2, 2, 3)))) == {"experts.2", "experts.3"}


def test_fused_parts_that_do_not_fit_are_refused():
    mesh = Mesh(tp=2, pp=2)
    row, column = Layout((4, 6), mesh, Shard(0, "tp")), Layout((4, 6), mesh, Shard(1, "tp"))
    for other in (column, Layout((4, 6), Mesh(tp=4)), Layout((4, 6), mesh, Only("pp", 0))):
        with pytest.raises(PlanError, match="b = Layout"):
            Fused({"a": row, "b": other})
    with pytest.raises(PlanError, match="granule of a = 3"):
        Fused({"a": row, "b": row}, granules=(3, 1))
    with pytest.raises(PlanError, match="another number of groups"):
        Fused({"a": row, "b": row}, granules=(1, 2))
    with pytest.raises(PlanError, match="fused dim = 2"):
        Fused({"a": row, "b": row}, dim=2)
