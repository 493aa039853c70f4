"""The training engine end to end on tiny models: equal on every world size, exact exports."""

from __future__ import annotations

import pytest
import torch

from phalanx.data.prepare import DataSettings, prepare
from phalanx.engines.run_folder import read_run, write_job
from phalanx.errors import JobError, PlanError, WorldError
from phalanx.job import load_job
from phalanx.models.hf import load_decoder
from phalanx.models.lora import inject
from phalanx.models.parameters import load_parameters
from phalanx.models.peft_folder import load_adapter
from phalanx.models.spec import (
    LoraSpec,
    lora_tensors,
    read_config,
)
from phalanx.ops.loss import counted_cross_entropy
from phalanx.plan import Plan
from phalanx.trace import Trace
from tests.engines.train_cases import (
    FSDP,
    REPLICATE,
    SMALL,
    run_train,
    train_in,
)
from tests.ranks import run_ranks
from tests.tiny_run import write_base, write_pairs


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl")


def trained(tmp_path, source, name="run", mesh=None, specs=(FSDP,), batch=None, **flags):
    """The result of rank 0, and the folder of the run."""
    flags = {"data.source": str(source)} | {k.replace("__", "."): v for k, v in flags.items()}
    folder = tmp_path / name
    return run_train(folder, flags, mesh, specs, batch=batch or {}), folder


def losses(metrics):
    steps = [line["loss"] for line in metrics if line["kind"] == "step"]
    held_out = [line["loss"] for line in metrics if line["kind"] == "evaluate"]
    norms = [line["grad_norm"] for line in metrics if line["kind"] == "step"]
    return torch.tensor([*steps, *held_out, *norms], dtype=torch.float64)


@pytest.mark.dist
def test_losses_do_not_depend_on_ranks_rows_or_placement(tmp_path, source):
    (result, metrics), _ = trained(tmp_path, source, "one", batch={"row_multiple": 1})
    assert result.loss_after < result.loss_before
    expected = losses(metrics)
    layouts = [
        ("two", {"shard": 2}, (FSDP,), {}),
        ("rows", {"shard": 2}, (FSDP | {"reshard_after_forward": False},), {"row_tokens": 40}),
        ("filled", {"shard": 2}, (FSDP,), {"row_multiple": 7}),
        ("copies", {"replicate": 3}, (REPLICATE,), {"row_tokens": 50}),
        ("hybrid", {"replicate": 2, "shard": 2}, (FSDP, REPLICATE), {}),
    ]
    for name, mesh, specs, batch in layouts:
        (other, metrics), _ = trained(tmp_path, source, name, mesh, specs, batch)
        torch.testing.assert_close(losses(metrics), expected, rtol=1e-5, atol=0.0)
        assert other.num_tokens == result.num_tokens and other.num_counted == result.num_counted


@pytest.mark.dist
def test_run_folder_holds_what_the_result_says(tmp_path, source):
    (result, metrics), folder = trained(
        tmp_path, source, mesh={"shard": 2}, plan__profile_steps=1, train__eval_every=2
    )
    assert [step for step, _ in result.evaluations] == [0, 2, 4]
    assert result == type(result).load(folder)
    steps = [line for line in metrics if line["kind"] == "step"]
    assert sum(line["tokens"] for line in steps) == result.num_tokens
    assert steps[1]["lr"] == pytest.approx(1e-3) and steps[0]["lr"] == pytest.approx(5e-4)
    assert result.audit["tokens_in"] == sum(
        result.audit[f"tokens_{part}"] for part in ("trained", "masked", "dropped")
    )
    assert {sample["prompt"][:4] for sample in result.samples} == {"User"}
    trace = Trace.load(folder / "trace.npz")
    spans = trace.where(operator="step")
    assert sorted(zip(spans.column("rank"), spans.column("step"))) == [
        (rank, step) for rank in range(2) for step in range(4)
    ]
    operators = trace.where(rank=1, step=3)  # the last step is the one that is recorded
    in_layers = {(layer, phase) for layer, phase in zip(*map(operators.column, ("layer", "phase")))}
    assert {("model.layers.1", ""), ("model.layers.1", "B")} <= in_layers
    gathers = operators.where(operator="all_gather", axis="shard")
    # two layers, forward and backward of every micro-batch; the root once
    assert len(gathers) == 1 + 2 * 2 * steps[3]["micro_batches"]


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("model"))


LORA = {
    "train__method": "lora",
    "train__lora_rank": 3,
    "train__lora_alpha": 12.0,
    "train__lr": 3e-2,
    "train__weight_decay": 0.0,
}


