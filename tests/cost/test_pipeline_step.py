"""Predicted steps of pipelines, context ranks, cut updates: closed forms, and sums over ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cost.pipeline_memory import terms_of_ranks, units_of_ranks
from phalanx.cost.pipeline_parts import Pipeline
from phalanx.cost.step_memory import units_of
from phalanx.cost.step_saved import saved_of
from phalanx.cost.step_work import Workload
from phalanx.cost.training import predict, rate_key
from phalanx.layout.stage_split import split_layers
from phalanx.mesh import Mesh
from phalanx.models.operators import operators
from phalanx.models.spec import canonical_tensors, small_config
from phalanx.registry import build

CONFIG = small_config(
    vocab_size=101, hidden_size=12, intermediate_size=20, num_layers=8, num_heads=2,
    num_kv_heads=1, head_dim=6, dtype="bfloat16",
)  # fmt: skip
TABLE = 101 * 12  # elements of the embedding


def work(items=4, **changes):
    given = {
        "tokens": 10.0 * items, "counted": 10.0 * items, "num_items": float(items),
        "row_tokens": 10, "row_counted": 10, "longest_row": 10, "document_tokens": 10,
        "num_trained": 1,
    }  # fmt: skip
    return Workload(**(given | changes))


def rates(*, layers_s=1e-3, **others):
    """Operators of layers take this long per token in either pass, all else nothing."""
    listed = operators(CONFIG, document_tokens=10)
    seconds = {f"{rate_key(op, CONFIG)}.{phase}": 0.0 for op in listed for phase in "FB"}
    inside = {rate_key(op, CONFIG) for op in listed if op.op == "linear"}
    seconds |= {f"{key}.{phase}": layers_s for key in inside for phase in "FB"}
    moved = ("all_gather", "reduce_scatter", "all_reduce", "p2p", "add", "add.wide", "copy")
    table = dict.fromkeys(moved, 1e30)
    table |= {"optimizer": 0.0, "runtime": 0.0, "kernels": 0.0} | seconds | others
    return {key: {"value": value} for key, value in table.items()}


def pipeline(ranks, name="1f1b", stages=None, **options):
    order = build("pipeline", {"name": name, **options})
    count = order.num_stages(ranks)
    even = [(CONFIG.num_layers * at // count, CONFIG.num_layers * (at + 1) // count)
            for at in range(count)]  # fmt: skip
    return Pipeline.of(CONFIG, order, ranks, stages or even)


def predicted(ranks=1, items=4, specs=(), mesh=None, staged=None, table=None, **changes):
    staged = staged or (pipeline(ranks) if ranks > 1 else None)
    mesh = mesh or Mesh(pp=ranks)
    table = table or rates()
    return predict(CONFIG, work(items, **changes), specs, table, mesh=mesh, pipeline=staged)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.integers(1, 20), st.sampled_from(["gpipe", "1f1b"]))
def test_equal_stages_take_as_many_passes_as_micro_batches_and_ranks_less_one(ranks, items, name):
    whole = predicted(items=items).step_s
    found = predicted(ranks, items, staged=pipeline(ranks, name))
    assert found.step_s == pytest.approx(whole / ranks * (items + ranks - 1) / items)
    assert found.seconds["pipeline"] == pytest.approx(found.step_s - whole / ranks)


@pytest.mark.parametrize(("waves", "ranks"), [(1, 2), (2, 2), (1, 4)])
def test_waves_idle_as_their_closed_form(waves, ranks):
    """p (T_F + T_B) + (p - 1) T_B / W, with backward passes twice as long as forward ones."""
    staged = pipeline(ranks, "hanayo", waves=waves)
    table = rates()
    for key in list(table):
        if key.endswith(".B"):
            table[key] = {"value": 2 * table[key]["value"]}
    items = ranks
    work_s = predicted(items=items, table=table).step_s / ranks
    found = predicted(ranks, items, staged=staged, table=table)
    idle_s = (ranks - 1) * (2 / 3 * work_s / items) / waves
    assert found.step_s == pytest.approx(work_s + idle_s)


def test_a_mean_number_of_micro_batches_lies_between_whole_ones():
    """The same work in 3.4 micro-batches: six tenths of the way back from 4 to 3."""
    tokens = {"tokens": 40.0, "counted": 40.0}
    found = predicted(2, num_items=3.4, **tokens).step_s
    whole_s = 40 * 7 * 8 * 2e-3 / 2
    assert found == pytest.approx(whole_s * (1 + 1 / 3.4), rel=1e-6)


def test_messages_delay_the_step_by_their_way_there_and_back():
    """Two ranks, one micro-batch: one message each way, of K D bytes a token."""
    slow = predicted(2, 1, table=rates(p2p=240.0)).step_s
    assert slow - predicted(2, 1).step_s == pytest.approx(2 * 10 * 12 * 2 / 240.0)


def test_the_embedding_of_both_ends_is_summed_between_them():
    tied = replace(CONFIG, tied_head=True)
    free = replace(CONFIG, tied_head=False)
    took = []
    for config in (tied, free):
        staged = Pipeline.of(config, build("pipeline", "1f1b"), 2, [(0, 4), (4, 8)])
        listed = {"all_reduce": 1e3}
        found = predict(config, work(), (), rates(**listed), mesh=Mesh(pp=2), pipeline=staged)
        took.append(found.seconds["reduce"])
    assert took == pytest.approx([4 * TABLE / 1e3, 0.0])


def terms(ranks, *, name="1f1b", items=4, config=CONFIG, stages=((0, 4), (4, 8)), specs=()):
    staged = Pipeline.of(config, build("pipeline", name), ranks, stages)
    step = work(items)
    units = units_of_ranks(config, step, specs, Mesh(pp=ranks), 4, staged)
    return terms_of_ranks(config, step, units, staged)


def test_ranks_hold_the_model_once_and_a_tied_table_at_both_ends():
    tied = replace(CONFIG, tied_head=True)
    for config, twice in ((tied, TABLE), (replace(CONFIG, tied_head=False), 0)):
        held = sum(s.num_elements for s in canonical_tensors(config).values()) + twice
        found = terms(2, config=config)
        assert sum(each["weights"] for each in found) == 4 * held
        assert sum(each["optimizer"] for each in found) == 8 * held


def test_a_rank_keeps_as_many_micro_batches_as_ranks_follow_it():
    """1F1B: two on the first of two ranks, one on the last; GPipe: all four on both."""
    one = terms(2, items=1)
    for name, held in (("1f1b", (2, 1)), ("gpipe", (4, 4))):
        found = terms(2, name=name)
        for rank, count in enumerate(held):
            kept = found[rank]["activations"] / one[rank]["activations"]
            assert kept == pytest.approx(count)
    assert one[0]["logits"] == 0.0 < one[1]["logits"]


def test_one_rank_of_a_pipeline_is_a_plan_without_one():
    alone = Pipeline.whole(CONFIG)
    assert predicted(staged=alone) == predicted()
    assert alone.most_live(0, 3, [5.0]) == 5.0


def test_moments_elsewhere_are_here_a_piece_at_a_time():
    """A model whose moments are smaller than a piece is mapped whole."""
    big = replace(CONFIG, vocab_size=1_000_000)
    for config, mapped in ((CONFIG, None), (big, 1 << 26)):
        staged = Pipeline.whole(config)
        units = units_of_ranks(config, work(), (), Mesh(pp=1), 4, staged)
        (held,) = terms_of_ranks(config, work(), units, staged)
        (away,) = terms_of_ranks(config, work(), units, staged, offloads=True)
        assert away["optimizer"] == (mapped or held["optimizer"]) <= held["optimizer"]
        assert away["weights"] == held["weights"]


def test_every_operator_runs_where_its_tensors_are():
    staged = pipeline(4)
    for op in operators(CONFIG, document_tokens=10):
        for tensor in op.tensors:
            ends = staged.stages_of_module(tensor)
            assert set(staged.stages_of_operator(op)) <= set(ends), op.name


@pytest.mark.parametrize("stage", [1, 2])
def test_a_cut_update_leaves_whole_weights_and_a_part_of_masters_and_moments(stage):
    """Four ranks, bfloat16: 2 + (4 + 8) / 4 bytes per element beside gradients."""
    config = small_config(
        vocab_size=100, hidden_size=12, intermediate_size=20, num_layers=2, num_heads=2,
        num_kv_heads=2, head_dim=8, dtype="bfloat16",
    )  # fmt: skip
    zero = build("data", {"name": "zero", "stage": stage})
    units = units_of(config, work(), [zero], Mesh(shard=4), 4)
    elements = sum(spec.num_elements for spec in canonical_tensors(config).values())
    assert sum(unit.stored for unit in units) == 2 * elements + 4 * elements / 4
    assert sum(unit.updated for unit in units) == elements / 4
    assert {unit.reduces_always for unit in units} == {stage == 2}


def test_context_ranks_share_the_tokens_and_what_is_cut():
    """Half the seconds on two ranks, and of weights that two ranks shard a quarter."""
    rows = {"longest_row": 10_000}  # so that a step is fullest at the loss
    whole, half = predicted(**rows), predicted(context_degree=2, mesh=Mesh(cp=2), **rows)
    assert half.step_s == pytest.approx(whole.step_s / 2)
    assert half.terms["activations"] == pytest.approx(whole.terms["activations"] / 2)
    fsdp = build("data", "fsdp")
    mesh = Mesh(shard=2, cp=2)
    units = units_of(CONFIG, work(context_degree=2), [fsdp], mesh, 4)
    alike = units_of(CONFIG, work(), [fsdp], Mesh(shard=4), 4)
    assert [unit.stored for unit in units] == [unit.stored for unit in alike]


def test_gathered_keys_travel_for_every_layer_and_come_back_as_float32_sums():
    """Of the whole row in the full layer, of a rank's half where a window is longer than the row:
    2 g heads in 2 bytes forward, in 4 backward; half a price of all-reduces."""
    spec = build("context", "all_gather")
    found = predicted(specs=[spec], context_degree=2, mesh=Mesh(cp=2), table=rates(all_reduce=1e6))
    heads = 2 * 1 * 6
    tokens = CONFIG.layer_kinds.count("full") * 40 + CONFIG.layer_kinds.count("sliding") * 20
    assert found.seconds["context"] == pytest.approx(tokens * heads * (2 + 4) / 2 / 1e6)


def test_stages_weighed_as_layers_end_sooner_than_equal_ones_beside_a_large_head():
    """A head of 4 layers' work: split by weight the last stage has fewer layers."""
    table = rates()
    head = next(rate_key(op, CONFIG) for op in operators(CONFIG, document_tokens=10)
                if op.op == "head")  # fmt: skip
    table |= {f"{head}.{phase}": {"value": 28e-3} for phase in "FB"}
    wide = replace(CONFIG, vocab_size=4000)
    weighed = [(stage.start, stage.stop) for stage in split_layers(wide, 2)]
    assert weighed[0][1] > 4
    order = build("pipeline", "1f1b")
    took = [
        predicted(2, staged=Pipeline.of(CONFIG, order, 2, stages), table=table).step_s
        for stages in (weighed, [(0, 4), (4, 8)])
    ]
    assert took[0] < took[1]


