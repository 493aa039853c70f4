"""From settings to an engine that can compute: weights, adapters, cache, and what it says of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from phalanx.doctor.machine import available_bytes
from phalanx.engines.serve.engine import ServeEngine
from phalanx.engines.serve.kv import PagedKv
from phalanx.engines.serve.kv_room import KvLimits, kv_tokens
from phalanx.engines.serve.model import PackedDecoder
from phalanx.engines.serve.settings import ServeSettings, require_adapters
from phalanx.engines.serve.warm import measure_rates
from phalanx.errors import JobError, PlanError
from phalanx.models.hf import read_whole
from phalanx.models.spec import DecoderConfig, read_config, weight_bytes
from phalanx.models.weight_names import model_weights
from phalanx.units import format_bytes


def make_engine(settings: ServeSettings) -> ServeEngine:
    """Load a model folder and its adapters, and reserve the cache.

    Raises:
        JobError: as `read_config`, `read_base` and `require_adapters`; `job/bad-value` for a device
            that is not there, or a cache that cannot hold one request of full length.
        PlanError: `plan/memory` when the weights do not fit into the free memory.
    """
    config = read_config(settings.folder)
    config = config.with_dtype(settings.dtype or config.dtype)
    device = _device(settings.device)
    weights = read_base(settings.folder, config)
    require_adapters(settings, config)
    _require_memory(settings, config)
    model = PackedDecoder(config, device=device)
    model.update(weights)
    limits = limits_of(settings)
    kv_dtype = settings.kv_dtype or config.dtype
    num_tokens = kv_tokens(
        config,
        limits,
        kv_dtype=kv_dtype,
        asked=settings.kv_tokens,
        free_bytes=free_bytes(settings.device),
    )
    kv = PagedKv(config, num_tokens, limits, dtype=getattr(torch, kv_dtype), device=device)
    engine = ServeEngine(
        model,
        kv,
        limits,
        f"{settings.model_name}@0",
        max_adapters=settings.max_adapters,
        max_lora_rank=settings.max_lora_rank,
    )
    for name, folder in settings.adapters.items():
        engine.load_adapter(name, folder)
    return engine


def read_base(folder: str, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """The weights of a folder as canonical tensors, read one at a time.

    Raises:
        JobError: at once, from headers: as `weight_names.model_weights`, and `model/tensor` for a
            folder of another model than `config`, whatever the dtypes.
    """
    own = read_config(folder)
    if own.with_dtype(config.dtype) != config:
        rule = "is another model than the one that is served"
        raise JobError("model/tensor", "model folder", folder, rule)
    return read_whole(model_weights(folder, own))


def limits_of(settings: ServeSettings) -> KvLimits:
    """What engine and cache are made for."""
    return KvLimits(
        max_tokens=settings.max_tokens,
        max_running=settings.max_running,
        max_step_tokens=settings.max_step_tokens,
    )


def free_bytes(device: str) -> float:
    """Memory that is free on a device; on the CPU what the container leaves, if that is less."""
    if torch.device(device).type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


def describe(engine: ServeEngine, settings: ServeSettings) -> dict[str, Any]:
    """What the front end knows of the engine, its rates measured now: it must hold no request."""
    kv_bytes = sum(
        tensor.nbytes for pool in engine.kv.pools.values() for tensor in (pool.keys, pool.values)
    )
    return {
        "kind": "ready",
        "weight_version": engine.weight_version,
        "adapters": engine.adapters.versions,
        "max_tokens": settings.max_tokens,
        "max_running": settings.max_running,
        "max_step_tokens": settings.max_step_tokens,
        "max_queued": settings.max_queued,
        "kv_tokens": engine.facts["num_blocks"] * engine.facts["block_tokens"],
        "kv_bytes": kv_bytes,
        "dtype": engine.model.config.dtype,
        "eos_tokens": list(engine.model.config.eos_tokens),
        "vocab_size": engine.model.config.vocab_size,
        "rates": measure_rates(engine).to_dict(),
    }


def _device(name: str) -> torch.device:
    """The device, if torch can use it; a GPU with a number becomes that of the process, which would
    otherwise open the first one too, for pinned memory."""
    legal = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if name not in legal and (name != "cuda" or len(legal) == 1):
        rule = "torch has no such device here"
        raise JobError("job/bad-value", "serve.device", repr(name), rule, legal=legal)
    device = torch.device(name)
    if device.index is not None:
        torch.cuda.set_device(device)
    return device


def _require_memory(settings: ServeSettings, config: DecoderConfig) -> None:
    needed, free = weight_bytes(config), free_bytes(settings.device)
    if needed > free:
        rule = (
            f"its weights take {format_bytes(needed)} in {config.dtype}; "
            f"{format_bytes(free)} are free on {settings.device}"
        )
        raise PlanError("plan/memory", "model folder", settings.folder, rule)
