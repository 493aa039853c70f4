"""Which stages a rank of a pipeline holds, and what is refused; no process is started."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.engines.stages import BoundStages, bind_stages
from phalanx.engines.trainer_model import bind_model
from phalanx.errors import PlanError
from phalanx.job import load_job
from phalanx.models.decoder import Decoder, Part
from phalanx.plan import RoleProgram
from tests.tiny_run import tiny_base

HANAYO = {"family": "pipeline", "name": "hanayo", "waves": 1}
ONE_F_ONE_B = {"family": "pipeline", "name": "1f1b"}


class Axis:
    """One axis of a mesh, and its group."""

    def __init__(self, rank: int, size: int) -> None:
        self.size, self.rank = (lambda: size), (lambda: rank)


class Grid:
    """A mesh of one axis, seen from a rank."""

    def __init__(self, rank: int, size: int, name: str = "pp") -> None:
        self.mesh_dim_names, self._axis = (name,), Axis(rank, size)

    def __getitem__(self, _name: str) -> Axis:
        return self._axis

    def get_group(self, _name: str) -> Axis:
        return self._axis


def role(order: dict[str, Any], stages: Any = ()) -> RoleProgram:
    return RoleProgram(pool="all", mesh={"pp": 2}, order=order, batch={"stages": stages})


def bound(rank: int, order: dict[str, Any], stages: Any = (), **sizes: Any) -> BoundStages:
    return bind_stages(role(order, stages), tiny_base(**sizes), Grid(rank, 2))


def test_a_rank_holds_the_parts_that_the_order_gives_it():
    stages = [[0, 0], [0, 2], [2, 3], [3, 3]]
    first, second = (bound(rank, HANAYO, stages) for rank in (0, 1))
    assert first.parts == {0: Part(range(0, 0), True, False), 3: Part(range(3, 3), False, True)}
    assert second.parts == {1: Part(range(0, 2), False, False), 2: Part(range(2, 3), False, False)}
    assert first.holds_first and first.holds_last
    assert not second.holds_first and not second.holds_last


def test_a_tied_embedding_counts_where_it_embeds():
    names = [bound(rank, ONE_F_ONE_B, tied_head=True).tied for rank in (0, 1)]
    assert names == [frozenset(), {"model.embed_tokens.weight"}]
    assert not any(bound(rank, ONE_F_ONE_B, tied_head=False).tied for rank in (0, 1))
    assert not any(bound(rank, HANAYO, tied_head=True).tied for rank in (0, 1))


def test_both_ends_of_a_tied_embedding_on_one_rank_give_two_gradients():
    for rank, count in ((0, 1), (1, 0)):
        stages = bound(rank, HANAYO, num_layers=4, tied_head=True)
        parts = list(stages.parts.values())
        decoder = Decoder(tiny_base(num_layers=4, tied_head=True), device="meta", parts=parts)
        assert list(stages.uses(decoder).values()) == [2] * count


def test_views_hold_every_parameter_of_a_rank_once():
    stages = bound(0, HANAYO, num_layers=4, tied_head=False)
    parts = list(stages.parts.values())
    decoder = Decoder(tiny_base(num_layers=4, tied_head=False), device="meta", parts=parts)
    held = [p for view in stages.views(decoder).values() for p in view.parameters()]
    assert len(held) == len(set(held)) and set(held) == set(decoder.parameters())


def test_no_pipeline_axis_no_stages():
    assert bind_stages(role(ONE_F_ONE_B), tiny_base(), Grid(0, 2, "shard")) is None
    assert bind_stages(role(ONE_F_ONE_B), tiny_base(), Grid(0, 1)) is None


@pytest.mark.parametrize(
    ("order", "stages", "match"),
    [
        ({}, (), "a pipeline needs an order of its passes"),
        (ONE_F_ONE_B, [[0, 1], [1, 2], [2, 3]], "2 ranks run 2 stages"),
        (ONE_F_ONE_B, [[0, 1], [1, 2]], "the model has 3 layers"),
        (ONE_F_ONE_B, [[0, 2], [1, 3]], "stage 1 must begin at layer 2"),
    ],
)
def test_stages_that_do_not_fit_are_refused(order, stages, match):
    with pytest.raises(PlanError, match=match) as caught:
        bound(0, order, stages)
    assert caught.value.code == "plan/illegal" and caught.value.legal


def test_a_stage_without_anything_to_train_ends_the_backward_pass():
    stages = bound(0, ONE_F_ONE_B, [[0, 0], [0, 3]])
    decoder = Decoder(tiny_base(), parts=list(stages.parts.values())).requires_grad_(False)
    [view] = stages.views(decoder).values()
    hidden_SD = view(torch.tensor([1, 2, 3]))
    hidden_SD.sum().backward()
    assert hidden_SD.requires_grad and decoder.model.embed_tokens.weight.grad is None


def test_sharded_weights_beside_a_pipeline_are_refused_with_what_suits_it():
    fsdp = {"family": "data", "name": "fsdp", "axis": "shard"}
    both = RoleProgram(pool="all", mesh={"pp": 2, "shard": 2}, order=ONE_F_ONE_B, specs=(fsdp,))
    job = load_job(None, {"model.name": "tiny", "data.source": "none"})
    with pytest.raises(PlanError, match="gathers weights at every visit of a stage") as caught:
        bind_model(job, both, tiny_base(), Grid(0, 2))
    assert list(caught.value.legal) == ["zero with stage 1 or 2", "replicate"]
