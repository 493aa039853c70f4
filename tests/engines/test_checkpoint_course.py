"""A run that crashes and goes on with fewer processes is the run that nothing happened to."""

from __future__ import annotations

import pytest
import torch

from phalanx.data.tokenise import train_tokenizer
from phalanx.engines.callbacks import Callback
from phalanx.models.hf import save_folder
from phalanx.models.parameters import initial_values
from phalanx.models.spec import canonical_tensors, small_config
from tests.engines.train_cases import FSDP, REPLICATE, run_train, values, write_pairs
from tests.ranks import RankFailed

TENSOR = {"family": "tensor", "name": "megatron"}


class CrashAfter(Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, run):
        if run.step == self.step:
            raise RuntimeError("the machine is gone")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return str(write_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl"))


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["alpha beta gamma number 1 2 3"] * 3, 280, root / "tokenizer")
    config = small_config(
        vocab_size=290,
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        window=16,
        dtype="float32",
    )
    fresh = initial_values(3, canonical_tensors(config).values())
    return str(save_folder(root / "base", config, fresh, extras_from=tokenizer))


def crashes(folder, flags, every, at, mesh, specs, resume):
    flags = flags | {"plan.checkpoint_every": every}
    with pytest.raises(RankFailed, match="the machine is gone"):
        run_train(folder, flags, mesh, specs, callbacks=[CrashAfter(at)], resume=resume)


@pytest.mark.dist
@pytest.mark.parametrize("method", ["full", "lora"])
def test_stop_at_37_on_four_go_on_with_two_then_three(tmp_path, source, base_folder, method):
    flags = {"data.source": source, "train.steps": 50, "train.global_batch_tokens": 150}
    flags |= {"train.method": method, "model.name": base_folder, "train.eval_rows": 8}
    flags |= {"model.dtype": "float32"}
    if method == "lora":
        flags |= {"train.lora_rank": 3, "train.lora_dropout": 0.2}
    whole, expected = run_train(tmp_path / "whole", flags)
    folder = tmp_path / "parts"
    crashes(folder, flags, 37, 39, {"replicate": 2, "shard": 2}, (FSDP, REPLICATE), None)
    assert [each.name for each in (folder / "checkpoints").iterdir()] == ["step-00000037"]
    crashes(folder, flags, 9, 47, {"tp": 2}, (TENSOR,), True)
    result, metrics = run_train(folder, flags, {"shard": 3}, resume=True)
    assert values(metrics, "step", "step") == list(range(1, 51))
    samples = values(metrics, "step", "first_sample")
    assert samples == values(expected, "step", "first_sample") and len(set(samples)) == 50
    assert (result.num_tokens, result.num_counted) == (whole.num_tokens, whole.num_counted)
    for kind, key in (("step", "loss"), ("evaluate", "loss")):
        found, wanted = (torch.tensor(values(each, kind, key)) for each in (metrics, expected))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0.0)
