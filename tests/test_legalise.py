"""The legaliser: whatever is asked, what comes back can be laid out, and nothing legal is lost."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from phalanx.layout.legalise import adapter_specs, layout_of, legalise
from phalanx.mesh import Mesh
from tests.strategies import AXES, meshes, shapes

axis_names = st.sampled_from((*AXES, "unknown"))
specs = st.lists(st.lists(axis_names, max_size=3).map(tuple), max_size=4).map(tuple)


@given(shapes(), specs, meshes())
def test_what_comes_back_has_the_right_rank_divides_and_uses_no_axis_twice(shape, spec, mesh):
    legal, _ = legalise(shape, spec, mesh)
    assert len(legal) == len(shape)
    used = [axis for axes in legal for axis in axes]
    assert len(used) == len(set(used)) and set(used) <= set(mesh.names)
    for size, axes in zip(shape, legal):
        assert size % prod(mesh.degree(axis) for axis in axes) == 0


@given(shapes(), specs, meshes())
def test_a_legal_spec_is_unchanged_and_every_loss_is_told(shape, spec, mesh):
    legal, dropped = legalise(shape, spec, mesh)
    assert legalise(shape, legal, mesh) == (legal, ())
    assert (legal == spec) == (not dropped)
    if len(spec) == len(shape):
        lost = sum(len(axes) for axes in spec) - sum(len(axes) for axes in legal)
        assert len(dropped) == lost


@given(shapes(), specs, meshes())
def test_every_rank_holds_an_equal_part_and_moments_hold_the_same(shape, spec, mesh):
    legal, _ = legalise(shape, spec, mesh)
    parameter, moment = (layout_of(shape, legal, mesh) for _ in range(2))
    assert moment == parameter
    sizes = {prod(parameter.local_shape(rank)) for rank in range(mesh.size)}
    parts = prod(mesh.degree(axis) for axes in legal for axis in axes)
    assert sizes == {prod(shape) // parts}


def test_adapters_follow_the_side_of_their_matrix():
    mesh = Mesh(shard=2, tp=4)
    column, row = (("tp", "shard"), ()), ((), ("tp",))
    (a, b), rank, num_in, num_out = adapter_specs(column), 3, 16, 24
    assert legalise((rank, num_in), a, mesh) == (((), ()), ())
    assert legalise((num_out, rank), b, mesh) == ((("tp", "shard"), ()), ())
    a, b = adapter_specs(row)
    assert legalise((rank, num_in), a, mesh) == (((), ("tp",)), ())
    assert legalise((num_out, rank), b, mesh) == (((), ()), ())


def test_a_spec_of_the_matrix_does_not_fit_a_bias():
    legal, (told,) = legalise((8,), (("tp",), ()), Mesh(tp=2))
    assert legal == ((),) and "names 2 dims of a tensor that has 1" in told
