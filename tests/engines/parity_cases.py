"""Run folders of tiny models with adapters, as training leaves them; and their prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch

from phalanx.engines.result import TrainResult
from phalanx.engines.run_folder import write_job
from phalanx.engines.trainer_export import export
from phalanx.job import load_job
from phalanx.models.adapter_folder import lora_of
from phalanx.models.hf import save_folder
from phalanx.models.parameters import initial_values
from phalanx.models.source import model_source
from phalanx.models.spec import DecoderConfig, canonical_tensors, lora_tensors
from tests.models.families import tiny_config

LENGTHS = (3, 19, 1, 34, 11, 11)  # shorter and longer than windows and blocks
NUM_NEW = 12


def prompts(vocab_size: int) -> list[list[int]]:
    """Random ids without the special ones."""
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def weights(config: DecoderConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Layers that matter beside the residual stream, norms that are not the identity."""
    for name, value in initial_values(5, canonical_tensors(config).values()):
        if value.dim() > 1:
            yield name, value * 4
        else:
            yield name, value + torch.linspace(0.0, 0.3, len(value), dtype=value.dtype)


def write_run(folder: Path, family: str, dtype: str, method: str = "lora") -> Path:
    """A run that has ended; the export is written by the trainer's own code."""
    config = tiny_config(family, dtype)
    base = save_folder(folder / "base", config, weights(config))
    flags = {"model.name": str(base), "model.dtype": dtype, "train.method": method}
    job = load_job(None, flags | {"train.lora_rank": 3, "train.lora_alpha": 7.0})
    source, lora = model_source(job, str), lora_of(job, config)
    run = folder / "run"
    run.mkdir()
    write_job(job, run)
    trained: Iterator[tuple[str, torch.Tensor]] = iter(())
    if lora is not None:
        drawn = initial_values(1, lora_tensors(config, lora).values())
        trained = ((name, v if "lora_A" in name else _upward(v)) for name, v in drawn)
    elif method == "full":
        trained = ((name, value * 1.1) for name, value in weights(config))
    model = SimpleNamespace(whole_trainable=lambda: trained, lora=lora)
    process = SimpleNamespace(leads=True, sum=float)
    written = export(model, source, run, process, job)
    result = TrainResult(
        steps=1, num_ranks=1, loss_before=None, loss_after=None, evaluations=(), num_tokens=1,
        num_counted=1, step_s=1.0, tokens_per_s=1.0, **written,
    )  # fmt: skip
    result.save(run)
    return run


def _upward(b_OR: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(b_OR.numel())
    return 0.04 * torch.randn(b_OR.shape, generator=generator)
