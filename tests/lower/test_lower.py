"""Lowering: what each pass adds, exactly, and how the passes compose."""

from collections import Counter
from dataclasses import dataclass

import pytest

from phalanx.action import Alloc, Collective, Compute, Free, Recv, Send
from phalanx.errors import CheckError, PlanError
from phalanx.lower import lower
from phalanx.mesh import Mesh
from phalanx.policies.tensor.megatron import Megatron
from phalanx.policy import Exchange, Order, Rule, Spec, Step
from phalanx.registry import build
from phalanx.workload import split_units, toy_work

WIDTH, ITEM = 8, 4
LAYER_PARAMS = 2 * 2 * WIDTH * 4 * WIDTH  # two blocks of two matrices


@dataclass(frozen=True, kw_only=True)
class Gathered(Spec):
    """A data spec written out, so that this test depends on no policy's defaults."""

    family = "data"
    axis: str = "shard"
    reshard: bool = True
    prefetch: int = 1
    reduce: str = "reduce_scatter"
    when: str = "always"

    def rules(self):
        gathers = tuple(
            Exchange(collective="all_gather", phase=phase, at="before", of="params", when="sharded")
            for phase in ("F", "B")
        )
        reduction = Exchange(
            collective=self.reduce, phase="B", at="after", of="grads", when=self.when
        )
        sharded = self.reduce == "reduce_scatter"
        return (
            Rule(
                pattern="layers.*",
                placement="shard" if sharded else "replicate",
                exchanges=(*gathers, reduction) if sharded else (reduction,),
                reshard=self.reshard,
                prefetch=self.prefetch,
            ),
        )


def labels(actions, *kinds):
    return [a.label for a in actions if isinstance(a, kinds)]


def kinds_of(program, rank=0):
    return Counter(a.operator for a in program.of(rank) if isinstance(a, Collective))


def test_stages_of_one_f_one_b_send_and_receive_as_torch_orders_them():
    work = toy_work(2, (5, 7, 3))
    program = lower(work, Mesh(pp=2), build("pipeline", "1f1b"), grain="stage")
    assert labels(program.of(0), Compute, Send, Recv) == [
        *("0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0"),
        *("0F2", "0SEND_F2", "0RECV_B1", "0B1", "0RECV_B2", "0B2", "O"),
    ]
    sent = {a.label: a.payload_bytes for a in program.of(0) if isinstance(a, Send)}
    assert sent == {f"0SEND_F{m}": n * WIDTH * ITEM for m, n in enumerate((5, 7, 3))}


def test_a_receive_precedes_the_step_that_waits_for_it():
    program = lower(toy_work(4, (5, 7)), Mesh(pp=2), build("pipeline", "gpipe"))
    for rank in (0, 1):
        seen = set()
        for action in program.of(rank):
            assert {w for w in action.after if "RECV" in w} <= seen
            seen.add(action.label)


def test_work_scales_with_tokens_and_backward_is_twice_forward():
    program = lower(toy_work(3, (5, 7)), Mesh(pp=1), build("pipeline", "gpipe"), grain="unit")
    flops = {a.label: a.flops for a in program.of(0) if isinstance(a, Compute)}
    assert flops["0F1/layers.2"] == 7 * 2 * LAYER_PARAMS
    assert flops["0B1/layers.2"] == 2 * flops["0F1/layers.2"]


def test_saved_activations_live_from_forward_to_backward():
    actions = lower(toy_work(2, (5,)), Mesh(pp=1), build("pipeline", "gpipe")).of(0)
    allocated = [a.tensor for a in actions if isinstance(a, Alloc)]
    freed = [a.tensor for a in actions if isinstance(a, Free)]
    assert allocated == freed == ["saved:0.0"]


@pytest.mark.parametrize(("reshard", "gathers"), [(True, 10), (False, 5)])
def test_full_sharding_gathers_twice_when_it_reshards_and_reduces_once(reshard, gathers):
    spec = Gathered(reshard=reshard)
    program = lower(toy_work(5, (9,)), Mesh(shard=2), build("pipeline", "gpipe"), [spec])
    assert kinds_of(program) == {"all_gather": gathers, "reduce_scatter": 5}
    payloads = {a.payload_bytes for a in program.of(0) if isinstance(a, Collective)}
    assert payloads == {LAYER_PARAMS * ITEM}


def test_the_next_gather_is_queued_before_the_reduction_that_shares_its_lane():
    program = lower(toy_work(5, (9,)), Mesh(shard=2), build("pipeline", "gpipe"), [Gathered()])
    lane = labels(program.of(0), Collective)
    for layer in range(1, 4):
        assert lane.index(f"gather:layers.{layer - 1}:B0") < lane.index(f"reduce:layers.{layer}:0")


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_at_most_prefetch_plus_one_units_are_gathered_at_a_time(prefetch):
    spec = Gathered(prefetch=prefetch)
    program = lower(toy_work(6, (9, 4)), Mesh(shard=2), build("pipeline", "gpipe"), [spec])
    starts = {}
    for action in program.of(0):
        if isinstance(action, Alloc) and action.tensor.endswith("/full"):
            starts[action.tensor] = action
    visits = [a for a in program.of(0) if isinstance(a, Free) and a.tensor.endswith("/full")]
    order = [a.label for a in visits]
    for position, free in enumerate(visits):
        gather = free.label.replace("free:", "gather:")
        alloc = next(
            program.of(0)[at - 1]
            for at, a in enumerate(program.of(0))
            if isinstance(a, Collective) and a.label == gather
        )
        allowed = order[position - prefetch - 1] if position > prefetch else None
        waits = order.index(alloc.after[0]) if alloc.after else -1
        assert waits >= (order.index(allowed) if allowed else -1)


