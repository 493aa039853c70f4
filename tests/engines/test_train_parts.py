"""The parts of a training run at work in it: losses, schedules, guard, recomputation, dtypes."""

from __future__ import annotations

import json
from math import ceil

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from phalanx.engines.callbacks import Callback
from phalanx.engines.guard import LEAST_NORMS
from phalanx.engines.schedule import SCHEDULES, learning_rate
from phalanx.models.spec import LoraSpec, canonical_tensors, lora_tensors
from phalanx.trace import Trace
from tests.engines.tensor_cases import MEGATRON, SEQUENCE
from tests.engines.train_cases import FSDP, REPLICATE, SMALL, run_train, values
from tests.ranks import RankFailed
from tests.tiny_run import tiny_base, write_base, write_pairs

TWO = {"shard": 2}
CONFIG = tiny_base()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(write_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(write_base(tmp_path_factory.mktemp("model")))


def numbers(metrics):
    steps = [*values(metrics, "step", "loss"), *values(metrics, "step", "grad_norm")]
    return torch.tensor([*steps, *values(metrics, "evaluate", "loss")], dtype=torch.float64)


# ---- losses --------------------------------------------------------------------------------------


def plain(hidden_ND, head, targets_N, num_counted_global):
    return F.cross_entropy(head(hidden_ND), targets_N, reduction="sum") / num_counted_global


def smoothed(hidden_ND, head, targets_N, num_counted_global):
    logits = head(hidden_ND)
    loss = F.cross_entropy(logits, targets_N, reduction="sum", label_smoothing=0.1)
    return (loss + 1e-4 * logits.logsumexp(-1).square().sum()) / num_counted_global


_calls = [0]


def poisoned(hidden_ND, head, targets_N, num_counted_global):
    """Cross-entropy; on rank 1 the third call has no value."""
    _calls[0] += 1
    loss = plain(hidden_ND, head, targets_N, num_counted_global)
    return loss * float("nan") if _calls[0] == 3 and dist.get_rank() == 1 else loss


def own(name):
    return {"train.loss": f"tests.engines.test_train_parts:{name}"}


@pytest.mark.dist
def test_own_cross_entropy_trains_like_the_built_in(tmp_path, source):
    flags = {"data.source": source}
    _, expected = run_train(tmp_path / "built-in", flags, TWO)
    _, found = run_train(tmp_path / "own", flags | own("plain"), TWO, batch={"row_tokens": 100})
    torch.testing.assert_close(numbers(found), numbers(expected), rtol=1e-5, atol=0.0)


@pytest.mark.dist
def test_a_smoothed_loss_trains_alike_on_any_number_of_ranks(tmp_path, source):
    flags = {"data.source": source, "train.steps": 6, "train.lr": 1e-2} | own("smoothed")
    flags |= {"train.eval_every": 3}
    result, one = run_train(tmp_path / "one", flags)
    _, two = run_train(tmp_path / "two", flags, TWO)
    assert result.loss_after < 0.9 * result.loss_before
    short = (
        [line for line in one if line.get("step", 9) < 3],
        [line for line in two if line.get("step", 9) < 3],
    )
    torch.testing.assert_close(numbers(short[1]), numbers(short[0]), rtol=1e-4, atol=0.0)


def label_smoothed(hidden_ND, head, targets_N, num_counted_global):
    loss = F.cross_entropy(head(hidden_ND), targets_N, reduction="sum", label_smoothing=0.2)
    return loss / num_counted_global


@pytest.mark.dist
def test_smoothed_targets_train_alike_on_any_mesh_and_evaluation_takes_plain_ones(tmp_path, source):
    flags = {"data.source": source, "model.width": 64, "train.steps": 2}
    _, expected = run_train(tmp_path / "own", flags | own("label_smoothed"))
    flags |= {"train.label_smoothing": 0.2}
    for mesh, specs, role in (
        ({"shard": 1}, (FSDP,), {}),
        ({"tp": 2}, (SEQUENCE,), {}),
        ({"pp": 2}, (), {"order": {"family": "pipeline", "name": "1f1b"}}),
    ):
        name = "x".join(mesh)
        _, found = run_train(tmp_path / name, flags, mesh, specs, **role)
        torch.testing.assert_close(numbers(found), numbers(expected), rtol=1e-5, atol=0.0, msg=name)


@pytest.mark.dist
@pytest.mark.parametrize("spec", [MEGATRON, SEQUENCE])
def test_own_cross_entropy_trains_alike_over_a_tensor_axis(tmp_path, source, spec):
    """The head of an own loss gives logits over the whole vocabulary, whoever computes them."""
    flags = {"data.source": source, "model.width": 64}
    _, expected = run_train(tmp_path / "built-in", flags)
    _, found = run_train(tmp_path / "own", flags | own("plain"), {"tp": 2}, [spec])
    torch.testing.assert_close(numbers(found), numbers(expected), rtol=1e-5, atol=0.0)


# ---- schedules -----------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_have_the_rates_of_the_schedule(tmp_path, source, schedule):
    settings = {"schedule": schedule, "warmup_steps": 2, "final_lr_frac": 0.3, "decay_frac": 0.5}
    flags = {"data.source": source, "train.steps": 6, "data.held_out_frac": 0.0}
    flags |= {f"train.{name}": value for name, value in settings.items()}
    _, metrics = run_train(tmp_path / "run", flags)
    assert values(metrics, "step", "lr") == [
        learning_rate(
            step,
            schedule=schedule,
            peak=SMALL["train.lr"],
            warmup_steps=2,
            num_steps=6,
            final_frac=0.3,
            decay_frac=0.5,
        )
        for step in range(6)
    ]


# ---- guard ---------------------------------------------------------------------------------------


@pytest.mark.dist
def test_a_skipped_step_changes_no_weight_on_any_rank(tmp_path, source):
    """The third step has no value: the fourth begins with the weights that the third began with."""
    flags = {"data.source": source, "train.steps": 5, "train.on_nonfinite": "skip"}
    flags |= {"plan.check_weights_every": 1, "train.global_batch_tokens": 150}
    folder = tmp_path / "run"
    mesh, options = {"replicate": 2}, {"specs": [REPLICATE], "batch": {"row_tokens": 150}}
    result, metrics = run_train(
        folder, flags | own("poisoned"), mesh, callbacks=[Weights(folder)], **options
    )
    assert result.num_skipped == 1
    skips = [text for text in values(metrics, "warning", "text") if "was skipped" in text]
    assert len(skips) == 1 and "step 3" in skips[0] and "(1 so far)" in skips[0]
    norms = values(metrics, "step", "grad_norm")
    assert norms[2] != norms[2] and all(norm == norm for norm in (*norms[:2], *norms[3:]))
    sums = json.loads((folder / "sums.json").read_text())
    assert sums[2] == sums[1] and len(set(sums)) == 4


class Weights(Callback):
    """Writes down a sum of all weights after each step."""

    def __init__(self, folder):
        self.folder, self.sums = folder, []

    def on_step(self, run):
        total = sum(p.detach().double().sum().item() for p in run.model.parameters())
        self.sums.append(total)
        if run.leads:
            (self.folder / "sums.json").write_text(json.dumps(self.sums))


class Spike(Callback):
    """Multiplies the weights of the last norm after enough steps, which multiplies gradients."""

    def on_step(self, run):
        if run.step == LEAST_NORMS:
            run.model.model.norm.weight.data.add_(1e4)


@pytest.mark.dist
@pytest.mark.parametrize("what", ["warn", "skip", "stop"])
def test_a_spike_is_warned_of_skipped_or_ends_the_run(tmp_path, source, what):
    flags = {"data.source": source, "train.steps": LEAST_NORMS + 2, "train.spike_factor": 20.0}
    flags |= {"train.on_spike": what, "data.held_out_frac": 0.0}
    folder = tmp_path / "run"
    if what == "stop":
        with pytest.raises(
            RankFailed, match=f"step {LEAST_NORMS + 1} = .*times the median"
        ) as info:
            run_train(folder, flags, callbacks=[Spike()])
        assert info.value.error.code == "train/spike"
        assert (folder / "checkpoints" / f"step-{LEAST_NORMS:08}").is_dir()
        return
    result, metrics = run_train(folder, flags, callbacks=[Spike()])
    texts = values(metrics, "warning", "text")
    assert texts and all("is a spike" in text for text in texts)
    assert result.num_skipped == (len(texts) if what == "skip" else 0)


# ---- callbacks and replicas ----------------------------------------------------------------------


class Broken(Callback):
    def on_step(self, run):
        raise LookupError("no such thing")


class FlipsABit(Callback):
    """A bit of one replica, after a step."""

    def on_step(self, run):
        if run.step == 2 and run.rank == 1:
            weight = run.model.model.layers["1"].mlp.up_proj.weight
            weight.data.view(-1).view(torch.int32)[7] ^= 1 << 20


@pytest.mark.dist
def test_a_callback_that_fails_ends_the_run_under_its_name(tmp_path, source):
    with pytest.raises(RankFailed, match=r"Broken\.on_step = LookupError: no such thing"):
        run_train(tmp_path / "run", {"data.source": source}, callbacks=[Broken()])


@pytest.mark.dist
def test_replicas_that_part_are_found_at_the_next_comparison(tmp_path, source):
    flags = {"data.source": source, "plan.check_weights_every": 3}
    args = {"mesh": {"replicate": 2}, "specs": [REPLICATE]}
    _, metrics = run_train(tmp_path / "good", flags, **args)
    (line,) = (line for line in metrics if line["kind"] == "ranks")
    assert line["step"] == 3 and len(line["rank_s"]) == 2 and min(line["rank_s"]) > 0.0
    with pytest.raises(RankFailed, match=r"layers\.1\.mlp\.up_proj\.weight after step 3") as info:
        run_train(tmp_path / "bad", flags, callbacks=[FlipsABit()], **args)
    assert info.value.error.code == "train/weights"


# ---- recomputation -------------------------------------------------------------------------------


@pytest.mark.dist
def test_recomputation_changes_no_bit_of_a_run(tmp_path, source, base):
    flags = {"data.source": source, "model.name": base, "train.method": "lora", "train.lr": 1e-2}
    flags |= {"train.lora_rank": 3, "train.lora_dropout": 0.2}
    _, expected = run_train(tmp_path / "none", flags, TWO)
    for mode in ("selective", "full"):
        _, found = run_train(tmp_path / mode, flags, TWO, recompute=mode)
        assert torch.equal(numbers(found), numbers(expected)), mode


# ---- dtypes --------------------------------------------------------------------------------------


class Dtypes(Callback):
    """Writes down the dtypes of parameters."""

    def __init__(self, folder):
        self.folder = folder

    def on_start(self, run):
        found = {
            kind: sorted(
                {str(p.dtype) for n, p in run.model.named_parameters() if (".lora_" in n) is of}
            )
            for kind, of in (("adapters", True), ("base", False))
        }
        (self.folder / "dtypes.json").write_text(json.dumps(found))


@pytest.mark.dist
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_weights_have_the_dtypes_asked_for_and_are_reduced_in_float32(
    tmp_path, source, base, method, dtype, master
):
    folder = tmp_path / "run"
    flags = {"data.source": source, "model.name": base, "train.method": method}
    flags |= {"model.dtype": dtype, "train.master_dtype": master, "train.lora_rank": 3}
    flags |= {"train.steps": 3, "plan.profile_steps": 1, "train.global_batch_tokens": 100}
    spec = FSDP | {"reshard_after_forward": False}
    result, metrics = run_train(
        folder, flags, TWO, [spec], callbacks=[Dtypes(folder)], batch={"row_tokens": 100}
    )
    assert torch.isfinite(numbers(metrics)).all() and result.num_skipped == 0
    found = json.loads((folder / "dtypes.json").read_text())
    is_lora = method == "lora"
    assert found["base"] == [f"torch.{dtype if is_lora else master}"]
    assert found["adapters"] == ([f"torch.{master}"] if is_lora else [])
    tensors = (
        lora_tensors(CONFIG, LoraSpec(rank=3, alpha=32.0))
        if is_lora
        else (canonical_tensors(CONFIG))
    )
    padded = sum(
        2 * ceil(each.shape[0] / 2) * each.num_elements // each.shape[0]
        for each in tensors.values()
    )
    rows = Trace.load(folder / "trace.npz").where(rank=0, step=2, axis="shard")
    reduced = rows.where(operator="reduce_scatter").column("payload_bytes")
    assert sum(reduced.tolist()) == 4 * padded
