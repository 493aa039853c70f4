"""Meshes: ranks and coordinates are two names of one thing, in any order of axes."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import JobError
from phalanx.mesh import Mesh
from tests.strategies import meshes


@given(meshes())
def test_rank_and_coordinates_are_inverse(mesh: Mesh):
    assert mesh.size == prod(mesh.sizes)
    for rank in range(mesh.size):
        assert mesh.rank(mesh.coordinates(rank)) == rank
        assert all(mesh.coordinate(rank, a) == at for a, at in mesh.coordinates(rank).items())


@given(meshes())
def test_the_first_axis_is_outermost(mesh: Mesh):
    tuples = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.size)]
    assert tuples == sorted(tuples)


@given(meshes(), st.data())
def test_groups_of_any_axes_partition_the_ranks(mesh: Mesh, data: st.DataObject):
    axes = data.draw(st.permutations(mesh.names))[: data.draw(st.integers(0, len(mesh.names)))]
    groups = list(mesh.groups(axes))
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    assert {len(group) for group in groups} == {prod(mesh.degree(axis) for axis in axes)}
    assert [min(group) for group in groups] == sorted(min(group) for group in groups)
    for group in groups:
        for rank in group:
            assert mesh.group(rank, axes) == group, "the same for each of its members"


@given(meshes())
def test_a_peer_differs_in_one_coordinate_only(mesh: Mesh):
    for rank in range(mesh.size):
        for axis in mesh.names:
            for at in range(mesh.degree(axis)):
                peer = mesh.peer(rank, axis, at)
                assert mesh.coordinates(peer) == mesh.coordinates(rank) | {axis: at}
            assert mesh.group(rank, axis)[mesh.coordinate(rank, axis)] == rank


@given(meshes())
def test_without_axes_the_rest_keeps_its_order(mesh: Mesh):
    for axis in mesh.names:
        rest = mesh.without(axis)
        assert rest.size * mesh.degree(axis) == mesh.size
        assert rest.names == tuple(name for name in mesh.names if name != axis)


def test_order_of_axes_decides_who_is_near():
    assert Mesh(pp=2, tp=2).group(1, "tp") == (0, 1) == Mesh(tp=2, pp=2).group(1, "pp")
    assert Mesh(pp=2, tp=2).group(1, ("tp", "pp")) == (0, 2, 1, 3)
    assert Mesh(pp=2, tp=2) != Mesh(tp=2, pp=2)
    assert len({Mesh(pp=2, tp=2), Mesh({"pp": 2}, tp=2)}) == 1


def test_an_absent_axis_is_one_of_size_one():
    mesh = Mesh(pp=3)
    assert mesh.degree("tp") == 1 and mesh.coordinate(2, "tp") == 0 and mesh.group(2, "tp") == (2,)
    assert Mesh().size == 1 and Mesh().group(0, ()) == (0,)


@pytest.mark.parametrize(
    "axes", [{"1x": 2}, {"a b": 2}, {"x": 0}, {"x": -3}, {"x": True}, {"x": 2.0}]
)
def test_illegal_axes_are_refused(axes: dict):
    with pytest.raises(JobError) as caught:
        Mesh(axes)
    assert caught.value.code == "mesh/axis"


def test_ranks_and_coordinates_outside_are_refused():
    mesh = Mesh(pp=2, tp=3)
    for call in (
        lambda: mesh.coordinates(6),
        lambda: mesh.coordinate(-1, "pp"),
        lambda: mesh.rank({"tp": 3}),
    ):
        with pytest.raises(JobError) as caught:
            call()
        assert caught.value.code == "mesh/rank"
    with pytest.raises(JobError) as caught:
        mesh.rank({"tpp": 1})
    assert caught.value.code == "mesh/axis" and caught.value.legal == ("tp", "pp")


@given(meshes(axes=("shard", "cp", "tp", "pp")), st.integers(1, 24))
def test_shapes_offered_for_other_devices_have_that_many(mesh: Mesh, num_devices: int):
    if mesh.size == num_devices:
        mesh.require_devices(num_devices)
        return
    with pytest.raises(JobError) as caught:
        mesh.require_devices(num_devices)
    assert caught.value.code == "mesh/product"
    assert all(shape.size == num_devices for shape in caught.value.legal)
    assert caught.value.legal or not mesh.names, "there is always a near shape"


def test_shapes_offered_where_replicate_is_the_last_axis_have_that_many():
    with pytest.raises(JobError) as caught:
        Mesh(pp=2, replicate=2).require_devices(3)
    assert all(shape.size == 3 for shape in caught.value.legal)
