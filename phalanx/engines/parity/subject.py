"""What is compared: the model that a run folder holds, in the parts that it was written in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from phalanx.engines.result import TrainResult
from phalanx.engines.run_folder import read_job
from phalanx.errors import JobError
from phalanx.job import Job
from phalanx.models.adapter_folder import lora_of
from phalanx.models.source import ModelSource, model_source
from phalanx.models.spec import DecoderConfig, LoraSpec, read_config


@dataclass(frozen=True)
class Subject:
    """A run whose training has ended.

    Attributes:
        source: base weights and sizes, as the ranks found them.
        lora: of the job, not of the adapter's folder; None: all weights were trained.
        adapter: PEFT folder; None without adapters.
        export: the folder that is served.
    """

    job: Job
    source: ModelSource
    lora: LoraSpec | None
    adapter: Path | None
    export: Path

    @cached_property
    def served(self) -> DecoderConfig:
        """The config of the export; its dtype is the one that is served."""
        return read_config(self.export)

    @property
    def base(self) -> Path:
        """The folder that adapters stand on."""
        assert self.source.folder is not None
        return self.source.folder

    @property
    def exact_dtype(self) -> str:
        """Of the comparison that demands equal tokens."""
        return "float64" if self.served.dtype == "float64" else "float32"

    @property
    def is_rounded(self) -> bool:
        """Whether what is served has fewer digits than what is compared exactly."""
        return self.served.dtype != self.exact_dtype

    @property
    def scheduler(self) -> Any:
        """The job's serving policy."""
        return self.job.plan.serve


def read_subject(folder: str | Path) -> Subject:
    """The subject that a run folder holds.

    Raises:
        JobError: `job/not-found` for a folder without a finished run or without its export; from
            the model's source.
    """
    folder = Path(folder)
    job = read_job(folder)
    source = model_source(job, lambda _text: None)
    if not (folder / "train.json").is_file():
        rule = "holds no finished training to compare with"
        raise JobError("job/not-found", "run folder", folder, rule)
    result = TrainResult.load(folder)
    if not result.export:
        rule = "has exported nothing that could be served; set plan.exports"
        raise JobError("job/not-found", "run folder", folder, rule, legal=["huggingface"])
    lora = lora_of(job, source.config)
    adapter = folder / result.adapter if lora is not None else None
    return Subject(job, source, lora, adapter, folder / result.export)
