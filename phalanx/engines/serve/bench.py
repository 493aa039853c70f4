"""A process that measures the steps of a serving engine, as `engines.calibrate_serving` asks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, thread_time

import torch
from torch import Tensor

from phalanx.engines.serve.engine import ServeEngine
from phalanx.engines.serve.kv import PagedKv
from phalanx.engines.serve.kv_room import KvLimits
from phalanx.engines.serve.model import PackedDecoder
from phalanx.engines.serve.warm import measure_rates
from phalanx.models.config import DecoderConfig, parse_config
from phalanx.models.spec import canonical_tensors

_RANDOM_VALUES = 1 << 20  # repeated to the size of each tensor: what counts is that it is read
_ALLOWED_S = 2.0  # a forecast is worth more rounds than a start is
_MOST_REQUESTS = 8  # of full length that the cache holds: no step of a measurement reads more


def main(arguments: list[str]) -> int:
    """Task file in, answer file out."""
    task = json.loads(Path(arguments[0]).read_text())
    torch.manual_seed(0)
    if task["threads"]:
        torch.set_num_threads(task["threads"])
    engine = random_engine(parse_config(task["config"]), KvLimits(**task["limits"]), task["device"])
    measure_rates(engine, allowed_s=0.0)  # kernels are compiled and pages touched
    start_s, start_cpu_s = perf_counter(), thread_time()
    rates = measure_rates(engine, allowed_s=_ALLOWED_S)
    cores_frac = (thread_time() - start_cpu_s) / (perf_counter() - start_s)
    Path(arguments[1]).write_text(json.dumps({"rates": rates.to_dict(), "cores_frac": cores_frac}))
    return 0


def random_engine(config: DecoderConfig, limits: KvLimits, device: str = "cpu") -> ServeEngine:
    """An engine with weights of a model's size and no sense."""
    model = PackedDecoder(config, device=device)
    model.update(_random_tensors(config))
    num_tokens = min(limits.max_running, _MOST_REQUESTS) * limits.max_tokens
    kv = PagedKv(config, num_tokens, limits, dtype=getattr(torch, config.dtype), device=device)
    return ServeEngine(model, kv, limits, "random@0")


def _random_tensors(config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    dtype = getattr(torch, config.dtype)
    # of order one after a product with as many rows
    values = (torch.randn(_RANDOM_VALUES) * config.hidden_size**-0.5).to(dtype)
    for name, spec in canonical_tensors(config).items():
        count = spec.num_elements
        repeated = values.repeat(-(-count // len(values)))[:count]
        yield name, repeated.view(spec.shape)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
