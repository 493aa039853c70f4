"""The result of training as folders that others read: a PEFT adapter, a Hugging Face model."""

from __future__ import annotations

from pathlib import Path

from phalanx.engines.process import Process
from phalanx.engines.trainer_model import TrainModel
from phalanx.job import Job
from phalanx.models.hf import read_tensors, save_folder
from phalanx.models.lora import merged_tensors, save_adapter
from phalanx.models.source import ModelSource


def export(
    model: TrainModel, source: ModelSource, folder: Path, process: Process, job: Job
) -> dict[str, str]:
    """Gather what was trained on rank 0 and write `export/` (and `adapter/`); all ranks call it.

    Returns:
        Names of the folders written, for `TrainResult`: "export", and "adapter" for lora.
    """
    trained = {name: value for name, value in model.whole_trainable() if process.leads}
    written = {"export": "export"} | ({"adapter": "adapter"} if model.lora else {})
    if process.leads:
        tensors = trained.items()
        if model.lora is not None and source.folder is not None:
            save_adapter(
                folder / "adapter", trained, model.lora, base_model=job.model.name, overwrite=True
            )
            tensors = merged_tensors(read_tensors(source.folder), trained, model.lora)
        save_folder(
            folder / "export",
            source.config,
            tensors,
            extras_from=source.tokenizer_folder,
            overwrite=True,
        )
    process.barrier()
    return written