def held_out_loss(model, folder, source) -> float:
    """Of plain code, one document at a time."""
    data = prepare(DataSettings(source=str(source), max_tokens=96, held_out_frac=0.2), folder)
    total = count = 0
    for index in range(len(data.held_out)):
        sample = data.held_out[index]
        at = torch.tensor(sample.counted).nonzero().flatten()
        tokens = torch.tensor(sample.tokens).long()
        with torch.no_grad():
            hidden = model(tokens)
            total += counted_cross_entropy(
                hidden, model.head_weight, at - 1, tokens[at], num_counted_global=1
            ).item()
        count += len(at)
    return total / count


@pytest.mark.dist
def test_merged_export_has_the_loss_that_training_reported(
    tmp_path, source, base_folder, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (result, _), folder = trained(
        tmp_path, source, mesh={"shard": 2}, model__name=str(base_folder), **LORA
    )
    assert result.loss_after < 0.97 * result.loss_before
    base, merged = load_decoder(base_folder), load_decoder(folder / "export")
    assert held_out_loss(base, base_folder, source) == pytest.approx(result.loss_before, rel=1e-5)
    assert held_out_loss(merged, base_folder, source) == pytest.approx(result.loss_after, rel=1e-5)
    lora, tensors = load_adapter(folder / "adapter")
    inject(base, lora)
    load_parameters(base, tensors.items(), strict=False)
    assert held_out_loss(base, base_folder, source) == pytest.approx(result.loss_after, rel=1e-5)


@pytest.mark.dist
def test_adapters_train_alike_sharded_and_replicated(tmp_path, source, base_folder):
    options = LORA | {"model__name": str(base_folder), "train__lr": 1e-3}
    (_, metrics), _ = trained(tmp_path, source, "one", **options)
    expected = losses(metrics)
    for name, mesh, spec in (
        ("four", {"shard": 4}, FSDP | {"reshard_after_forward": False}),
        ("copies", {"replicate": 2}, REPLICATE),
    ):
        (_, metrics), _ = trained(tmp_path, source, name, mesh, (spec,), **options)
        torch.testing.assert_close(losses(metrics), expected, rtol=1e-5, atol=0.0)


@pytest.mark.dist
def test_frozen_weights_travel_once_and_adapters_once_a_step(tmp_path, source, base_folder):
    spec = FSDP | {"reshard_after_forward": False}
    options = LORA | {"model__name": str(base_folder), "plan__profile_steps": 2}
    _, folder = trained(tmp_path, source, "run", {"shard": 2}, (spec,), **options)
    trace = Trace.load(folder / "trace.npz")
    tensors = lora_tensors(read_config(base_folder), LoraSpec(rank=3, alpha=12.0)).values()
    padded = sum(-(-spec.shape[0] // 2) * 2 * spec.shape[1] for spec in tensors)
    for step in (2, 3):
        of_step = trace.where(rank=0, step=step, axis="shard")
        for kind in ("all_gather", "reduce_scatter"):
            assert of_step.where(operator=kind).column("payload_bytes").tolist() == [4 * padded]


@pytest.mark.dist
def test_dropout_masks_do_not_depend_on_ranks(tmp_path, source, base_folder):
    options = LORA | {"model__name": str(base_folder), "train__lr": 1e-3}
    (_, plain), _ = trained(tmp_path, source, "plain", **options)
    options["train__lora_dropout"] = 0.3
    (_, one), _ = trained(tmp_path, source, "one", **options)
    (_, two), _ = trained(tmp_path, source, "two", {"shard": 2}, **options)
    torch.testing.assert_close(losses(two), losses(one), rtol=1e-5, atol=0.0)
    assert not torch.allclose(losses(one), losses(plain), rtol=1e-4)


def expect_error(rank, world_size, kind, *args):
    with pytest.raises(kind) as caught:
        train_in(rank, world_size, *args)
    return str(caught.value)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("flags", "kind", "told"),
    [
        ({"train.lr": 1e30, "train.clip_norm": 0.0}, WorldError, "is not finite"),
        ({"train.method": "lora"}, PlanError, "'tiny' has no weights to start from"),
        ({"model.name": "toy"}, PlanError, "nearest legal values: tiny"),
        ({"model.name": "no-such-model"}, JobError, "no-such-model: is no folder"),
        ({"data.max_tokens": 12}, JobError, "set data.too_long"),
    ],
)
def test_bad_jobs_end_in_one_clear_line(tmp_path, source, flags, kind, told):
    folder = tmp_path / "run"
    folder.mkdir()
    flags = SMALL | {"data.source": str(source)} | flags
    args = (kind, str(folder), flags, {"shard": 1}, [FSDP], {})
    assert told in run_ranks(expect_error, 1, *args, backend=None)[0]


def test_job_survives_the_run_folder(tmp_path):
    job = load_job(None, SMALL | {"plan.data": {"name": "fsdp", "prefetch": 2}})
    plan = Plan(job="job", job_key="key", hardware={}, pools={}, programs={})
    write_job(job, tmp_path)
    plan.save(tmp_path / "plan.json")
    again, _ = read_run(tmp_path)
    assert again.to_dict() == job.to_dict() and again.result_key == job.result_key
