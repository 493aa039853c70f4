"""PEFT LoRA folders and the adapters of a job, read without torch.

Names: PEFT puts `base_model.model.` before the name that the base repository gives a module, and
`lora_A`, `lora_B` behind it. Facts: peft 0.21, LoraConfig and get_peft_model_state_dict.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from phalanx.errors import JobError, nearest_names, shown
from phalanx.job import Job
from phalanx.job.sections import TrainSection
from phalanx.models.spec import DecoderConfig, LoraSpec, lora_targets, lora_tensors
from phalanx.models.stored import StoredTensor, read_header
from phalanx.models.weight_names import stored_name
from phalanx.strict import read_value

PEFT_PREFIX = "base_model.model."
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# options that the product W x + alpha / rank B A x does not have: their only legal values
_ONLY: dict[str, tuple] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # others change the base weights, so that the adapter fits only a base that is not stored
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
_READ = ("r", "lora_alpha", "lora_dropout", "target_modules", "base_model_name_or_path")
_WITHOUT_EFFECT = (
    "task_type auto_mapping peft_version inference_mode revision layers_to_transform "
    "layers_pattern exclude_modules megatron_core runtime_config eva_config qalora_group_size "
    "ensure_weight_tying"
).split()


@dataclass(frozen=True)
class AdapterFolder:
    """What a PEFT folder holds.

    Attributes:
        lora: its settings; `targets` are whole module names.
        weights: `<canonical module>.lora_A.weight` (and lora_B) -> stored tensor.
        base_model: what it was trained on, as it was called there.
    """

    lora: LoraSpec
    weights: Mapping[str, StoredTensor]
    base_model: str


def read_adapter(folder: str | Path) -> AdapterFolder:
    """The settings of a PEFT LoRA folder and where its tensors lie.

    Raises:
        JobError: `job/not-found` without its files, `environment/trust` for pickled weights,
            `model/unknown` for an adapter of another kind or an option that is not computed here,
            `model/tensor` for damaged, unpaired or misshapen tensors.
    """
    folder = Path(folder)
    table = _config(folder)
    path = folder / WEIGHTS_FILE
    weights = {_canonical(name): each for name, each in read_header(path).items()}
    modules = sorted({name.rpartition(".lora_")[0] for name in weights})
    lora = LoraSpec(
        rank=_number(folder, table, "r", int),
        alpha=_number(folder, table, "lora_alpha", float),
        dropout=_number(folder, table, "lora_dropout", float, 0.0),
        targets=tuple(modules),
    )
    if not modules:
        raise JobError("model/tensor", str(path), None, "holds no adapter")
    for module in modules:
        _require_pair(path, module, weights, lora.rank)
    base = table.get("base_model_name_or_path")
    return AdapterFolder(lora, weights, base if isinstance(base, str) else "")


def _config(folder: Path) -> dict[str, Any]:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if (folder / name).is_file():
            continue
        if name == WEIGHTS_FILE and (folder / "adapter_model.bin").is_file():
            rule = (
                "holds its weights only as pickle (adapter_model.bin), which can run code when it "
                "is read; convert it where you trust it: save_pretrained of peft writes safetensors"
            )
            raise JobError("environment/trust", "adapter folder", folder, rule)
        raise JobError("job/not-found", "adapter folder", folder, f"has no {name}")
    path = folder / CONFIG_FILE
    try:
        table = json.loads(path.read_bytes().decode())
    except (OSError, ValueError, RecursionError) as error:
        raise JobError("job/syntax", str(path), None, f"is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise JobError("job/syntax", str(path), shown(table), "must be a JSON object")
    for key, value in table.items():
        legal = _ONLY.get(key, (None, False, "", 0))
        if key in _READ or key in _WITHOUT_EFFECT or value in ([], {}):
            continue
        if not any(value is each or value == each for each in legal):
            rule = "is an option of adapters that is not computed here"
            raise JobError("model/unknown", f"{path}: {key}", shown(value), rule, legal=legal[:1])
    return table


def _number(folder: Path, table: Mapping[str, Any], key: str, kind: Any, default: Any = None):
    where = f"{folder / CONFIG_FILE}: {key}"
    if default is None and key not in table:
        raise JobError("job/missing", where, None, "must be a number")
    return read_value(table.get(key, default), kind, where)


def _canonical(name: str) -> str:
    inner = name.removeprefix(PEFT_PREFIX)
    for prefix in ("model.language_model.", "language_model.model."):
        if inner.startswith(prefix):
            return "model." + inner.removeprefix(prefix)
    return inner


def _require_pair(path: Path, module: str, weights: Mapping[str, StoredTensor], rank: int) -> None:
    for part, dim in (("lora_A", 0), ("lora_B", 1)):
        name = f"{module}.{part}.weight"
        if name not in weights:
            rule, near = "is missing", [each for each in weights if each.startswith(module)]
            raise JobError("model/tensor", str(path), name, rule, legal=near[:2])
        shape = weights[name].shape
        if len(shape) != 2 or shape[dim] != rank:
            rule = f"must be a matrix of rank {rank}, as {CONFIG_FILE} says"
            raise JobError("model/tensor", f"{path}: {name}", shape, rule)


def adapter_weights(folder: str | Path, config: DecoderConfig) -> Mapping[str, StoredTensor]:
    """As `read_adapter(folder).weights`, with every tensor checked against the model.

    Raises:
        JobError: as `read_adapter`; `model/tensor` for a tensor that the model has no place for.
    """
    adapter = read_adapter(folder)
    specs = lora_tensors(config, _all_matrices(adapter.lora))
    for name, each in adapter.weights.items():
        if name not in specs:
            rule, near = "adapts no matrix of this model", nearest_names(name, specs)
            raise JobError("model/tensor", str(each.path), name, rule, legal=near)
        if each.shape != specs[name].shape:
            rule = f"must have the shape {specs[name].shape}, as the model's config.json says"
            raise JobError("model/tensor", f"{each.path}: {name}", each.shape, rule)
    return adapter.weights


def _all_matrices(lora: LoraSpec) -> LoraSpec:
    return LoraSpec(rank=lora.rank, alpha=lora.alpha, targets=("*",))


def lora_of(job: Job, config: DecoderConfig) -> LoraSpec | None:
    """The adapters of a job; None unless its method is lora.

    With `train.adapter`, keys that the user did not give are the folder's; those that were given
    must agree with it. Dropout is free: it is no part of an adapter's weights.

    Raises:
        JobError: `job/bad-value` for a key that disagrees with the folder; as `adapter_weights`.
    """
    train = job.train
    if train.method != "lora":
        return None
    targets = {"targets": tuple(train.lora_targets)} if train.lora_targets else {}
    asked = LoraSpec(
        rank=train.lora_rank, alpha=train.lora_alpha, dropout=train.lora_dropout, **targets
    )
    if not train.adapter:
        return asked
    adapter_weights(train.adapter, config)
    start = read_adapter(train.adapter).lora
    for key, mine, folders in (
        ("lora_rank", asked.rank, start.rank),
        ("lora_alpha", asked.alpha, start.alpha),
        ("lora_targets", _modules(config, asked), set(start.targets)),
    ):
        if _is_given(job, key) and mine != folders:
            legal: list[object] = [folders]
            if key == "lora_targets":
                legal = [*sorted({name.rpartition(".")[2] for name in start.targets})]
            value, rule = getattr(train, key), f"differs from the adapter in {train.adapter}"
            raise JobError("job/bad-value", f"train.{key}", value, rule, legal=legal)
    dropout = asked.dropout if _is_given(job, "lora_dropout") else start.dropout
    return LoraSpec(rank=start.rank, alpha=start.alpha, dropout=dropout, targets=start.targets)


def _modules(config: DecoderConfig, lora: LoraSpec) -> set[str]:
    return {spec.name.removesuffix(".weight") for spec in lora_targets(config, lora)}


def _is_given(job: Job, key: str) -> bool:
    """Whether the user gave a key of [train]: in a file, as a flag, or in Python."""
    default = next(each.default for each in fields(TrainSection) if each.name == key)
    origin = job.origin.get(f"train.{key}", "default")
    return origin != "default" or getattr(job.train, key) != default


def peft_config(
    lora: LoraSpec, config: DecoderConfig, modules: Iterable[str], prefix: str, base_model: str
) -> dict[str, Any]:
    """`adapter_config.json` for adapters on these canonical modules.

    `target_modules` are the short names ("q_proj") where every module of such a name is adapted
    and the base holds nothing but the decoder; whole names otherwise.
    """
    mine = set(modules)
    kinds = {name.rpartition(".")[2] for name in mine}
    everywhere = _modules(config, LoraSpec(rank=1, alpha=1, targets=tuple(sorted(kinds))))
    is_short = everywhere == mine and prefix == "model."
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(kinds if is_short else {stored_name(m, prefix) for m in mine}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