def test_padding_to_equal_shards_is_counted():
    program = lower(
        toy_work(1, (9,), width=3), Mesh(shard=7), build("pipeline", "gpipe"), [Gathered()]
    )
    gather = next(a for a in program.of(0) if isinstance(a, Collective))
    up, down = 14 * 3, 7 * 12  # dim 0 of 12 and of 3, padded to multiples of 7
    assert gather.payload_bytes == 2 * (up + down) * ITEM


def test_accumulation_without_communication_reduces_with_the_last_item_only():
    spec = Gathered(when="last")
    program = lower(toy_work(3, (9, 4, 2)), Mesh(shard=2), build("pipeline", "gpipe"), [spec])
    assert {a.item for a in program.of(0) if a.operator == "reduce_scatter"} == {2}


def test_hybrid_sharding_reduces_the_shard_over_replicas():
    specs = [Gathered(), Gathered(axis="replicate", reduce="all_reduce")]
    mesh = Mesh(replicate=2, shard=4)
    program = lower(toy_work(3, (9,)), mesh, build("pipeline", "gpipe"), specs)
    chain = [a for a in program.of(0) if isinstance(a, Collective) and a.layer == "layers.1"]
    scatter, reduce = chain[-2:]
    assert (scatter.operator, reduce.operator) == ("reduce_scatter", "all_reduce")
    assert reduce.payload_bytes == scatter.payload_bytes / 4
    assert reduce.after == (scatter.label,)


def test_tensor_parallelism_exchanges_four_times_a_layer_and_splits_the_work():
    mesh = Mesh(tp=2)
    whole = lower(toy_work(3, (9,)), Mesh(tp=1), build("pipeline", "gpipe"), [Megatron()])
    split = lower(toy_work(3, (9,)), mesh, build("pipeline", "gpipe"), [Megatron()])
    assert kinds_of(whole) == {} and kinds_of(split) == {"all_reduce": 4 * 3}
    assert {a.payload_bytes for a in split.of(0) if isinstance(a, Collective)} == {9 * WIDTH * ITEM}
    half = [a.flops for a in split.of(0) if isinstance(a, Compute) and a.op != "optimizer"]
    full = [a.flops for a in whole.of(0) if isinstance(a, Compute) and a.op != "optimizer"]
    assert half == [flops / 2 for flops in full]


def test_sequence_parallelism_gathers_six_and_scatters_four_times_a_layer():
    spec = Megatron(sequence_parallel=True)
    program = lower(toy_work(3, (8,)), Mesh(tp=2), build("pipeline", "gpipe"), [spec])
    assert kinds_of(program) == {"all_gather": 18, "reduce_scatter": 12}


@pytest.mark.parametrize("grain", ["unit", "operator"])
def test_the_passes_compose_to_three_dimensions(grain):
    mesh = Mesh(pp=2, shard=2, tp=2)
    specs = [Gathered(), Megatron()]
    program = lower(toy_work(4, (9, 4)), mesh, build("pipeline", "1f1b"), specs, grain=grain)
    assert len(program.lists) == 2 and len(program.list_of_rank) == 8
    for rank in range(8):
        # 2 layers, 2 items: gathered in each pass; 4 exchanges per layer and item
        assert kinds_of(program, rank) == {
            "all_gather": 2 * 2 * 2,
            "reduce_scatter": 2 * 2,
            "all_reduce": 4 * 2 * 2,
        }
    gather = next(a for a in program.of(0) if a.operator == "all_gather")
    assert gather.payload_bytes == LAYER_PARAMS * ITEM / 2  # tensor parallelism halves it first


def test_the_optimizer_waits_for_every_reduction():
    program = lower(toy_work(3, (9, 4)), Mesh(shard=2), build("pipeline", "gpipe"), [Gathered()])
    last = program.of(0)[-1]
    assert last.op == "optimizer" and len(last.after) == 6
    assert last.flops == 12 * 3 * LAYER_PARAMS / 2


def test_specs_on_an_axis_that_the_mesh_lacks_are_refused():
    with pytest.raises(PlanError) as caught:
        lower(toy_work(2, (4,)), Mesh(shard=2), build("pipeline", "gpipe"), [Megatron()])
    assert caught.value.code == "plan/illegal" and caught.value.legal == ("shard",)
    with pytest.raises(PlanError):
        lower(
            toy_work(2, (4,)),
            Mesh(shard=2),
            build("pipeline", "gpipe"),
            [Gathered()],
            grain="stage",
        )


def test_more_stages_than_units_are_refused_with_the_limit():
    with pytest.raises(PlanError) as caught:
        lower(toy_work(3, (4,) * 4), Mesh(pp=4), build("pipeline", "1f1b"))
    assert caught.value.code == "order/illegal" and caught.value.legal == (3,)


def test_an_order_that_waits_for_itself_is_refused():
    @dataclass(frozen=True)
    class Backwards(Order):
        def order(self, num_ranks, num_items):
            return [[Step(0, "B", 0), Step(0, "F", 0)], [Step(1, "F", 0), Step(1, "B", 0)]]

    with pytest.raises(CheckError) as caught:
        lower(toy_work(2, (4,)), Mesh(pp=2), Backwards())
    assert caught.value.code == "check/deadlock" and "0B0" in str(caught.value)


def test_units_are_split_into_stages_of_nearly_equal_work():
    units = toy_work(7, (1,)).units
    assert [len(stage) for stage in split_units(units, 3)] == [2, 3, 2]
    assert [len(stage) for stage in split_units(units, 2, (1.0, 0.0))] == [3, 4]
    assert [len(stage) for stage in split_units(units, 7)] == [1] * 7
