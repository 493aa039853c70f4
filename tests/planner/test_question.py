"""Inverse questions, and what a question may hold."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import JobError, PhalanxError
from phalanx.job import load_job
from phalanx.models.named import named_model
from phalanx.planner.clusters import asked_clusters
from phalanx.planner.largest import largest_of
from phalanx.planner.models import priced_model
from phalanx.planner.question import Question, dollars_of, row_count, total_count
from phalanx.planner.search import answer
from phalanx.planner.sized import sized_plans
from phalanx.planner.sizes import smallest_size
from phalanx.planner.training import Training
from tests.planner.plan_cases import asked, training

QWEN = named_model("qwen3-8b").config


def pretraining(**changes):
    given = {"config": QWEN, "seq_tokens": 4096, "method": "pretrain", "batch_tokens": 1 << 20}
    return Training(**(given | {"epochs": 0.0, "steps": 1000} | changes))


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("8192", 8192), ("8k", 8192), ("16M", 16 * 1024**2), ("1.5k", 1536), ("1_000", 1000)],
)
def test_rows_and_batches_are_counted_as_contexts_are(text, tokens):
    assert row_count(text, "--seq") == tokens


def test_runs_are_counted_in_decimal_units_and_budgets_in_dollars():
    assert total_count("15T") == 15e12 and total_count("2 B") == 2e9
    assert dollars_of("$1,500") == dollars_of("1.5k") == 1500.0 and dollars_of("300 USD") == 300.0


@given(text=st.text(max_size=80), reader=st.sampled_from(["rows", "run", "dollars"]))
def test_any_text_is_a_number_above_zero_or_one_line(text, reader):
    try:
        value = {
            "rows": lambda: row_count(text, "--seq"), "run": lambda: total_count(text),
            "dollars": lambda: dollars_of(text),
        }[reader]()  # fmt: skip
    except PhalanxError as error:
        assert "\n" not in str(error)
    else:
        assert 0 < value < math.inf


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"budget_usd": float("nan")}, "--budget"),
        ({"budget_usd": -1.0}, "--budget"),
        ({"largest": "batch"}, "micro-batch"),
        ({"precision": "int8"}, "fp8"),
        ({"base_bits": 3}, "16"),
        ({"expert_imbalance": 0.5}, "at least 1"),
        ({"total_tokens": 1e9}, "--seq"),
    ],
    ids=str,
)
def test_a_question_that_cannot_be_meant_is_refused(changes, says):
    with pytest.raises(JobError, match=says):
        Question(**changes)


def test_the_fewest_devices_that_meet_a_deadline():
    one = answer(pretraining(), asked(8))
    limit_s = 3600 * one.hours[0] / 3
    found = smallest_size(answer(pretraining(), asked(8), limit_s=limit_s), limit_s=limit_s).found
    number = found.asked.cluster.num_devices
    assert found.verdict == "fits" and 3600 * found.hours[0] <= limit_s and number > 8
    half = answer(pretraining(), asked(number // 2), limit_s=limit_s)
    assert half.verdict != "fits"


def test_a_budget_is_kept_by_few_devices_or_by_none():
    one = answer(pretraining(), asked(8))
    dear = answer(pretraining(), asked(64), budget_usd=one.dollars[0] * 1.05)
    found = smallest_size(dear, budget_usd=dear.budget_usd)
    assert found.found.verdict == "fits" and found.found.dollars[0] <= dear.budget_usd
    poor = smallest_size(dear, budget_usd=one.dollars[0] / 20)
    assert poor.found is None and "costs $" in poor.why_not
    assert poor.to_dict()["found"] is None


def test_contradicting_limits_are_met_by_no_number_of_devices():
    one = answer(pretraining(), asked(8))
    limits = {"limit_s": 3600 * one.hours[0] / 8, "budget_usd": one.dollars[0] / 4}
    found = smallest_size(answer(pretraining(), asked(8), **limits), **limits)
    assert found.found is None and "fast enough" in found.why_not


def test_the_largest_context_fits_and_a_longer_one_does_not():
    config = training("full").config
    seq = config.max_positions // 4

    def least(tokens):
        more = pretraining(
            config=config, method="full", seq_tokens=tokens, batch_tokens=2 * tokens
        )  # a row for each of the two devices
        return sized_plans(more, asked(2).cluster, 1.0).memory.peak_bytes.min()

    limit = float(least(seq)) * 1.001
    found = largest_of("context", answer(training("full"), asked(2), limit_bytes=limit))
    assert seq <= found.tokens < config.max_positions and found.tokens >= found.runnable_tokens
    assert found.runnable_plan.missing == () and found.plan.peak_bytes <= limit
    step = 2 ** (found.tokens.bit_length() - 1) // 8
    assert least(found.tokens) <= limit < least(found.tokens + step)


def test_the_largest_context_is_no_longer_than_the_model_s_positions():
    whole = answer(pretraining(), asked(8))
    found = largest_of("context", whole, QWEN.max_positions)
    assert found.tokens == QWEN.max_positions and "positions" in found.note
    few = largest_of("context", whole, 640)
    assert few.tokens == 640 and "640 tokens" in few.note
    more = largest_of("context", whole)
    assert more.tokens > found.tokens and "not known" in more.note


def test_a_context_below_the_usual_is_found_too():
    def least(tokens):
        more = pretraining(seq_tokens=tokens, batch_tokens=8 * tokens)
        return float(sized_plans(more, asked(8).cluster, 1.0).memory.peak_bytes.min())

    assert least(256) < least(1024)
    limit = (least(256) + least(512)) / 2
    found = largest_of("context", answer(pretraining(), asked(8), limit_bytes=limit))
    assert 256 <= found.tokens < 512


def test_the_largest_micro_batch_fits_and_is_one_that_was_listed():
    whole = answer(pretraining(), asked(8))
    found = largest_of("micro-batch", whole)
    plans = sized_plans(pretraining(), asked(8).cluster, whole.limit_bytes)
    fits = plans.memory.peak_bytes <= whole.limit_bytes
    assert found.tokens == plans.table["row_limit"][fits].max()
    assert found.runnable_tokens == plans.table["row_limit"][fits & plans.runnable()].max()
    assert found.plan.row_limit == found.tokens and found.plan.peak_bytes <= whole.limit_bytes
    assert found.to_dict()["tokens"] == found.tokens


def test_nothing_fits_a_rank_without_memory():
    found = largest_of("micro-batch", answer(pretraining(), asked(8), limit_bytes=1e6))
    assert (found.tokens, found.plan, found.runnable_tokens) == (0, None, 0)


@pytest.mark.parametrize(
    ("name", "is_computed", "most_tokens"),
    [
        ("qwen3-8b", True, 40_960),
        ("meta-llama/Llama-2-7b-hf", True, 0),  # its table has no context
        ("deepseek-ai/DeepSeek-V3", False, 0),
    ],
)
def test_models_are_priced_by_what_is_known_of_them(name, is_computed, most_tokens):
    model = priced_model(load_job(None, {"model.name": name}))
    assert (model.config is not None) == is_computed and model.most_tokens == most_tokens
    assert (model.shape is None) == is_computed and model.source


def test_a_mixed_cluster_has_no_size_of_its_own():
    (mixed,) = asked_clusters("2xh100+2xa100-80g")
    found = smallest_size(answer(pretraining(), mixed), limit_s=1.0)
    assert found.found is None and found.why_not.endswith("--on 8xh100,8xa100-80g")
