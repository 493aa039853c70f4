"""Where a job's model and data come from: a folder, the Hub, the demo package, or from scratch.

No torch: planners ask for the sizes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.data.prepare import DataSettings, small_tokenizer
from phalanx.errors import JobError, PlanError
from phalanx.job import Job
from phalanx.models.demo import DEMO_MODEL, ensure_demo_model
from phalanx.models.hub import hub_folder
from phalanx.models.spec import DecoderConfig, read_config, small_config
from phalanx.models.stored import StoredTensor
from phalanx.models.weight_names import model_weights

_HEAD_DIM = 32
_TINY_WINDOW = 512


@dataclass(frozen=True)
class ModelSource:
    """Sizes, weights and tokenizer of a model.

    Attributes:
        config: sizes; its dtype is the job's.
        folder: model folder with weights; None: they are drawn from the seed.
        tokenizer_folder: where tokenizer.json lies.
        weights: canonical name -> stored tensor, checked against the config; empty without folder.
    """

    config: DecoderConfig
    folder: Path | None
    tokenizer_folder: Path
    weights: Mapping[str, StoredTensor] = field(default_factory=dict)


def data_settings(job: Job, config: DecoderConfig | None = None) -> DataSettings:
    """What decides the samples of a job.

    Args:
        config: of its model, whose context is the limit where the job has none.
    """
    data = job.data
    return DataSettings(
        source=data.source,
        chat_template=data.chat_template,
        max_tokens=data.max_tokens,
        context_tokens=0 if config is None else config.max_positions,
        too_long=data.too_long,
        held_out_frac=data.held_out_frac,
        held_out_source=data.held_out_source,
        max_rows=data.max_rows,
    )


def model_source(
    job: Job, log: Callable[[str], None] = print, *, weights: bool = True
) -> ModelSource:
    """Find the model of a job, downloading or dequantising it on first use.

    Weights are only listed and checked, by their headers; with the method "pretrain" there are
    none, as they are drawn from the seed.

    Args:
        weights: whether they must be there; without, the Hub is asked for the rest only.

    Raises:
        PlanError: `plan/illegal` for 'toy', or when the method needs weights and there are none.
        JobError: `job/not-found`, `model/unknown`, `model/tensor`, `environment/missing`,
            `environment/trust` or `environment/disk` from the source.
    """
    name = job.model.name
    if name == "toy":
        rule = "is a set of numbers to simulate, not a model to train"
        raise PlanError("plan/illegal", "model.name", name, rule, legal=["tiny", DEMO_MODEL])
    is_fresh = job.train.method == "pretrain"
    if name == "tiny":
        if not is_fresh:
            rule = "'tiny' has no weights to start from; train it from scratch"
            raise PlanError(
                "plan/illegal", "train.method", job.train.method, rule, legal=["pretrain"]
            )
        return _tiny(job)
    weights &= not is_fresh
    folder = model_folder(name, log, weights=weights)
    config = read_config(folder)
    config.require_computable()
    stored = model_weights(folder, config) if weights else {}
    held = folder if weights else None
    return ModelSource(config.with_dtype(job.model.dtype), held, folder, stored)


def _tiny(job: Job) -> ModelSource:
    tokenizer = small_tokenizer(job.data.source, job.model.vocabulary)
    num_heads = max(1, job.model.width // _HEAD_DIM)
    config = small_config(
        vocab_size=job.model.vocabulary,
        hidden_size=job.model.width,
        intermediate_size=4 * job.model.width,
        num_layers=job.model.layers,
        num_heads=num_heads,
        num_kv_heads=max(1, num_heads // 2),
        head_dim=_HEAD_DIM,
        window=min(_TINY_WINDOW, job.data.max_tokens or _TINY_WINDOW),
        dtype=job.model.dtype,
        eos_tokens=(1,),
    )
    return ModelSource(config, None, tokenizer)


def model_folder(name: str, log: Callable[[str], None] = print, *, weights: bool = True) -> Path:
    """The folder of a model: 'gemma3-270m', a folder, a .gguf file, or a name of the Hub.

    Raises:
        JobError: as `model_source`.
    """
    if name == DEMO_MODEL:
        return ensure_demo_model(log)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            near = sorted(map(str, path.parent.glob("*.gguf")))[:3]
            raise JobError("job/not-found", "model.name", name, "does not exist", legal=near)
        from phalanx.models.gguf_cache import gguf_folder  # needs torch and the gguf package

        return gguf_folder(path, log)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return hub_folder(name, log, weights=weights)
    rule = "is no folder, no .gguf file, no Hub name (owner/name) and no built-in model"
    raise JobError("job/not-found", "model.name", name, rule, legal=[DEMO_MODEL, "tiny"])
