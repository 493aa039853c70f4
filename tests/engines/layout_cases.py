"""Whole runs of the trainer under layouts that must change nothing."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from tests.engines.train_cases import run_train


def numbers(metrics):
    """Losses of steps and evaluations, then gradient norms."""
    losses = [line["loss"] for line in metrics if line["kind"] in ("step", "evaluate")]
    return torch.tensor([*losses, *(x["grad_norm"] for x in metrics if x["kind"] == "step")])


def answers(result):
    return [(sample["before"], sample["after"]) for sample in result.samples]


def exported(folder):
    return load_file(folder / "export" / "model.safetensors")


def check_layouts(tmp_path, source, base_folder, method, layouts):
    """Losses, answers and weights of these layouts (name -> mesh, specs) are one process's."""
    flags = {"data.source": source, "train.lr": 1e-3}
    if method == "lora":
        flags |= {"model.name": base_folder, "train.method": "lora", "train.lora_rank": 3}
        flags |= {"train.lora_alpha": 12.0, "train.lora_dropout": 0.2, "train.weight_decay": 0.0}
    else:
        flags |= {"model.width": 64}  # two query heads, one key and value head
    result, metrics = run_train(tmp_path / "one", flags)
    expected, weights = numbers(metrics), exported(tmp_path / "one")
    for name, (mesh, specs) in layouts.items():
        folder = tmp_path / name.replace(" ", "")
        other, metrics = run_train(folder, flags, mesh, specs)
        torch.testing.assert_close(numbers(metrics), expected, rtol=1e-5, atol=0.0, msg=name)
        assert answers(other) == answers(result), name
        assert other.num_tokens == result.num_tokens
        found = exported(folder)
        assert found.keys() == weights.keys()
        for weight, value in weights.items():
            torch.testing.assert_close(found[weight], value, rtol=0.0, atol=2e-5, msg=weight)
