"""Bytes of resharding, against shards counted one by one as HybridFlow groups ranks."""

from itertools import product

import pytest

from phalanx.cost.weight_sync import reshard, sync_s
from phalanx.errors import PlanError
from phalanx.hardware import read_machine

# (p, t, d, p_g, t_g) -> share of M that a rank receives, from the sheet of the paper's formulas
PUBLISHED = {
    (1, 4, 2, 1, 2): 0.25,
    (1, 8, 2, 1, 2): 0.375,
    (2, 4, 2, 1, 2): 0.375,
    (4, 8, 4, 1, 8): 0.09375,
    (2, 8, 1, 1, 4): 0.1875,
}


def cells(p, t, stage, index, num_stages, num_cuts):
    """Cells of a p x t grid of weights that a shard of another layout holds."""
    deep, wide = p // num_stages, t // num_cuts
    return {(stage * deep + i, index * wide + j) for i, j in product(range(deep), range(wide))}


def received(p, t, pg, tg):
    """Cells that each rank lacks for generation, with strided groups (section 5.3)."""
    found = []
    for pp, tp in product(range(p), range(t)):
        shard = cells(p, t, pp // (p // pg), tp // (t // tg), pg, tg)
        assert (pp, tp) in shard  # its own part is reused in place
        found.append(len(shard) - 1)
    return found


@pytest.mark.parametrize(("layout", "share"), PUBLISHED.items())
def test_every_rank_receives_what_the_formula_and_a_count_of_cells_say(layout, share):
    p, t, d, pg, tg = layout
    names = {"pipeline": p, "tensor": t, "data": d, "serving_pipeline": pg, "serving_tensor": tg}
    found = reshard(1.0, **names)
    assert found.received_bytes == pytest.approx(share)
    assert set(received(p, t, pg, tg)) == {round(share * p * t)}
    assert found.twice_bytes == 0 and found.peak_bytes == pytest.approx(1 / (pg * tg))


def test_other_groupings_gather_a_whole_copy_and_keep_a_part_twice():
    names = {"pipeline": 1, "tensor": 4, "data": 2, "serving_pipeline": 1, "serving_tensor": 2}
    vanilla = reshard(8.0, **names, grouping="consecutive")
    chat = reshard(8.0, **names, grouping="all")
    assert (vanilla.received_bytes, chat.received_bytes) == (6.0, 7.0)
    assert (vanilla.twice_bytes, chat.twice_bytes) == (2.0, 1.0)
    assert vanilla.peak_bytes == chat.peak_bytes == 8.0
    # real counts of four ranks: 0.25 M instead of 0.75 M
    assert reshard(8.0, **names).received_bytes / vanilla.received_bytes == pytest.approx(1 / 3)


def test_degrees_that_do_not_divide_are_refused():
    with pytest.raises(PlanError, match="divide"):
        reshard(1.0, pipeline=1, tensor=4, data=1, serving_pipeline=1, serving_tensor=3)
    with pytest.raises(PlanError, match="grouping"):
        reshard(
            1.0, pipeline=1, tensor=4, data=1, serving_pipeline=1, serving_tensor=2, grouping="x"
        )


def test_packing_takes_what_verl_s_users_count():
    # verl issue 7060: 72B in bf16, 23.5 s of packing and under 2 s on the wire of 8 nodes
    machine, packed = read_machine("h100"), 145e9 / 23.5
    assert float(sync_s(145e9, machine, 8, packed)) == pytest.approx(23.5, abs=0.5)
    assert float(sync_s(145e9, machine, 1, packed)) == pytest.approx(23.5 + 145 / 50)
