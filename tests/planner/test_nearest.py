"""What is nearest to a job that does not fit: each fits, and says how to ask for it."""

from dataclasses import replace

import pytest

from phalanx.hardware import read_machine
from phalanx.hardware.write import machine_toml
from phalanx.models.known import known_shape
from phalanx.models.named import named_model
from phalanx.planner.clusters import asked_clusters
from phalanx.planner.nearest import nearest_that_fit
from phalanx.planner.search import answer
from tests.planner.plan_cases import asked, profile, training

GEMMA = named_model("gemma-4-31b").config


@pytest.fixture(scope="module")
def refused():
    """All weights of a 31B model on two H100: 16 bytes a weight do not fit 137 GiB."""
    return answer(training("full", config=GEMMA), asked(2))


@pytest.fixture(scope="module")
def near(refused):
    return nearest_that_fit(refused)


def test_three_are_named_and_each_of_them_fits(refused, near):
    assert not refused.fits and len(near) == 3
    for each in near:
        again = answer(each.answer.training, each.answer.asked, must_run=True)
        assert again.verdict == "fits"
        assert again.best.sized.peak_bytes == each.answer.best.sized.peak_bytes


def test_other_work_comes_before_more_devices_and_these_before_other_machines(near):
    adapters, more, other = near
    assert adapters.flags == "--lora 16" and adapters.answer.asked.cluster == asked(2).cluster
    assert adapters.answer.training.method == "lora"
    assert more.answer.asked.cluster.machine.name == "h100" and more.flags == "--on 4xh100"
    assert other.answer.asked.cluster.machine.name != "h100"
    assert other.flags == f"--on {other.answer.asked.cluster}"
    assert all(each.answer.best.is_runnable for each in near)


def test_half_the_devices_of_the_nearest_cluster_do_not_fit(near):
    more = near[1].answer
    half = asked(more.asked.cluster.num_devices // 2)
    assert answer(more.training, half, must_run=True).verdict != "fits"


def test_the_other_machine_is_the_cheapest_an_hour(near):
    chosen = near[2].answer.asked.cluster
    rate = chosen.num_devices * chosen.machine.price.value
    for name in ("h200", "b200", "mi325x"):
        for number in (2, 4, 8):
            found = answer(near[2].answer.training, asked(number, name), must_run=True)
            price = number * found.asked.cluster.machine.price.value
            assert found.verdict != "fits" or price >= rate


def test_long_documents_are_left_out_where_only_rows_are_too_long():
    lengths = (20, 30, 40, 50, 120_000)
    job = training(profile=profile(lengths, times=4), batch_tokens=120_000)
    needed = answer(job, asked(1)).smallest
    limit = needed.peak_bytes - 0.9 * needed.terms["activations"]
    found = nearest_that_fit(answer(job, asked(1), limit_bytes=limit), limit_bytes=limit)
    first = found[0]
    assert first.flags == "--data.max_tokens 60000 --data.too_long drop"
    assert "4 left out" in first.change and first.answer.training.profile.longest == 50


def test_what_is_too_slow_gets_more_devices_until_it_is_fast_enough():
    job = training(config=GEMMA, batch_tokens=8192)
    limit_s = 3600 * answer(job, asked(2)).hours[0] / 3
    refused = answer(job, asked(2), limit_s=limit_s)
    assert refused.verdict == "too slow"
    found = nearest_that_fit(refused)
    assert found and found[0].answer.asked.cluster.machine.name == "h100"
    for each in found:
        assert each.answer.fits and 3600 * each.answer.hours[0] <= limit_s
    number = found[0].answer.asked.cluster.num_devices
    assert not answer(job, asked(number // 2), limit_s=limit_s).fits


def test_nothing_is_named_where_nothing_fits():
    job = training("full", config=replace(GEMMA, hidden_size=2**17, intermediate_size=2**18))
    assert nearest_that_fit(answer(job, asked(1)), limit_bytes=1e6) == []


def test_more_devices_of_a_file_are_asked_for_by_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rented.toml").write_text(machine_toml(read_machine("h100")))
    (named,) = asked_clusters("2xrented.toml")
    flags = [each.flags for each in nearest_that_fit(answer(training("full", config=GEMMA), named))]
    assert "--on 4xrented.toml" in flags
    for each in flags:
        if each.startswith("--on"):
            assert asked_clusters(each.removeprefix("--on "))


@pytest.mark.parametrize(("name", "others"), [("t4", []), ("a10", ["a10"])])
def test_no_machine_without_bf16_is_named_for_products_in_bf16(monkeypatch, refused, name, others):
    monkeypatch.setattr("phalanx.planner.nearest.machine_names", lambda: [name])
    kinds = [each.answer.asked.cluster.machine.name for each in nearest_that_fit(refused)]
    assert [kind for kind in kinds if kind != "h100"] == others


def test_more_of_a_mixed_cluster_is_more_of_every_kind():
    """ "64xh100+a100-80g" would be 64 of one kind and one device of the other."""
    (mixed,) = asked_clusters("2xrtx4090+2xa10g")
    refused = answer(whole_8b(), mixed)
    found = [each for each in nearest_that_fit(refused) if each.flags.startswith("--on")]
    (flags,) = [each.flags.removeprefix("--on ") for each in found if "+" in each.flags]
    (again,) = asked_clusters(flags)
    assert again.cluster.num_devices == found[0].answer.asked.cluster.num_devices
    assert {part.num_devices for part in again.mixed.parts} == {again.cluster.num_devices // 2}
    assert found[0].answer.asked.text == flags


def test_rows_are_not_cut_short_to_be_in_time():
    fits = answer(whole_8b(), asked(8))
    late = answer(whole_8b(), asked(8), limit_s=0.8 * 3600 * fits.hours[0])
    assert late.verdict == "too slow"
    assert not any(each.flags.startswith("--seq") for each in nearest_that_fit(late))


def whole_8b():
    known = known_shape("llama-3.1-8b")
    return training(
        "full", config=None, known_shape=known, profile=None, epochs=0.0, steps=100,
        seq_tokens=1024, batch_tokens=2**18,
    )  # fmt: skip
