"""What the planner makes of cards that people rent by the hour."""

import pytest

from phalanx.hardware import Cluster, read_machine
from phalanx.models.named import named_model
from phalanx.models.spec import LoraSpec
from phalanx.planner.clusters import AskedCluster
from phalanx.planner.search import answer
from phalanx.planner.training import Training

LLAMA = named_model("llama-3.1-8b").config
TOKENS = 65_536
WEIGHT_BYTES = 8.03e9 * 2


def planned(name, devices, method="lora"):
    lora = LoraSpec(rank=16, alpha=16.0) if method == "lora" else None
    job = Training(
        config=LLAMA,
        method=method,
        lora=lora,
        seq_tokens=2048,
        batch_tokens=TOKENS,
        steps=1,
        epochs=0,
    )
    cluster = Cluster(read_machine(name), devices)
    return answer(job, AskedCluster(str(cluster), cluster))


@pytest.mark.parametrize(
    ("name", "devices", "fits"),
    [
        ("t4", 1, False), ("v100-16g", 1, False),  # 16.1 GB of weights alone
        ("t4", 4, True), ("a10", 1, True), ("a30", 1, True), ("rtx-a5000", 1, True),
        ("rtx5090", 1, True), ("a40", 1, True), ("l40", 1, True), ("rtx-6000-ada", 1, True),
    ],
)  # fmt: skip
def test_lora_of_8_b_fits_where_16_gb_of_weights_leave_room(name, devices, fits):
    found = planned(name, devices)
    assert found.fits is fits
    if fits:
        peak = found.best.sized.peak_bytes
        assert WEIGHT_BYTES / devices < peak <= read_machine(name).usable_bytes


def test_all_weights_of_8_b_fit_on_no_card():
    for name in ("a10", "rtx5090", "a40", "l40", "rtx-6000-ada"):
        assert not planned(name, 1, method="full").fits  # 16 bytes a parameter


@pytest.mark.parametrize("name", ["t4", "a10", "rtx-a6000", "rtx5090"])
def test_a_step_is_no_faster_than_its_products_at_the_dense_peak(name):
    devices = 4 if name == "t4" else 1
    found = planned(name, devices)
    flops = 4 * 8.03e9 * TOKENS * 0.9  # forward, and backward without weight gradients; bare head
    peak = devices * read_machine(name).bf16_peak.value
    assert found.best.total_s > flops / peak


def test_faster_cards_have_shorter_steps():
    seconds = [planned(name, 1).best.total_s for name in ("rtx-6000-ada", "l40", "a10")]
    assert seconds == sorted(seconds)


def test_every_card_has_a_price_on_demand():
    names = ("t4", "a10", "a30", "a40", "l40", "rtx-a5000", "rtx-a6000", "rtx-6000-ada", "rtx5090")
    for name in (*names, "v100-16g", "v100-32g"):
        machine = read_machine(name)
        assert machine.price and machine.price_terms == "on demand"
