"""The result of training as folders that others read: a PEFT adapter, a Hugging Face model, GGUF.

Tensors are gathered one at a time and written at once: no rank ever holds the model. Names, shapes
and dtypes are the base repository's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from torch import Tensor

from phalanx.data.chat import ChatTemplate, has_end_token, has_template
from phalanx.engines.process import Process
from phalanx.engines.trainer_model import TrainModel
from phalanx.errors import JobError, WorldError, nearest_names
from phalanx.job import Job
from phalanx.models.adapter_folder import read_adapter
from phalanx.models.hf import read_whole, save_folder, save_tuned
from phalanx.models.lora import merged_tensors
from phalanx.models.parameters import initial_values
from phalanx.models.peft_folder import StoredAdapters, save_adapter
from phalanx.models.sentencepiece_model import complete_tokenizer
from phalanx.models.source import ModelSource
from phalanx.models.spec import LoraSpec, canonical_tensors
from phalanx.models.stored import stored_tensors
from phalanx.models.weight_names import stored_prefix

FORMATS = ("huggingface", "gguf")
ADAPTER, EXPORT, GGUF = "adapter", "export", "export.gguf"


def require_exports(job: Job, source: ModelSource) -> None:
    """Refuse before the first step what could not be written after the last.

    Raises:
        JobError: `job/bad-value` for an unknown format; `environment/missing` without the gguf
            package; from `gguf_export.require_gguf` for a model that it cannot hold.
    """
    for name in job.plan.exports:
        if name not in FORMATS:
            legal, rule = nearest_names(name, FORMATS), "is no format of exports"
            raise JobError("job/bad-value", "plan.exports", name, rule, legal=legal)
    if "gguf" in job.plan.exports:
        if importlib.util.find_spec("gguf") is None:
            rule = "needs the package gguf; run: pip install 'phalanx-parallel[hf]'"
            raise JobError("environment/missing", "plan.exports", "gguf", rule)
        from phalanx.models.gguf_export import require_gguf

        require_gguf(source.config, source.tokenizer_folder)


def export(
    model: TrainModel, source: ModelSource, folder: Path, process: Process, job: Job
) -> dict[str, str]:
    """Write `export/`, `adapter/` (lora) and `export.gguf` (where asked); all ranks call it.

    Returns:
        Names of what was written, for `TrainResult`: "export", "adapter" for lora, "gguf" where
        asked.

    Raises:
        WorldError: `cli/file` on all ranks, where rank 0 could not write.
    """
    trained, error = model.whole_trainable(), None
    try:
        if process.leads:
            _write(model, source, folder, job, trained)
    except (OSError, JobError) as found:
        error = found
    for _ in trained:  # all ranks gather to the end, also when this one could not write
        pass
    if process.sum(error is not None):
        why = getattr(error, "strerror", None) or error or "as rank 0 says"
        rule = f"cannot be written: {why}"
        raise WorldError("cli/file", "export", folder, rule) from error
    written = {"export": EXPORT} | ({"adapter": ADAPTER} if model.lora else {})
    return written | ({"gguf": GGUF} if "gguf" in job.plan.exports else {})


def _write(
    model: TrainModel,
    source: ModelSource,
    folder: Path,
    job: Job,
    trained: Iterator[tuple[str, Tensor]],
) -> None:
    if model.lora is not None:
        trained = _merged(model.lora, source, folder, job, trained)
    target, base = folder / EXPORT, source.folder
    if base is not None:
        save_tuned(target, base, trained, extras_from=source.tokenizer_folder, overwrite=True)
    else:
        fixed = [spec for spec in canonical_tensors(source.config).values() if not spec.is_trained]
        tensors = chain(trained, initial_values(job.train.seed, fixed))
        extras = source.tokenizer_folder
        save_folder(target, source.config, tensors, extras_from=extras, overwrite=True)
    _write_template(target, job)
    complete_tokenizer(target, source.config.vocab_size)
    if "gguf" in job.plan.exports:
        from phalanx.models.gguf_export import export_gguf  # needs the gguf package

        export_gguf(target, folder / GGUF, name=job.model.name, overwrite=True)


def _merged(
    lora: LoraSpec,
    source: ModelSource,
    folder: Path,
    job: Job,
    adapters: Iterator[tuple[str, Tensor]],
) -> Iterator[tuple[str, Tensor]]:
    """Write `adapter/`; then the adapted matrices, merged, with one in memory at a time."""
    path = save_adapter(
        folder / ADAPTER,
        source.config,
        lora,
        adapters,
        dtype=job.train.master_dtype,
        prefix=stored_prefix(stored_tensors(source.folder)),
        base_model=job.model.name,
        overwrite=True,
    )
    stored = read_adapter(path).weights
    matrices = {f"{name.rpartition('.lora_')[0]}.weight" for name in stored}
    base = {name: each for name, each in source.weights.items() if name in matrices}
    return merged_tensors(read_whole(base), StoredAdapters(stored), lora)


def _write_template(target: Path, job: Job) -> None:
    """The chat template that the model was trained with, where the base has none or another."""
    asked, is_tuned = job.data.chat_template, job.train.method != "pretrain"
    if asked or (is_tuned and not has_template(target) and has_end_token(target)):
        template = ChatTemplate.from_folder(target, asked)
        (target / "chat_template.jinja").write_text(template.source, encoding="utf-8")
