"""The sections of a job: frozen records whose fields are the keys.

`key(...)` adds what the loader and `phalanx init` need: the meaning, the unit that strings may
carry, the legal words, the range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.hardware.load import MAX_DEVICES

_POLICY = str | Mapping[str, Any]  # its name, or its name and options


def key(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    choices: Sequence[str] = (),
    low: float | None = None,
    high: float | None = None,
    kind: Any = None,
) -> Any:
    """A field of a section.

    Args:
        default: value when neither file nor flag gives one; of a key that is new, what was done
            before there was one: runs of earlier releases go on with it.
        doc: one line for `phalanx init` and `job show`.
        unit: dimension in `units.UNITS`; strings such as "80 GiB" are converted to SI.
        choices: legal words.
        low, high: inclusive range, also of the members of a list or table.
        kind: what is read, where the annotation is wider.
    """
    limits = {"choices": tuple(choices), "low": low, "high": high}
    metadata = {"doc": doc, "unit": unit, "kind": kind} | limits
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Which model."""

    name: str = key("", "folder, Hub name, 'gemma3-270m' (demo extra), 'tiny' or 'toy'")
    dtype: str = key("bfloat16", "of frozen weights", choices=("bfloat16", "float32", "float64"))
    layers: int = key(4, "layers, for 'tiny' and 'toy'", low=1)
    width: int = key(64, "hidden size, for 'tiny' and 'toy'", low=8)
    vocabulary: int = key(2048, "entries, for 'tiny'", low=260)


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Which rows, and what happens to rows that do not fit."""

    source: str = key(
        "python-docs",
        "'python-docs', a .jsonl, .json, .parquet or .txt file, a folder of them, or a Hub name",
    )
    chat_template: str = key("", "file with a jinja2 template ('' = the model's own)")
    max_tokens: int = key(0, "longest row (0: the model's context)", low=0)
    too_long: str = key(
        "error", "what to do with longer rows", choices=("error", "drop", "split", "truncate")
    )
    held_out_frac: float = key(0.05, "share of rows kept for evaluation", low=0.0, high=0.5)
    held_out_source: str = key("", "rows for evaluation from here, instead of a share of `source`")
    max_rows: int = key(0, "use at most so many rows (0: all)", low=0)


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """How it is trained."""

    method: str = key("lora", "what is trained", choices=("lora", "full", "pretrain"))
    steps: int = key(50, "optimizer steps, unless epochs are given", low=1)
    epochs: float = key(0.0, "passes over the rows, instead of steps (0: by steps)", low=0.0)
    global_batch_tokens: int = key(4096, "tokens of one optimizer step, all devices", low=1)
    lr: float = key(1e-3, "peak learning rate (of method full, unless named: 2e-5)", low=0.0)
    schedule: str = key(
        "cosine", "of the learning rate", choices=("cosine", "linear", "constant", "wsd")
    )
    warmup_steps: int = key(5, "linear warm-up", low=0)
    final_lr_frac: float = key(0.1, "learning rate at the end, of the peak", low=0.0, high=1.0)
    decay_frac: float = key(0.2, "last part of the steps that decays ('wsd')", low=0.0, high=1.0)
    weight_decay: float = key(0.0, "of AdamW, on matrices", low=0.0)
    beta1: float = key(0.9, "of AdamW", low=0.0, high=0.9999)
    beta2: float = key(0.95, "of AdamW", low=0.0, high=0.99999)
    master_dtype: str = key(
        "float32", "of weights that are trained", choices=("float32", "bfloat16", "float64")
    )
    clip_norm: float = key(1.0, "limit of the global gradient norm (0: none)", low=0.0)
    lora_rank: int = key(16, "rank of the adapters", low=1)
    lora_alpha: float = key(32.0, "scale: alpha / rank", low=0.0)
    lora_dropout: float = key(0.0, "on the adapters' input", low=0.0, high=0.9)
    lora_targets: tuple = key(
        (),
        "module names or patterns that get an adapter (none: every matrix)",
        kind=tuple[str, ...],
    )
    adapter: str = key("", "PEFT folder to start from, instead of fresh adapters")
    label_smoothing: float = key(
        0.0,
        "share of each target that is spread over the whole vocabulary, in training only",
        low=0.0,
        high=0.9,
    )
    loss: str = key("", "own loss as 'module:function' ('' = cross-entropy)")
    callbacks: tuple = key((), "own callbacks as 'module:class'", kind=tuple[str, ...])
    on_nonfinite: str = key(
        "stop", "what to do with a step whose gradients are not finite", choices=("stop", "skip")
    )
    spike_factor: float = key(
        0.0,
        "a gradient norm above so many times the recent median is a spike (0: none is)",
        low=0.0,
    )
    on_spike: str = key("warn", "what to do with a spike", choices=("warn", "skip", "stop"))
    seed: int = key(0, "of initial values, order of samples and dropout", low=0)
    eval_rows: int = key(64, "held-out rows per evaluation", low=1)
    eval_every: int = key(0, "steps between evaluations (0: before and after only)", low=0)
    early_stop: int = key(0, "evaluations without improvement that end the run (0: none)", low=0)
    keep_best: bool = key(False, "export the weights of the lowest held-out loss, not the last")
    item_tokens: tuple = key(
        (), "tokens of each micro-batch, for 'toy'", kind=tuple[int, ...], low=0
    )


@dataclass(frozen=True, kw_only=True)
class ServeSection:
    """How the result is served."""

    host: str = key("127.0.0.1", "address to listen on")
    port: int = key(8000, "port to listen on (0: one that is free)", low=0, high=65535)
    max_running: int = key(16, "requests in one batch", low=1)
    max_tokens: int = key(2048, "longest prompt plus output", low=8)
    max_step_tokens: int = key(512, "tokens computed in one step, at least max_running", low=1)
    max_queued: int = key(256, "requests that may wait before others are refused (429)", low=0)
    kv_tokens: int = key(0, "tokens in the KV cache (0: what requests need and memory has)", low=0)
    parity_prompts: int = key(20, "held-out prompts on which `run` compares all forms", low=1)
    load_requests: int = key(8, "requests of the load test of `phalanx run`", low=0)
    load_output_tokens: int = key(32, "tokens that each of them asks for", low=1)


@dataclass(frozen=True, kw_only=True)
class ObjectiveSection:
    """What a better plan has more or less of."""

    minimise: str = key("time", "what to rank by", choices=("time", "cost", "memory"))


@dataclass(frozen=True, kw_only=True)
class LimitsSection:
    """What must not be exceeded."""

    memory_bytes: float = key(0.0, "per device (0: what the device has)", unit="bytes", low=0.0)
    time_s: float = key(0.0, "whole job (0: none)", unit="s", low=0.0)


@dataclass(frozen=True, kw_only=True)
class PlanSection:
    """How and where; never changes the result."""

    on: str = key("here", "cluster: 'here', or shorthand such as '8xh100'")
    devices: int = key(
        0, "how many devices to use (0: all of the cluster)", low=0, high=MAX_DEVICES
    )
    mesh: Mapping[str, int] = key({}, "axis sizes, outermost first; must multiply to the devices")
    pipeline: Any = key("1f1b", "schedule: a name, or a table with its options", kind=_POLICY)
    stages: tuple = key(
        (), "layers of each pipeline stage (empty: split by weight)", kind=tuple[int, ...]
    )
    data: Any = key(
        "fsdp",
        "data parallelism: a name, a table, or a list of them",
        kind=_POLICY | list[_POLICY],
    )
    tensor: Any = key("", "tensor parallelism: a name or a table ('' = none)", kind=_POLICY)
    context: Any = key(
        "",
        "context parallelism: a name, a table, or a list of them ('' = none)",
        kind=_POLICY | list[_POLICY],
    )
    serve: Any = key("continuous", "serving scheduler: a name or a table", kind=_POLICY)
    grain: str = key("operator", "of simulation", choices=("operator", "unit", "stage"))
    row_tokens: int = key(0, "longest packed row, i.e. micro-batch (0: chosen here)", low=0)
    recompute: str = key(
        "none",
        "activations computed again in the backward pass",
        choices=("none", "selective", "full"),
    )
    profile_steps: int = key(0, "last steps, of which every operator is recorded", low=0)
    record_steps: int = key(
        0, "first steps whose activations and gradients are summed up by layer", low=0
    )
    checkpoint_every: int = key(0, "steps between checkpoints (0: only when stopped)", low=0)
    keep_checkpoints: int = key(2, "of the last ones", low=1)
    offload: str = key(
        "none",
        "where optimizer states wait between updates",
        choices=("none", "host", "file"),
    )
    check_weights_every: int = key(50, "steps between comparisons of replicas (0: never)", low=0)
    hang_s: float = key(25.0, "silence after which a rank counts as hung", unit="s", low=1.0)
    log_to: tuple = key(
        (),
        "metrics also to these",
        kind=tuple[str, ...],
        choices=("tensorboard", "wandb", "trackio"),
    )
    exports: tuple = key(
        ("huggingface",),
        "formats of the result",
        kind=tuple[str, ...],
        choices=("huggingface", "gguf"),
    )
    costs: Mapping[str, float] = key(
        {}, "seconds per op, instead of the machine's rates (toys)", low=0.0
    )


SECTIONS: dict[str, type] = {
    "model": ModelSection,
    "data": DataSection,
    "train": TrainSection,
    "serve": ServeSection,
    "objective": ObjectiveSection,
    "limits": LimitsSection,
    "plan": PlanSection,
}
