"""Calibration on two processes of a tiny model: complete, cached, and good for a prediction."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.cost.training import Workload, predict
from phalanx.engines import calibrate as calibration
from phalanx.mesh import Mesh
from phalanx.models.spec import LoraSpec, small_config
from phalanx.policies.data.fsdp import Fsdp
from phalanx.policies.tensor.megatron import Megatron

CONFIG = small_config(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    full_every=2,
    dtype="float32",
)
LORA = LoraSpec(rank=2, alpha=4.0, targets=("q_proj", "down_proj"))
WORK = Workload(
    tokens=90.0,
    counted=40.0,
    num_items=2,
    row_tokens=45,
    row_counted=20,
    longest_row=50,
    document_tokens=15,
    num_trained=1000,
    row_lengths=(45, 50),
    document_lengths=(20, 25, 50),
    target_counts=(20, 24),
    lora_rank=LORA.rank,
    lora_alpha=LORA.alpha,
    lora_targets=LORA.targets,
)


@pytest.mark.dist
@pytest.mark.parametrize("lora", [True, False])
def test_rates_are_enough_for_a_prediction_and_are_kept(tmp_path, monkeypatch, lora):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    work = WORK if lora else replace(WORK, lora_rank=0, context_degree=2)
    table = calibration.calibrate(CONFIG, work, num_processes=2)
    assert 0.0 < table["cores_frac"] <= 1.1
    assert {rate["unit"] for rate in table["rates"].values()} == {
        *("s/token", "s/element", "byte/s", "byte", "s")
    }
    assert 0.1 < table["rates"]["start"]["value"] < table["measured_s"]
    timed = {k: r["value"] for k, r in table["rates"].items() if r["unit"] == "s/token"}
    assert all(value >= 0.0 for value in timed.values())
    assert {key.split(".")[0] for key in timed} == {
        *("embedding", "rope", "norm", "linear", "attention", "gate", "add", "head")
    }
    assert ("linear.32x32.trained.F" in timed) and (("linear.16x32.F" in timed) == lora)
    mesh = Mesh(shard=2) if lora else Mesh(shard=1, cp=2)
    found = predict(CONFIG, work, [Fsdp()], table["rates"], mesh=mesh)
    assert 0.0 < found.step_s < 10.0 and found.peak_bytes > 0.0

    def never(*args, **kwargs):
        raise AssertionError("measured again")

    monkeypatch.setattr(calibration, "launch_local", never)
    assert calibration.calibrate(CONFIG, work, num_processes=2) == table
    with pytest.raises(AssertionError, match="measured again"):
        calibration.calibrate(CONFIG, replace(work, row_tokens=46), num_processes=2)


@pytest.mark.dist
def test_ranks_that_share_products_are_measured_with_their_own_and_wait_for_each_other(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shared = replace(WORK, tensor_degree=2)
    rates = calibration.calibrate(CONFIG, shared, num_processes=2)["rates"]
    assert "linear.16x32.trained.F" in rates  # one of two heads
    found = predict(CONFIG, shared, [Megatron()], rates, mesh=Mesh(tp=2))
    exchanges = 4 * CONFIG.num_layers + 2
    moved = exchanges * WORK.tokens * CONFIG.hidden_size * 4
    assert found.seconds["exchange"] == pytest.approx(moved / rates["all_reduce"]["value"])