def test_weight_gradients_put_off_keep_the_gradients_that_they_are_made_of():
    """ZB-H1 on the last of two ranks: F0 I0 F1 I1 W0. Before W0 it keeps both micro-batches, and of
    both what its trained operators put out, once more."""
    one = terms(2, items=1)[1]["activations"]
    found = terms(2, name="zero_bubble")
    out = sum(
        op.out_bytes_per_token
        for op in operators(CONFIG, document_tokens=10)
        if op.num_trained and op.op != "head" and (op.layer is None or op.layer >= 4)
        and op.name != "model.embed_tokens"
    )  # fmt: skip
    assert found[1]["activations"] == pytest.approx(2 * (one + 10 * out))
    assert found[0]["activations"] == pytest.approx(terms(2)[0]["activations"])


def test_a_weight_pass_has_its_whole_stage_again():
    """Full recomputation in two parts: beside inputs of layers the stage's own, not one layer's."""
    staged = Pipeline.of(CONFIG, build("pipeline", "zero_bubble"), 2, [(0, 4), (4, 8)])
    units = units_of_ranks(CONFIG, work(), (), Mesh(pp=2), 4, staged)
    found = {
        mode: terms_of_ranks(CONFIG, work(), units, staged, recompute=mode)[1]["activations"]
        for mode in ("none", "full")
    }
    parts = [lambda op, stage=stage: staged.runs(stage, op) for stage in (0, 1)]
    kept = {mode: saved_of(CONFIG, work(), mode, parts)[1].kept for mode in found}
    assert found["none"] - found["full"] == pytest.approx(10 * (kept["none"] - kept["full"]))
