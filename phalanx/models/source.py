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
from phalanx.models.spec import DecoderConfig, read_config, small_config
from phalanx.models.stored import StoredTensor
from phalanx.models.weight_names import model_weights

_HEAD_DIM = 32
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


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


def data_settings(job: Job) -> DataSettings:
    """What decides the samples of a job."""
    return DataSettings(
        source=job.data.source,
        max_tokens=job.data.max_tokens,
        too_long=job.data.too_long,
        held_out_frac=job.data.held_out_frac,
        max_rows=job.data.max_rows,
    )


def model_source(job: Job, log: Callable[[str], None] = print) -> ModelSource:
    """Find the model of a job, downloading or dequantising it on first use.

    Raises:
        PlanError: `plan/illegal` for 'toy', or when the method needs weights and there are none.
        JobError: `job/not-found`, `model/unknown` or `environment/missing` from the source.
    """
    name = job.model.name
    if name == "toy":
        rule = "is a set of numbers to simulate, not a model to train"
        raise PlanError("plan/illegal", "model.name", name, rule, legal=["tiny", DEMO_MODEL])
    if name == "tiny":
        if job.train.method == "lora":
            rule = "'tiny' has no weights to adapt; train it from scratch"
            raise PlanError("plan/illegal", "train.method", "lora", rule, legal=["pretrain"])
        return _tiny(job)
    folder = _folder(name, log)
    config = read_config(folder)
    weights = model_weights(folder, config)
    return ModelSource(config.with_dtype(job.model.dtype), folder, folder, weights)


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
        window=min(512, job.data.max_tokens),
        dtype=job.model.dtype,
        eos_tokens=(1,),
    )
    return ModelSource(config, None, tokenizer)


def _folder(name: str, log: Callable[[str], None]) -> Path:
    if name == DEMO_MODEL:
        return ensure_demo_model(log)
    if Path(name).is_dir():
        return Path(name)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _from_hub(name, log)
    rule = "is no folder, no Hub name (owner/name) and no built-in model"
    raise JobError("job/not-found", "model.name", name, rule, legal=[DEMO_MODEL, "tiny"])


def _from_hub(name: str, log: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    log(f"fetching {name} from the Hugging Face Hub")
    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        rule = f"cannot be fetched from the Hub: {str(error).splitlines()[0]}"
        raise JobError("job/not-found", "model.name", name, rule) from error
