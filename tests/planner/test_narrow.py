"""What fp8 products would make of the best plan."""

import pytest

from phalanx.models.named import named_model
from phalanx.planner.narrow import has_units, in_fp8
from phalanx.planner.search import answer
from phalanx.planner.training import Training
from tests.planner.plan_cases import asked, training

QWEN = named_model("qwen3-8b").config


def pretraining(**changes):
    given = {"config": QWEN, "seq_tokens": 4096, "method": "pretrain", "batch_tokens": 1 << 18}
    return Training(**(given | {"epochs": 0.0, "steps": 1} | changes))


def test_machines_have_units_for_what_their_files_give_a_rate_for():
    h100, a100 = (asked(1, name).cluster.machine for name in ("h100", "a100-80g"))
    assert has_units(h100, "fp8") and has_units(a100, "bf16") and has_units(a100, "fp16")
    assert not has_units(a100, "fp8") and not has_units(h100, "fp4")


def test_the_same_plan_in_fp8_is_that_of_a_search_in_fp8():
    found = answer(pretraining(), asked(8))
    narrow = in_fp8(found)
    assert narrow.total_s < found.best.total_s
    same = {name: found.best.sized.row[name] for name in ("tensor", "shard", "recompute")}
    assert {name: narrow.sized.row[name] for name in same} == same
    assert "products in fp8" in narrow.sized.missing
    best = answer(pretraining(precision="fp8"), asked(8))
    assert best.fastest.total_s <= narrow.total_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("job", "machine"),
    [(training(), "h100"), (pretraining(), "a100-80g"), (pretraining(precision="fp8"), "h100")],
    ids=["adapters", "no units", "already narrow"],
)
def test_where_it_is_not_to_be_had_nothing_is_said(job, machine):
    assert in_fp8(answer(job, asked(8, machine))) is None
